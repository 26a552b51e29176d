"""Byte-level BPE in one file: what it is, how it is trained and run fast, and how text comes back out.

    text --normalise--> text --split--> chunks --UTF-8--> bytes --merge, or longest match--> token ids

First the definition of byte-pair encoding, some fifteen lines on lists. Then the same, fast: `count_chunks`
counts the chunks of whole documents ("Once", " upon", " a"), `train_bpe` learns the merges, and the
`Tokenizer` it returns encodes (through tiktoken) and decodes. `LongestMatchTokenizer` differs in one step:
instead of merging, it takes the longest token that fits. `StreamDecoder` turns ids into text one by one, and
`encode_chat` puts turns into the format of the chat models. Files are in support/hf_tokenizer.py.

    python tokenizer.py TOKENIZER "text"    shows the pieces of a text

Ids of a tokenizer trained here: the bytes 0..255, the merges in the order they were learned, the special
tokens.
"""

import codecs
import heapq
import os
import re
import sys
import unicodedata
from collections import Counter, defaultdict
from functools import lru_cache

import regex
import tiktoken
from tqdm import tqdm

from support import need
from support.runtime import run_main
from support.settings import CommandLine

# Where text is cut before merging; no token crosses a cut. In turn: the end of a contraction; a word, with one
# character before it that is no letter; up to three digits; other marks, with a space before and line breaks
# behind; line breaks; white space, but for the last before a word. GPT-4's pattern, with contractions spelt out: with
# (?i:) an 's matches the long s (U+017F) too, where engines may differ. It avoids $ and {1,3}+, which Hugging
# Face's engine reads otherwise. One thing stays: Python's `regex`, used in training and for longest match, may
# know a newer Unicode and take for a letter what the others do not.
GPT4_PATTERN = (r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPECIALS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
SILIA_SPECIALS = ("<|end-text|>", "<|actor|>")
ENDS = ("<|endoftext|>", "<|end-text|>", "</s>")  # names of the token that ends a document

# How tokenizer.json, and with it `Tokenizer`, spells bytes: a printable Latin-1 character stands for itself,
# the 68 other bytes take the characters from U+0100 on. A space is "Ġ", a line break "Ċ".
_OTHERS = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
BYTE_TO_CHAR = [chr(256 + _OTHERS.index(byte) if byte in _OTHERS else byte) for byte in range(256)]
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}

# ----------------------------------------------------------------------------------------------------------
# The definition: byte-pair encoding (Gage 1994; Sennrich and others, arXiv:1508.07909) on lists of ids


def count_pairs(words):
    """[(ids of a chunk, how often it occurs), ...] -> Counter of all pairs of neighbouring ids."""
    pairs = Counter()
    for ids, count in words:
        for pair in zip(ids, ids[1:]):
            pairs[pair] += count
    return pairs


def merge(ids, pair, new):
    """Put the id `new` in place of each `pair` of neighbours in ids, from the left."""
    merged = []
    for id in ids:
        if merged and (merged[-1], id) == pair:
            merged[-1] = new
        else:
            merged.append(id)
    return merged


def learn_merges_by_hand(chunks, wanted):
    """Train: join the most frequent pair into a new token, again and again. Counts of chunks -> pairs of ids.

    Of equally frequent pairs, it is the one whose left id is smallest, then whose right id is.
    """
    words = [(list(chunk.encode("utf-8")), count) for chunk, count in chunks.items()]
    merges = []
    while len(merges) < wanted and (pairs := count_pairs(words)):
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        words = [(merge(ids, best, 256 + len(merges)), count) for ids, count in words]
        merges.append(best)
    return merges


def encode_by_hand(chunk, merges):
    """Encode: apply the merges to the bytes of a chunk, in the order in which they were learned. -> ids"""
    ids = list(chunk.encode("utf-8"))
    for new, pair in enumerate(merges, start=256):
        ids = merge(ids, pair, new)
    return ids


def longest_match_by_hand(chunk, tokens):
    """The other way to encode, Silia's: always the longest token that fits. tokens: bytes -> id; -> ids"""
    data, ids = chunk.encode("utf-8"), []
    while data:
        length = max(n for n in range(1, len(data) + 1) if data[:n] in tokens)
        ids.append(tokens[data[:length]])
        data = data[length:]
    return ids


# ----------------------------------------------------------------------------------------------------------
# Training, fast


