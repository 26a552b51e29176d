"""What tokenizer.py promises, checked against slow, obvious twins: a trainer that recounts all pairs at every
step, an encoder that follows the list of merges one by one, and one that tries every length."""

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import regex

import tokenizer as tok
from support import hf_tokenizer
from support.hf_tokenizer import load_tokenizer, save_tokenizer, tokenizer_from_json, tokenizer_to_json
from tokenizer import (LongestMatchTokenizer, Tokenizer, count_chunks, encode_by_hand, encode_chat,
                       learn_merges_by_hand, longest_match_by_hand, merge, train_bpe)

ROOT = Path(__file__).resolve().parent.parent
WORDS = ["the", "cat", "sat", "on", "a", "mat", "naïve", "don't", "I'LL", "banana", "1234567", "--", "日本語",
         "👩‍👩‍👧", "été"]
ODD = ["\u017f", "'\u017f", "'S", "\x1c", "\x1f", "\x85", "\u180e", "\u200d", "\ufeff", "e\u0301",
       "\u1e9b\u0323", "\r\n", "\n\r", "\n\n", "\t", "   ", "\u00a0", "\u3000", "שלום", "مرحبا", "١٢٣", "Ⅷ",
       "²³", "ﬁ", "👍🏽", "🇩🇪", "\x00", "\ue000", "<|end|>", "<|", "a", " world", "!!", "…", "Å", "\U0010ffff"]


def random_text(rng, length=30):
    """Words, oddities and white space, with the line breaks and runs that make a split pattern work."""
    return "".join(rng.choice(WORDS + ODD) + rng.choice([" ", " ", "", "  ", "\n"]) for _ in range(length))


def reference_encode(tokenizer, text):
    """Split; then apply the merges to each chunk, one after the other, in their order."""
    ids = []
    for chunk in regex.findall(tokenizer.pattern, text):
        row = [tok.BYTE_TO_CHAR[byte] for byte in chunk.encode()]
        for left, right in tokenizer.merges:
            if left in row:
                row = merge(row, (left, right), left + right)
        ids += [tokenizer.vocab[token] for token in row]
    return ids


def reference_munch(tokenizer, text):
    """Split; then take the longest token, again and again."""
    tokens = {tokenizer.token_bytes(id): id for id in tokenizer.vocab.values()}
    ids = []
    for match in regex.finditer(rf"{tokenizer.pattern}|(?:(?!{tokenizer.pattern})[\s\S])+", text):
        ids += longest_match_by_hand(match[0], tokens)
    return ids


def munching(tokenizer):
    """The same vocabulary, another way to encode."""
    return LongestMatchTokenizer(tokenizer.vocab, tokenizer.specials, tokenizer.pattern, tokenizer.nfc)


def merge_ids(tokenizer):
    return [(tokenizer.vocab[left], tokenizer.vocab[right]) for left, right in tokenizer.merges]


@pytest.fixture(scope="module")
def small():
    rng = random.Random(0)
    return train_bpe(count_chunks(random_text(rng) for _ in range(60)), 600)


@pytest.fixture(params=["bpe", "munch"])
def either(small, request):
    return munching(small) if request.param == "munch" else small


# --------------------------------------------------------------------------------------------------- training

