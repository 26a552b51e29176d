"""Exercise 12: byte pairs by count times length.

2.5% more tokens: 387.8 a story, by count 378.4. One merge saves as many tokens as the pair has occurrences,
however long it is, so a step that does not go by count alone saves less. Of the 140 merges 111 make the same
tokens. The rest are, by count, bits of many words ("or", "id", "ir"); by the score, words and halves of words
(" wanted", " upon", " goo"), longer and rarer.

    python exercises/check.py 12 exercises/solutions/12.py
"""

from collections import Counter

PREDICTION = 0.03


def train_variant(counts, n_merges):
    words = [([bytes([byte]) for byte in chunk.encode("utf-8")], n) for chunk, n in counts.items()]
    merges = []
    for _ in range(n_merges):
        pairs = Counter()
        for word, n in words:
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        a, b = max(pairs, key=lambda pair: pairs[pair] * len(pair[0] + pair[1]))
        merges.append((a, b))
        words = [(join(word, a, b), n) for word, n in words]
    return merges


def join(word, a, b):
    """The word with each a, b side by side joined, from the left."""
    joined = []
    for token in word:
        if token == b and joined and joined[-1] == a:
            joined[-1] = a + b
        else:
            joined.append(token)
    return joined