def count_chunks(documents, pattern=GPT4_PATTERN, nfc=False):
    """Count the chunks of documents -> Counter of str; Counters of the parts of a corpus can be added up.

    Whole documents, not lines: a chunk may hold the line break that a loop over lines would tear off.
    """
    split, counts = regex.compile(pattern), Counter()
    for document in documents:
        for segment in clean_segments(document, nfc):
            counts.update(split.findall(segment))
    return counts


def train_bpe(chunks, vocab_size, specials=SPECIALS, nfc=False, pattern=GPT4_PATTERN, progress=False,
              longest_match=False):
    """Train a Tokenizer of exactly `vocab_size` ids (256 bytes and the specials included) on counted chunks;
    with `longest_match`, a LongestMatchTokenizer of the same vocabulary.

    The merges are those of `learn_merges_by_hand`. Nothing but the counts decides, so neither the order of
    the chunks nor the number of processes counting them matters. `pattern` and `nfc` are what `count_chunks`
    was given, only recorded here. If the text runs out of pairs, the vocabulary is smaller and a line on
    stderr says so. ValueError if vocab_size is too small.
    """
    wanted = vocab_size - 256 - len(specials)
    need(wanted >= 0, f"vocab_size must be at least {256 + len(specials)}: bytes and special tokens.")
    tokens, merges = list(BYTE_TO_CHAR), []
    for left, right in learn_merges(chunks, wanted, progress):
        merges.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    size = len(tokens) + len(specials)
    if size < vocab_size:
        print(f"The text ran out of pairs: {size} tokens instead of {vocab_size}.", file=sys.stderr)
    tokenizer = Tokenizer({token: id for id, token in enumerate(tokens)}, merges,
                          {name: id for id, name in enumerate(specials, len(tokens))}, pattern, nfc)
    if longest_match:
        return LongestMatchTokenizer(tokenizer.vocab, tokenizer.specials, pattern, nfc)
    return tokenizer


def learn_merges(chunks, wanted, progress):
    """Yield up to `wanted` pairs of ids, in merging order: `learn_merges_by_hand`, without counting anew.

    Three things make it fast. A merge changes the counts of the pairs around it and no others, so it visits
    the places where its pair stands, and nothing else: `where` lists the positions at which a pair has arisen
    (those merged since are skipped), rising within a chunk, so a run like "aaaa" is paired from the left, as
    in encoding. All chunks lie in one flat row, BORDER between them, and `at` has a token's id at its first
    and its last byte: both its neighbours are one look away. And the most frequent pair is on top of a heap:
    counts of old pairs only fall, so an entry promises the truth or too much, and is corrected when it
    surfaces. Counts are Python integers and cannot overflow. For example, the chunk "abab" and its first merge:

        at     [BORDER  a  b  a  b  BORDER]    where[a, b] = [1, 3], where[b, a] = [2]
        at     [BORDER ab ab ab ab  BORDER]    each ab at its first and last byte; where[ab, ab] = [1]
    """
    BORDER, INSIDE = -1, -2
    at, weight = [BORDER], [0]
    for chunk, count in chunks.items():
        at += (*chunk.encode("utf-8"), BORDER)
        weight += [count] * (len(at) - len(weight))
    counts, where = defaultdict(int), defaultdict(list)
    for p, pair in enumerate(zip(at, at[1:])):
        if BORDER not in pair:
            counts[pair] += weight[p]
            where[pair].append(p)
    heap = sorted((-count, pair) for pair, count in counts.items())
    length = [1] * 256  # of each token, in bytes

    for new in tqdm(range(256, 256 + wanted), desc="merges", disable=not progress):
        while heap and heap[0][0] != -counts[heap[0][1]]:
            heapq.heapreplace(heap, (-counts[heap[0][1]], heap[0][1]))
        if not heap or heap[0][0] == 0:
            return
        a, b = pair = heapq.heappop(heap)[1]
        length.append(length[a] + length[b])
        fresh = set()
        for p in where.pop(pair):
            q = p + length[a]
            if at[p] != a or at[q] != b:
                continue
            end, n = q + length[b], weight[p]
            left, right = at[p - 1], at[end]
            at[q - 1] = at[q] = INSIDE
            at[p] = at[end - 1] = new
            for near, old, now, start in ((left, (left, a), (left, new), p - length[left]),
                                          (right, (b, right), (new, right), p)):
                if near != BORDER:
                    counts[old] -= n
                    counts[now] += n
                    where[now].append(start)
                    fresh.add(now)
        del counts[pair]
        for other in fresh:
            heapq.heappush(heap, (-counts[other], other))
        yield pair