@pytest.mark.parametrize("alphabet", ["ab", "abc", "aé", "日本", "the cat"])
def test_training_equals_recounting_at_every_step(alphabet):
    rng = random.Random(alphabet)
    for _ in range(12):
        chunks = Counter()
        for _ in range(rng.randint(1, 12)):
            chunks["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 25)))] += rng.randint(1, 4)
        wanted = len(learn_merges_by_hand(chunks, 40))
        assert merge_ids(train_bpe(chunks, 256 + wanted, specials=())) == learn_merges_by_hand(chunks, 40)


def test_merges_in_their_order_are_what_tiktoken_does():
    """The definition of encoding against the encoder that is used, on chunks that were and were not trained on."""
    rng = random.Random(5)
    tokenizer = train_bpe(count_chunks(random_text(rng) for _ in range(60)), 600, specials=())
    for chunk in count_chunks(random_text(rng) for _ in range(60)):
        assert tokenizer.encode(chunk) == encode_by_hand(chunk, merge_ids(tokenizer)), chunk


def test_runs_of_one_letter_train_like_the_naive_trainer():
    # a merge in "aaaaa" changes the count of the very pair that is being merged
    for n in range(2, 40):
        chunks = Counter({"a" * n: 1, "ba" + "a" * (n // 2): 2})
        merges = learn_merges_by_hand(chunks, 99)
        assert merge_ids(train_bpe(chunks, 256 + len(merges), specials=())) == merges


def test_no_two_tokens_are_spelt_alike():
    rng = random.Random(3)
    for _ in range(60):
        chunks = Counter("".join(rng.choice("ab") for _ in range(rng.randint(1, 40))) for _ in range(8))
        wanted = len(learn_merges_by_hand(chunks, 80))
        assert len(train_bpe(chunks, 256 + wanted, specials=()).vocab) == 256 + wanted


def test_ties_go_to_the_smallest_ids():
    tokenizer = train_bpe(Counter(["zx", "by", "ba"]), 259, specials=())
    assert merge_ids(tokenizer) == [(98, 97), (98, 121), (122, 120)]


def test_the_order_of_chunks_and_the_split_into_workers_do_not_matter():
    rng = random.Random(1)
    documents = [random_text(rng) for _ in range(40)]
    whole = count_chunks(documents)
    parts = count_chunks(documents[25:]) + count_chunks(documents[:25])
    shuffled = list(whole.items())
    rng.shuffle(shuffled)
    texts = {tokenizer_to_json(train_bpe(chunks, 420)) for chunks in (whole, parts, Counter(dict(shuffled)))}
    assert len(texts) == 1


def test_the_hash_seed_does_not_matter():
    code = ("import tokenizer as t, random; from support.hf_tokenizer import tokenizer_to_json; r = random.Random(2); "
            "chunks = t.count_chunks([''.join(r.choice('abcd ') for _ in range(3000))]); "
            "print(tokenizer_to_json(t.train_bpe(chunks, 400)))")
    run = lambda seed: subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True,
                                      env={**os.environ, "PYTHONHASHSEED": seed}).stdout
    assert run("1") == run("2") != b""


def test_counts_beyond_32_and_64_bits():
    # in 32 bits 2**32 + 1 would be less than 2; in 64, 2**64 + 1
    for huge in (2**32, 2**64):
        assert merge_ids(train_bpe(Counter({"ab": huge + 1, "cd": 2, "ef": huge + 3}), 258, specials=())) == [
            (101, 102), (97, 98)]


def test_the_vocabulary_has_exactly_the_size_asked_for(capsys):
    chunks = count_chunks([" ".join(WORDS)])
    for size in (260, 261, 300):  # pairs that occur only once must do
        tokenizer = train_bpe(chunks, size)
        assert tokenizer.vocab_size == size
        assert tokenizer.specials == {name: size - 4 + i for i, name in enumerate(tok.SPECIALS)}
        assert tokenizer.end_of_text == size - 4
        assert [tokenizer.token_bytes(id) for id in range(256)] == [bytes([byte]) for byte in range(256)]
    assert capsys.readouterr().err == ""
    rng = random.Random(0)
    letters = Counter("".join(rng.choice("abcdefgh") for _ in range(6)) for _ in range(300))
    addition = train_bpe(letters, 512, ("<|endoftext|>", "<|=|>"))
    assert (addition.specials, len(addition.merges)) == ({"<|endoftext|>": 510, "<|=|>": 511}, 254)
    with pytest.raises(ValueError, match="at least 260"):
        train_bpe(chunks, 259)


def test_running_out_of_pairs_gives_a_smaller_vocabulary_and_says_so(capsys):
    tokenizer = train_bpe(Counter({"abc": 1, "de": 5}), 1000)
    assert tokenizer.vocab_size == 256 + 3 + 4
    assert capsys.readouterr().err == "The text ran out of pairs: 263 tokens instead of 1000.\n"
    assert train_bpe(Counter(), 260).encode("hé") == [104, 0xC3, 0xA9]


def test_documents_are_cut_whole():
    assert count_chunks(["a\n\nb", "a\n\nb"]) == {"a": 2, "\n\n": 2, "b": 2}
    assert count_chunks(["it's\r\n"]) == {"it": 1, "'s": 1, "\r\n": 1}


# ----------------------------------------------------------------------------------------- encoding, decoding

def test_ids_equal_the_merges_applied_one_by_one(small):
    rng = random.Random(5)
    for _ in range(150):
        text = random_text(rng, rng.randint(1, 15))
        assert small.encode(text) == reference_encode(small, text)


@pytest.mark.parametrize("alphabet", ["ab", "abc", "ab ", "!a\n"])
@pytest.mark.parametrize("pattern", [tok.GPT4_PATTERN, tok.GPT2_PATTERN, r"[\s\S]+"])
def test_ids_of_repetitive_text(alphabet, pattern):
    rng = random.Random(alphabet)
    texts = ["".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40))) for _ in range(300)]
    tokenizer = train_bpe(count_chunks(texts[:60], pattern), 340, pattern=pattern)
    for text in texts + [letter * n for letter in alphabet for n in range(20)]:
        assert tokenizer.encode(text) == reference_encode(tokenizer, text)