class Tokenizer:
    """Byte-level BPE. `vocab` is token -> id in tokenizer.json's spelling, `specials` is name -> id (not in
    vocab), `merges` are pairs of tokens in merging order; the ids of what they make rise."""

    def __init__(self, vocab, merges, specials, pattern=GPT4_PATTERN, nfc=False):
        self.vocab, self.merges, self.specials = vocab, merges, specials
        self.pattern, self.nfc = pattern, nfc
        self.vocab_size = len(vocab) + len(specials)
        need("" not in vocab | specials and not vocab.keys() & specials.keys(),
             "A token is empty, or both special and ordinary.")
        ids = sorted([*vocab.values(), *specials.values()])
        need(str(ids) == str([*range(len(ids))]), "The ids are not 0, 1, 2 and so on.")  # str: 1.0 is none
        need(all(char in vocab for char in BYTE_TO_CHAR), "The vocabulary lacks some of the 256 bytes.")
        ranks = {bytes(map(CHAR_TO_BYTE.__getitem__, token)): id for token, id in vocab.items()}
        names = [(id, name.encode("utf-8")) for name, id in specials.items()]
        self._bytes = [token for _, token in sorted([(id, token) for token, id in ranks.items()] + names)]
        # tiktoken panics at an empty match and drops what the pattern skips (to Hugging Face's, a chunk).
        need(all(match[0] for match in regex.finditer(pattern, "a 1!\n")), "The pattern matches nothing.")
        self._encode = self._encoder(ranks, rf"{pattern}|(?:(?!{pattern})[\s\S])+")
        self._special = re.compile(f"({'|'.join(map(re.escape, sorted(specials, key=len)[::-1])) or '(?!)'})")

    def _encoder(self, ranks, pattern):
        """Bytes -> id of each token, the pattern of a chunk -> a function from text to ids.

        tiktoken knows no merges: it joins, again and again, the neighbours that spell the token of the
        smallest id. Ids rise in merging order, so these are the merges in their order, `encode_by_hand`, if
        only a token's own two parts can come to spell it. In training that is so: when a token was made, its
        parts stood side by side, so no earlier merge joins anything across the seam between them.
        """
        return tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={}).encode_ordinary

    @property
    def end_of_text(self):
        """The id that ends every document."""
        name = next((name for name in ENDS if name in self.specials), None)
        need(name, f"The tokenizer has none of {', '.join(ENDS)} to end a text.")
        return self.specials[name]

    def encode(self, text, allow_special=False):
        """Text -> list of ids. "<|end|>" in it is seven ordinary characters, unless specials are allowed."""
        if allow_special:  # split into ordinary text and specials, in turn; NFC sees them one by one
            parts = enumerate(self._special.split(text))
            return [id for i, part in parts for id in ([self.specials[part]] if i % 2 else self.encode(part))]
        ids = []
        for part in clean_segments(text, self.nfc):
            ids += self._encode(part)
        return ids

    def token_bytes(self, id):
        """The bytes of a token; of a special one, its name."""
        need(0 <= id < self.vocab_size, f"There is no token {id} in a vocabulary of {self.vocab_size}.")
        return self._bytes[id]

    def decode(self, ids):
        """Ids -> text; bytes that are not UTF-8 come out as U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


class LongestMatchTokenizer(Tokenizer):
    """Silia's way to encode ("maximal munch"): `longest_match_by_hand`, by a trie and a cache of words.

    How the vocabulary was learned plays no part: with "th" in it but not "the", "the" is th|e; BPE makes it
    t|he if "he" was learned first. In tokenizer.json, it is a WordPiece model without a prefix.
    """

    def __init__(self, vocab, specials, pattern=GPT4_PATTERN, nfc=False):
        super().__init__(vocab, None, specials, pattern, nfc)
        # WordPiece has special tokens in the one vocabulary, and would find one of this kind in plain text.
        need(not any(set(name) <= CHAR_TO_BYTE.keys() for name in specials if not name.isascii()),
             "A special token is spelt like the bytes of a text.")

    def _encoder(self, ranks, pattern):
        super()._encoder(ranks, pattern)  # refuses a pattern that only Python's `regex` knows
        trie = {}  # next byte -> trie of what may follow; "id" -> the token that ends here
        for token, id in ranks.items():
            node = trie
            for byte in token:
                node = node.setdefault(byte, {})
            node["id"] = id

        def match(chunk):
            data, ids, start = [*chunk.encode("utf-8"), None], [], 0
            while data[start] is not None:
                node, end = trie, start
                while (node := node.get(data[end])) is not None:
                    end += 1
                    if "id" in node:
                        longest, start = node["id"], end
                ids.append(longest)
            return ids

        split, known = regex.compile(pattern), lru_cache(1 << 15)(match)  # words come again and again
        return lambda text: [id for chunk in (match[0] for match in split.finditer(text))
                             for id in (known if len(chunk) <= 32 else match)(chunk)]


class StreamDecoder:
    """Ids one by one -> text; the bytes of an unfinished character wait until it is whole."""

    def __init__(self, tokenizer):
        self.tokenizer, self.utf8 = tokenizer, codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, id):
        return self.utf8.decode(self.tokenizer.token_bytes(id))

    def flush(self):
        """What still waits at the end: nothing, or U+FFFD for a character that never became whole."""
        return self.utf8.decode(b"", final=True)


def encode_chat(tokenizer, turns):
    """Turns [("user" or "assistant", text), ...] -> ids of "<|user|>text<|end|>", joined by spaces
    (helix paper). Special tokens in a text are ordinary text: no turn can be ended from within. A last turn
    whose text is None is left open: it is for the model to write."""
    ids = []
    for role, text in turns:
        start, end = (tokenizer.specials.get(f"<|{name}|>") for name in (role, "end"))
        need(None not in (start, end), f"The tokenizer needs <|{role}|> and <|end|> for this chat.")
        ids += [*(tokenizer.encode(" ") if ids else ()), start]
        ids += [*tokenizer.encode(text), end] if text is not None else []
    return ids


# ----------------------------------------------------------------------------------------------------------
# Text that no regular expression would survive, and the command line

# A run of white space costs tiktoken's regex a stack entry per character, and it panics at a million. So such
# runs are cut every LONGEST_SPACE characters before anything else, in training as in use.
LONGEST_SPACE = 100_000
OVERLONG = re.compile(r"\s(?<!\s\s)\s{%d,}" % LONGEST_SPACE)  # the look-behind tries each run only once


def clean_segments(text, nfc):
    """Yield text as tiktoken can take it: valid UTF-8 (half a surrogate pair becomes U+FFFD), in NFC if
    asked, and whole but for cuts inside overlong white space."""
    text, start = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), 0
    text = unicodedata.normalize("NFC", text) if nfc else text
    for run in OVERLONG.finditer(text) if len(text) > LONGEST_SPACE else ():
        for cut in range(run.start() + LONGEST_SPACE, run.end(), LONGEST_SPACE):
            yield text[start:cut]
            start = cut
    yield text[start:]


def show(tokenizer, text):
    """Print the pieces of a text, their ids and their number."""
    ids = tokenizer.encode(text)
    tokens = [tokenizer.token_bytes(id) for id in ids]
    # Control characters, and bytes that are part of a character, are shown as Python writes them: \n, \xe2.
    pieces = ["".join(char if char.isprintable() else ascii(char)[1:-1]
                      for char in token.decode("utf-8", errors="backslashreplace")) for token in tokens]
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if colour:  # black on light backgrounds: readable on any terminal
        pieces = [f"\x1b[30;48;5;{(153, 229, 157, 225)[i % 4]}m{s}\x1b[0m" for i, s in enumerate(pieces)]
    print(*pieces, sep="" if colour else "|")
    print(*ids)
    print(f"{len(ids)} tokens, {len(b''.join(tokens)) / max(1, len(ids)):.2f} bytes per token")


def read_and_show():
    parser = CommandLine(description="Show how a tokenizer cuts a text into tokens.")
    parser.add_argument("tokenizer", help="a tokenizer.json")
    parser.add_argument("text")
    args = parser.parse_args()
    from support.hf_tokenizer import load_tokenizer  # which needs this file first

    show(load_tokenizer(args.tokenizer), args.text)


if __name__ == "__main__":
    run_main(read_and_show)