def test_every_token_is_encoded_as_itself():
    # what makes tiktoken's way of merging and the list of merges one and the same
    chunks = count_chunks([random_text(random.Random(6), 400)], r"[\s\S]+")
    tokenizer = train_bpe(chunks, 700, specials=())
    for token, id in tokenizer.vocab.items():
        row = list(token)
        for left, right in tokenizer.merges:
            row = merge(row, (left, right), left + right)
        assert row == [token], id


def test_round_trips(either):
    rng = random.Random(7)
    texts = ["", "\x00", "a\x00b", " ", "👩‍👩‍👧‍👦 ok", *ODD, *(random_text(rng) for _ in range(50))]
    letters = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    texts += ["".join(rng.choices(letters, k=20)) for _ in range(300)]
    for text in texts:
        assert either.decode(either.encode(text)) == text
    assert either.encode("") == []
    assert b"".join(either.token_bytes(id) for id in range(256)) == bytes(range(256))
    assert either.decode(np.array(either.encode("numpy"))) == "numpy"


def test_half_a_surrogate_pair_becomes_the_replacement_character(either):
    assert either.decode(either.encode("a\ud83db")) == "a\ufffdb"
    assert either.decode(either.encode("\ud83d\ude00")) == "😀"
    assert count_chunks(["\ud83d"]) == {"\ufffd": 1}


def test_a_special_token_in_the_text_is_text_unless_allowed(either):
    text = "hi<|end|><|endoftext|> <|end"
    assert not set(either.specials.values()) & set(either.encode(text))
    end, stop = either.specials["<|end|>"], either.specials["<|endoftext|>"]
    ids = either.encode(text, allow_special=True)
    assert ids == [*either.encode("hi"), end, stop, *either.encode(" <|end")]
    assert either.decode(either.encode(text)) == either.decode(ids) == text


def test_the_longest_special_token_wins():
    tokenizer = train_bpe(Counter(), 259, ("<a>", "<a><b>", "<b>"))
    assert tokenizer.encode("<a><b><a>", allow_special=True) == [257, 256]


@pytest.mark.parametrize("id", [-1, 600, 10**12])
def test_an_unknown_id_is_a_plain_error(small, id):
    for use in (small.token_bytes, lambda id: small.decode([65, id]), tok.StreamDecoder(small).feed):
        with pytest.raises(ValueError, match=rf"no token {id} .* 600"):
            use(id)


def test_a_special_token_cannot_be_an_ordinary_one_too():
    # tokenizer.json has one list of names for both
    for specials in ("ab",), ("a",), ("",), ("x", "x"):
        with pytest.raises(ValueError):
            train_bpe(Counter(["ab"]), 257 + len(specials), specials)


def test_no_end_of_text():
    with pytest.raises(ValueError, match=r"none of <\|endoftext\|>, <\|end-text\|>, </s>"):
        train_bpe(Counter(), 256, specials=()).end_of_text


@pytest.mark.parametrize("text", [
    "a" * 10**6, " " * 10**6 + "x", "x" + " " * 10**6, "\n" * 10**6, "\t \n" * 400_000 + "x", "!" * 10**6,
    "ab" * 500_000, "é" * 500_000, "7" * 10**6], ids=lambda text: ascii(text[:3]))
@pytest.mark.parametrize("pattern", [tok.GPT4_PATTERN, tok.GPT2_PATTERN])
def test_long_runs(small, text, pattern):
    # a million spaces make tiktoken's regex overflow its stack, which is a panic and no Python Exception
    tokenizer = Tokenizer(small.vocab, small.merges, small.specials, pattern)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert sum(len(chunk) * n for chunk, n in count_chunks([text], pattern).items()) == len(text)


def test_only_overlong_white_space_is_cut(monkeypatch):
    monkeypatch.setattr(tok, "LONGEST_SPACE", 4)
    monkeypatch.setattr(tok, "OVERLONG", tok.re.compile(tok.OVERLONG.pattern.replace("100000", "4")))
    assert list(tok.clean_segments("ab    cd          ef\n\n", False)) == ["ab    cd    ", "    ", "  ef\n\n"]
    assert list(tok.clean_segments("         ", False)) == ["    ", "    ", " "]


def test_stream_decoder(either):
    text = "a👩‍👩‍👧é日"
    stream = tok.StreamDecoder(either)
    fed = [stream.feed(byte) for byte in "é👍".encode()]
    assert fed == ["", "é", "", "", "", "👍"] and stream.flush() == ""
    stream = tok.StreamDecoder(either)
    assert "".join(map(stream.feed, either.encode(text))) == text and stream.flush() == ""
    assert [stream.feed(0xF0), stream.feed(0x9F), stream.flush()] == ["", "", "\ufffd"]
    assert either.decode([0xF0, 0x9F]) == "\ufffd"
    assert stream.feed(65) == "A"  # nothing is left over
    rng = random.Random(8)
    for _ in range(200):
        ids = [rng.randrange(either.vocab_size) for _ in range(30)]
        assert "".join(map(stream.feed, ids)) + stream.flush() == either.decode(ids)


def test_chat(small):
    ids = encode_chat(small, [("user", "Hi <|end|>"), ("assistant", "Yes"), ("user", "")])
    assert small.decode(ids) == "<|user|>Hi <|end|><|end|> <|assistant|>Yes<|end|> <|user|><|end|>"
    assert ids.count(small.specials["<|end|>"]) == 3  # the one in the user's text is text
    plain, written = [("user", "U"), ("assistant", "A")], "<|user|>U<|end|> <|assistant|>A<|end|>"
    assert encode_chat(small, plain) == small.encode(written, allow_special=True)
    assert encode_chat(small, [*plain, ("user", "V"), ("assistant", None)]) == small.encode(
        written + " <|user|>V<|end|> <|assistant|>", allow_special=True)  # an open turn, for the model
    with pytest.raises(ValueError, match="<|system|>"):
        encode_chat(small, [("system", "x")])


def test_nfc():
    chunks = count_chunks(["cafe\u0301 cafe\u0301"], nfc=True)
    assert "cafés"[:-1] in chunks
    tokenizer = tokenizer_from_json(tokenizer_to_json(train_bpe(chunks, 264, nfc=True, specials=("<|endoftext|>", "<e\u0301>"))))
    assert tokenizer.nfc and tokenizer.encode("cafe\u0301") == tokenizer.encode("café")
    mixed = tokenizer.encode("<e\u0301>e\u0301", allow_special=True)
    assert mixed == [tokenizer.specials["<e\u0301>"], *tokenizer.encode("é")]
    off = train_bpe(chunks, 264)
    assert not off.nfc and off.encode("e\u0301") != off.encode("é")


# ---------------------------------------------------------------------------------------------- maximal munch

def test_munch_is_not_bpe():
    # the merge of h and e is the older one, so that BPE gets to it first
    bpe, munch = (train_bpe(Counter({"he": 3, "th": 2}), 260, tok.SILIA_SPECIALS, longest_match=munch)
                  for munch in (False, True))
    assert munch.vocab == bpe.vocab and munch.specials == bpe.specials
    assert [bpe.token_bytes(id) for id in bpe.encode("the")] == [b"t", b"he"]
    assert [munch.token_bytes(id) for id in munch.encode("the")] == [b"th", b"e"]
    assert munch.encode("the theth") != tokenizer_from_json(tokenizer_to_json(bpe)).encode("the theth")


@pytest.mark.parametrize("pattern", [tok.GPT4_PATTERN, tok.GPT2_PATTERN, r"[\s\S]+", r"(\p{L})+"])
def test_munch_takes_the_longest_token_that_fits(pattern):
    rng = random.Random(pattern)
    for alphabet in (["a", "b"], ["a", "b", " "], ["é", "日", "a", "👍"], WORDS + ODD):
        texts = ["".join(rng.choices(alphabet, k=rng.randrange(25))) for _ in range(60)]
        # Any bytes of these texts can be a token, so many tokens begin or end within a character. No token
        # is promised to have its prefixes in the vocabulary too: "abb" may be there while "ab" is not.
        vocab = {char: id for id, char in enumerate(tok.BYTE_TO_CHAR)}
        for text in texts[:40]:
            spelt = [tok.BYTE_TO_CHAR[byte] for byte in text.encode()] or ["a"]
            start = rng.randrange(len(spelt))
            vocab.setdefault("".join(spelt[start:start + rng.randint(1, 7)]), len(vocab))
        munch = LongestMatchTokenizer(vocab, {"<|end-text|>": len(vocab)}, pattern)
        for text in texts + [random_text(rng, 5)]:
            assert munch.encode(text) == reference_munch(munch, text), text
            assert munch.decode(munch.encode(text)) == text


def test_munch_of_a_trained_vocabulary(small):
    rng, munch = random.Random(11), munching(small)
    texts = [random_text(rng, rng.randint(1, 15)) for _ in range(150)]
    assert all(munch.encode(text) == reference_munch(munch, text) for text in texts)
    assert [munch.encode(text) for text in texts] == [munch.encode(text) for text in texts]  # from memory
    assert any(munch.encode(text) != small.encode(text) for text in texts)


@pytest.mark.parametrize("text", ["a" * 10**6, "ab" * 500_000, "é" * 500_000, "aab" * 333_333, "!" * 10**6])
def test_munch_of_a_chunk_of_a_million_characters(text):
    # with tokens of up to 4,096 letters; a scan of the rest of the chunk for every token would take hours
    munch = train_bpe(Counter({"a" * 8192: 1, "é" * 99: 1}), 285, tok.SILIA_SPECIALS, longest_match=True)
    began = time.process_time()
    ids = munch.encode(text)
    assert time.process_time() - began < 20
    assert munch.decode(ids) == text


def test_specials_of_silia():
    munch = train_bpe(Counter(["ab"]), 259, tok.SILIA_SPECIALS, longest_match=True)
    assert munch.specials == {"<|end-text|>": 257, "<|actor|>": 258} and munch.end_of_text == 257
    assert munch.encode("<|actor|>ab<|end-text|>", allow_special=True) == [258, 256, 257]
    assert max(munch.encode("<|actor|>ab<|end-text|>")) == 256
    # "鬼" is spelt é¬¼: there, WordPiece would find a special token of that name
    with pytest.raises(ValueError, match="spelt like the bytes"):
        train_bpe(Counter(), 257, ("é¬¼",), longest_match=True)


def test_the_model_type_tells_the_two_kinds_apart(small):
    specials_first = tokenizer_from_json(json.dumps(published()))
    nfc = train_bpe(Counter(["ab"]), 258, ("</s>",), nfc=True, pattern=r"\p{L}+")
    for tokenizer in (small, munching(small), specials_first, munching(specials_first), nfc, munching(nfc)):
        again = tokenizer_from_json(tokenizer_to_json(tokenizer))
        assert type(again) is type(tokenizer) and tokenizer_to_json(again) == tokenizer_to_json(tokenizer)
        for part in ("vocab", "specials", "merges", "pattern", "nfc"):
            assert getattr(again, part) == getattr(tokenizer, part)
    model = json.loads(tokenizer_to_json(munching(small)))["model"]
    assert model["type"] == "WordPiece" and model["continuing_subword_prefix"] == "" and "merges" not in model


# ------------------------------------------------------------------------------------------------------ files

def test_save_and_load(either, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(either, path)
    again = load_tokenizer(path)
    assert os.listdir(tmp_path) == ["tokenizer.json"]  # no temporary file
    assert path.read_bytes() == tokenizer_to_json(again).encode() == tokenizer_to_json(either).encode()
    assert path.read_bytes().endswith(b"}\n") and b"\r" not in path.read_bytes()
    assert (again.vocab_size, again.specials, again.end_of_text) == (600, either.specials, either.end_of_text)
    assert type(again) is type(either)
    text = random_text(random.Random(9), 300)
    assert again.encode(text, allow_special=True) == either.encode(text, allow_special=True)


def test_a_failed_save_leaves_the_old_file(small, tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("old", encoding="utf-8")
    monkeypatch.setattr(hf_tokenizer, "tokenizer_to_json", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_tokenizer(small, path)
    assert path.read_text(encoding="utf-8") == "old"


def published():
    """The layout of Wiola13M's file: specials first, bytes by their characters, ByteLevel's own split."""
    order = ["<unk>", "<s>", "</s>", "<pad>", *sorted(tok.BYTE_TO_CHAR)]
    merges = [["h", "e"], ["Ġ", "t"], ["Ġt", "he"], ["Ċ", "Ċ"]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": id, "content": name, **flags} for id, name in enumerate(order[:4])]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
             "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": {token: id for id, token in enumerate(order + ["".join(merge) for merge in merges])},
             "merges": merges}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": {**byte_level, "add_prefix_space": True},
            "decoder": byte_level, "model": model}


def test_a_published_file():
    file = published()
    tokenizer = tokenizer_from_json(json.dumps(file))
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.pattern) == (264, 2, tok.GPT2_PATTERN)
    assert [tokenizer.token_bytes(id) for id in (4, 5, 261, 262)] == [b"!", b'"', b" t", b" the"]
    assert tokenizer.encode("he the\n\n</s>")[:2] == [260, 262]
    assert tokenizer.encode("a</s>", allow_special=True) == [tokenizer.vocab["a"], 2]
    assert tokenizer_to_json(tokenizer_from_json(tokenizer_to_json(tokenizer))) == tokenizer_to_json(tokenizer)
    file["model"]["merges"] = [" ".join(merge) for merge in file["model"]["merges"]]
    assert tokenizer_from_json(json.dumps(file)).merges == tokenizer.merges


def test_pre_tokenizers_that_mean_the_same():
    file = published()
    bare = {**file["pre_tokenizer"], "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False}
    for pre, pattern in ((bare, r"[\s\S]+"), ({"type": "Sequence", "pretokenizers": [bare]}, r"[\s\S]+"),
                         ({"type": "Sequence", "pretokenizers": [split, bare]}, r"\p{N}")):
        tokenizer = tokenizer_from_json(json.dumps({**file, "pre_tokenizer": pre}))
        assert tokenizer.pattern == pattern
        assert tokenizer.decode(tokenizer.encode("x the 12 y")) == "x the 12 y"  # what no digit matches stays


def change(path, value):
    """A function that sets file[path[0]][path[1]]... to a value (or deletes it, if the value is `...`)."""
    def edit(file):
        *way, last = path
        for key in way:
            file = file[key]
        if value is ...:
            del file[last]
        else:
            file[last] = value
    return edit


SPLIT = {"type": "Split", "pattern": {"Regex": r"\s"}, "behavior": "Isolated", "invert": False}
BARE = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def sequence(*parts):
    return change(["pre_tokenizer"], {"type": "Sequence", "pretokenizers": parts})


BAD = {
    "wordpiece": change(["model", "type"], "WordPiece"),
    "unigram": change(["model", "type"], "Unigram"),
    "no type": change(["model", "type"], ...),
    "no model": change(["model"], ...),
    "model is a list": change(["model"], []),
    "no vocab": change(["model", "vocab"], ...),
    "vocab is a list": change(["model", "vocab"], ["a"]),
    "no merges": change(["model", "merges"], None),
    "a byte is missing": change(["model", "vocab", "a"], ...),
    "gap in the ids": change(["model", "vocab", "ĊĊ"], 999),
    "negative id": change(["model", "vocab", "<unk>"], -1),
    "id of a string": change(["model", "vocab", "a"], "65"),
    "fractional id": change(["added_tokens", 0, "id"], 0.0),
    "same id twice": change(["model", "vocab", "a"], 9),
    "special has two ids": change(["added_tokens", 0, "id"], 3),
    "special without content": change(["added_tokens", 0, "content"], ...),
    "empty special": change(["added_tokens", 0], {"content": "", "id": 0}),
    "token without a merge": change(["model", "vocab", "zz"], 264),
    "merge without a token": change(["model", "merges", 3], ["z", "z"]),
    "merge of unknown parts": change(["model", "merges", 3], ["", "ĊĊ"]),
    "merge of three": change(["model", "merges", 3], "Ċ Ċ Ċ"),
    "merge of one": change(["model", "merges", 3], ["ĊĊ"]),
    "merge is a number": change(["model", "merges", 3], 7),
    "merges out of order": lambda file: file["model"]["merges"].reverse(),
    "parts made too late": lambda file: (file["model"]["vocab"].update({"Ġthe": 261, "Ġt": 262}),
                                         file["model"]["merges"].insert(1, file["model"]["merges"].pop(2))),
    "merge twice": change(["model", "merges", 3], ["h", "e"]),
    "token not in byte-level spelling": change(["model", "vocab", "\n"], 264),
    "ignore_merges": change(["model", "ignore_merges"], True),
    "dropout": change(["model", "dropout"], 0.1),
    "prefix": change(["model", "continuing_subword_prefix"], "##"),
    "suffix": change(["model", "end_of_word_suffix"], "</w>"),
    "truncation": change(["truncation"], {"max_length": 5}),
    "normalizer": change(["normalizer"], {"type": "Lowercase"}),
    "decoder": change(["decoder"], {"type": "WordPiece"}),
    "no decoder": change(["decoder"], None),
    "post-processor": change(["post_processor"], {"type": "TemplateProcessing"}),
    "no pre-tokenizer": change(["pre_tokenizer"], None),
    "prefix space": change(["pre_tokenizer", "add_prefix_space"], True),
    "whitespace": change(["pre_tokenizer"], {"type": "Whitespace"}),
    "two splits": sequence(SPLIT, SPLIT, BARE),
    "split twice": sequence(SPLIT, {**BARE, "use_regex": True}),
    "split that removes": sequence({**SPLIT, "behavior": "Removed"}, BARE),
    "split by a string": sequence({**SPLIT, "pattern": {"String": " "}}, BARE),
    "broken regex": sequence({**SPLIT, "pattern": {"Regex": "("}}, BARE),
    "regex only Python knows": sequence({**SPLIT, "pattern": {"Regex": r"(?r)\s"}}, BARE),
    "regex of nothing": sequence({**SPLIT, "pattern": {"Regex": "a*"}}, BARE),
    "special that strips": change(["added_tokens", 1, "lstrip"], True),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_we_cannot_follow_is_refused_in_a_sentence(name):
    file = published()
    BAD[name](file)
    with pytest.raises(ValueError) as error:
        tokenizer_from_json(json.dumps(file))
    assert type(error.value) is ValueError and "\n" not in str(error.value)


BAD_MUNCH = {
    "bpe": change(["model", "type"], "BPE"),
    "prefix": change(["model", "continuing_subword_prefix"], "##"),
    "no prefix": change(["model", "continuing_subword_prefix"], ...),
    "prefix is null": change(["model", "continuing_subword_prefix"], None),
    "short words only": change(["model", "max_input_chars_per_word"], 100),
    "no longest word": change(["model", "max_input_chars_per_word"], ...),
    "longest word is a string": change(["model", "max_input_chars_per_word"], "10000000"),
    "a byte is missing": lambda file: (change(["model", "vocab", "a"], ...)(file),
                                       change(["model", "vocab", "xyzzy"], 97)(file)),
    "gap in the ids": change(["model", "vocab", "a"], 999),
    "same id twice": change(["model", "vocab", "a"], 9),
    "token not in byte-level spelling": change(["model", "vocab", "\n"], 600),
    "empty token": change(["model", "vocab", ""], 600),
    "special spelt like bytes": lambda file: file["added_tokens"].append({"id": 600, "content": "Ġbyte"}),
    "lowercase": change(["normalizer"], {"type": "Lowercase"}),
    "bert normalizer": change(["normalizer"], {"type": "BertNormalizer", "lowercase": True}),
    "decoder": change(["decoder"], {"type": "WordPiece", "prefix": "", "cleanup": True}),
    "whitespace": change(["pre_tokenizer"], {"type": "Whitespace"}),
    "post-processor": change(["post_processor"], {"type": "TemplateProcessing"}),
    "broken regex": sequence({**SPLIT, "pattern": {"Regex": "("}}, BARE),
    "regex only Python knows": sequence({**SPLIT, "pattern": {"Regex": r"(?r)\s"}}, BARE),
    "regex of nothing": sequence({**SPLIT, "pattern": {"Regex": "a*"}}, BARE),
}


@pytest.mark.parametrize("name", BAD_MUNCH)
def test_a_wordpiece_file_that_we_cannot_follow_is_refused_in_a_sentence(small, name):
    file = json.loads(tokenizer_to_json(munching(small)))
    tokenizer_from_json(json.dumps(file))
    BAD_MUNCH[name](file)
    with pytest.raises(ValueError) as error:
        tokenizer_from_json(json.dumps(file))
    assert type(error.value) is ValueError and "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"7", b'{"model": null}', b"\xff\xfe", b"[" * 10**5],
                         ids=lambda data: ascii(data[:20]))
def test_a_file_that_is_none_names_itself(tmp_path, data):
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="bad.json") as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("merges, sound", [
    (["a b", "b c", "ab c"], True),
    (["b c", "a b", "ab c"], False),    # in "abc" b and c are joined first
    (["a b", "b c", "a bc"], False),
    (["a a", "aa a"], True),
    (["a a", "a aa"], False),           # in "aaa" the left two are joined
    (["a a", "aa aa", "aaaa a", "aa aaaa"], False),
    (["a b", "ab ab", "c ab", "cab ab"], False),
])
def test_merges_that_never_apply_are_refused(merges, sound):
    # tiktoken would use such a token where the list of merges does not: other ids than Hugging Face's
    vocab = {token: id for id, token in enumerate([*tok.BYTE_TO_CHAR, *(m.replace(" ", "") for m in merges)])}
    tokenizer = Tokenizer(vocab, [tuple(merge.split()) for merge in merges], {})
    if sound:
        text = "abcaabaabbaaaaaaab"
        assert tokenizer_from_json(tokenizer_to_json(tokenizer)).encode(text) == reference_encode(tokenizer, text)
    else:
        with pytest.raises(ValueError, match="side by side"):
            tokenizer_from_json(tokenizer_to_json(tokenizer))


def test_hugging_face_gives_the_same_ids(small):
    tokenizers = pytest.importorskip("tokenizers", reason="compares with the tokenizers package")
    rng = random.Random(10)
    text = random_text(rng, 2000).replace("<|end|>", "")
    chunks = count_chunks([text], r"[\s\S]+")  # makes merges that the split must keep from happening
    ours = [small, tokenizer_from_json(json.dumps(published())), train_bpe(chunks, 800), train_bpe(chunks, 800, nfc=True),
            train_bpe(chunks, 800, pattern=tok.GPT2_PATTERN), train_bpe(chunks, 800, pattern=r"\p{L}+")]
    for tokenizer in ours + list(map(munching, ours)):
        theirs = tokenizers.Tokenizer.from_str(tokenizer_to_json(tokenizer))
        for _ in range(300):
            text = random_text(rng, rng.randint(1, 12))
            assert tokenizer.encode(text, allow_special=True) == theirs.encode(text).ids, text
        assert tokenizer_to_json(tokenizer_from_json(theirs.to_str())) == tokenizer_to_json(tokenizer)


# ----------------------------------------------------------------------------------------------- command line

def run_cli(*arguments):
    return subprocess.run([sys.executable, ROOT / "tokenizer.py", *arguments],
                          capture_output=True, encoding="utf-8")


def test_command_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(train_bpe(count_chunks(["hello hello hello"]), 268), path)
    done = run_cli(path, "hello\né")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["hello|\\n|\\xc3|\\xa9", "259 10 195 169",
                                        "4 tokens, 2.00 bytes per token"]
    assert run_cli(path, "").returncode == 0


def test_command_line_errors_are_one_line(tmp_path):
    (tmp_path / "broken.json").write_text("{}", encoding="utf-8")
    for path in (tmp_path / "broken.json", tmp_path / "missing.json"):
        done = run_cli(path, "x")
        assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_text_that_begins_with_a_dash(tmp_path, monkeypatch, capsys):
    """argparse takes it for an option."""
    path = tmp_path / "tokenizer.json"
    save_tokenizer(train_bpe(count_chunks(["hello hello hello"]), 268), path)
    monkeypatch.setattr(sys, "argv", ["tokenizer.py", str(path), "-x"])
    with pytest.raises(ValueError, match='goes behind "--"'):
        tok.read_and_show()
    monkeypatch.setattr(sys, "argv", ["tokenizer.py", str(path), "--", "-x"])
    tok.read_and_show()
    assert capsys.readouterr().out.startswith("-|x\n45 120\n")
    monkeypatch.setattr(sys, "argv", ["tokenizer.py"])
    with pytest.raises(ValueError, match="required: tokenizer, text$"):
        tok.read_and_show()
