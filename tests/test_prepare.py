"""prepare.py: the same bytes however the text comes and whoever encodes it; whole folders or none."""

import gzip
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import prepare
import storybook
import tokenizer as bpe
from model import ModelConfig
from support import corpus, split as rules
from support.hf_tokenizer import load_tokenizer, save_tokenizer, tokenizer_to_json
from support.runtime import run_main

SCRIPT = str(Path(prepare.__file__).resolve())
posix = pytest.mark.skipif(os.name == "nt", reason="signals and limits of POSIX")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_documents(n, seed=0):
    """n different documents with line breaks, numbers, accents, Chinese, emoji and white space inside."""
    rng = random.Random(seed)
    words = ["the", "cat", "Don't", "naïve", "cafe\u0301", "猫が好き。", "🙂", "1234567", "x1y2", "end.\n", "\n\n",
             "  two", "\ttab", "(so)", "--", "<|endoftext", "We'LL", "a_b", "\u00a0", "ﬁ", "...\n\n"]
    return [f"No. {i}: " + "".join(rng.choice(words) + rng.choice(["", " ", " ", " "])
                                   for _ in range(rng.randrange(1, 60))) + "." for i in range(n)]


def write(path, documents, delimiter="\n<|endoftext|>\n"):
    Path(path).write_bytes(delimiter.join(documents).encode())
    return path


def go(*arguments):
    run_main(partial(prepare.main, [str(argument) for argument in arguments]))


def refused(*arguments):
    """The sentence with which the program refuses; nothing may be left of the folder."""
    with pytest.raises(SystemExit) as end:
        go(*arguments)
    sentence, = end.value.code.splitlines()
    assert sentence.startswith("error: ") and sentence.endswith(".") and end.value.code.count("\n") == 0
    assert not os.path.exists("data") or [f for f in os.listdir("data") if f != "raw"] == []
    return sentence


def contents(name):
    return {file.name: file.read_bytes() for file in Path("data", name).iterdir() if file.name != "meta.json"}


def ids_of(name, split):
    return np.fromfile(f"data/{name}/{split}.bin", dtype="<u2")


def decoded(name, split):
    """The documents of a split."""
    tokenizer = load_tokenizer(f"data/{name}/tokenizer.json")
    ids = ids_of(name, split).tolist()
    assert ids[-1] == tokenizer.end_of_text
    ends = [i for i, id in enumerate(ids) if id == tokenizer.end_of_text]
    return [tokenizer.decode(ids[a + 1:b]) for a, b in zip([-1, *ends], ends)]


# ------------------------------------------------------------------------------------- files to documents

def test_meta_and_files_say_what_is_there():
    documents, held_out = make_documents(50), make_documents(5, seed=1)
    write("a.txt", documents[:20]), write("b.txt", documents[20:]), write("val.txt", held_out)
    go("--name", "mine", "--input", "a.txt", "b.txt", "--val_input", "val.txt", "--vocab_size", 300)
    assert decoded("mine", "train") == documents and decoded("mine", "val") == held_out
    meta = json.loads(Path("data/mine/meta.json").read_text("utf-8"))
    tokenizer = load_tokenizer("data/mine/tokenizer.json")
    assert meta["format"] == 1 and meta["name"] == "mine" and meta["source"] == "a.txt, b.txt, val.txt"
    assert meta["vocab_size"] == tokenizer.vocab_size == 300 and meta["end_of_text"] == tokenizer.end_of_text
    saved = Path("data/mine/tokenizer.json").read_bytes()
    assert meta["tokenizer_sha256"] == hashlib.sha256(saved).hexdigest()
    for split, texts in (("train", documents), ("val", held_out)):
        assert meta[split] == {"documents": len(texts), "tokens": len(ids_of("mine", split)),
                               "bytes": sum(len(text.encode()) for text in texts)}
    assert set(os.listdir("data")) == {"mine"} and len(os.listdir("data/mine")) == 4
    not_from_val = bpe.train_bpe(bpe.count_chunks(documents), 300)
    assert tokenizer_to_json(not_from_val) == tokenizer_to_json(tokenizer)


def test_line_ends_bom_and_blank_documents_change_nothing(monkeypatch):
    documents = make_documents(60)
    monkeypatch.setattr(corpus, "BLOCK", 64)                  # so that CRLFs and delimiters are cut in two
    clean = "\n<|endoftext|>\n".join(documents).encode() + b"\n"
    blank = b"\n<|endoftext|> \n\t\n<|endoftext|>\n"
    variants = {
        "clean": clean, "crlf": clean.replace(b"\n", b"\r\n"), "cr": clean.replace(b"\n", b"\r"),
        "bom": b"\xef\xbb\xbf" + clean, "cut": clean[:-1], "ended": clean + b"<|endoftext|>",
        "blank": b"\r\n" + blank + clean.replace(b"\n<|endoftext|>\n", blank) + blank,
        "glued": clean.replace(b"\n<|endoftext|>\n", b"<|endoftext|>"),
    }
    for name, data in variants.items():
        Path("in.txt").write_bytes(data)
        go("--name", name, "--input", "in.txt", "--vocab_size", 300)
        assert contents(name) == contents("clean"), name
    assert sorted(decoded("clean", "train") + decoded("clean", "val")) == sorted(documents)


def stream(path, delimiter=prepare.END, cut=True):
    return list(corpus.read_documents([path], delimiter, cut, None, Counter()))


def test_blocks_do_not_show(monkeypatch):
    text = "\ufeffäö🙂\r\n---\r\nzwei\r\r---\r\n\n---\n\r\n drei---\n---\r\n--\r\n---"
    Path("in.txt").write_bytes(text.encode())
    for block in range(1, 40):
        monkeypatch.setattr(corpus, "BLOCK", block)
        assert stream("in.txt", "\n---\n") == [(d, True) for d in ("äö🙂", "zwei", "drei---", "--\n---")]
    for text, found in (("xaaa", ["x", "a"]), ("aaaab", ["b"]), ("xa", ["xa"]), ("a", ["a"])):
        Path("in.txt").write_text(text)
        for block in (1, 2, 3, 9):
            monkeypatch.setattr(corpus, "BLOCK", block)
            assert stream("in.txt", "aa") == [(d, True) for d in found]


def test_the_stream_of_documents_keeps_to_the_definition(monkeypatch):
    rng = random.Random(0)
    for _ in range(300):
        text = "\ufeff" * rng.randrange(2) + "".join(rng.choices("a\n\r -🙂\ufeff", k=rng.randrange(40)))
        Path("in.txt").write_bytes(text.encode())
        for delimiter in ("-", "--", "\n-\n", "\n\n"):
            monkeypatch.setattr(corpus, "BLOCK", rng.randrange(1, 9))
            assert stream("in.txt", delimiter) == [(d, True) for d in prepare.documents(text, delimiter)]


@pytest.mark.parametrize("kind", ["many", "few"])
def test_a_folder_holds_what_the_program_in_the_docstring_makes(monkeypatch, kind):
    """That program, copied out of the docstring, against the one that reads a stream with two workers."""
    documents = make_documents(1500)
    if kind == "few":  # two long ones among short ones: these are cut
        documents = documents[:30] + ["\n".join(documents[30:500])] + documents[500:600] + [long_text(70_000)]
    text = "\n<|endoftext|>\n".join(documents)
    Path("in.txt").write_text(text, encoding="utf-8")
    for constant, value in (("BLOCK", 4000), ("BATCH", 9000), ("PIECE", 300)):
        monkeypatch.setattr(corpus, constant, value)
    go("--name", "x", "--input", "in.txt", "--vocab_size", 400, "--workers", 2 if kind == "many" else 1)
    program = prepare.__doc__.partition("whole program:\n\n")[2].partition("\n\n")[0]
    exec(textwrap.dedent(program), vars(bpe) | vars(prepare) | {"text": text, "vocab_size": 400})
    for split in ("train", "val"):
        assert Path(f"{split}.bin").read_bytes() == contents("x")[f"{split}.bin"]


@pytest.mark.parametrize("pattern", [bpe.GPT4_PATTERN, bpe.GPT2_PATTERN])
@pytest.mark.parametrize("nfc", [False, True])
def test_the_pieces_of_a_long_document_are_encoded_like_the_whole(monkeypatch, pattern, nfc):
    """Cut anywhere else (try `SAFE_CUT = re.compile("(?=.)")`), the chunks at the seams would differ."""
    monkeypatch.setattr(corpus, "BLOCK", 53)
    monkeypatch.setattr(corpus, "PIECE", 40)
    for seed in range(60):
        document = re.sub("<.endoftext", "<", "".join(make_documents(6, seed)))
        parts = stream(write("in.txt", [document, "last"]))
        assert [ends for _, ends in parts].count(True) == 2 and len(parts) > 9
        texts = [text for text, _ in parts[:-1]]
        assert "".join(texts) == document
        counts = bpe.count_chunks([document], pattern, nfc)
        assert bpe.count_chunks(texts, pattern, nfc) == counts
        tokenizer = bpe.train_bpe(counts, 320, nfc=nfc, pattern=pattern)
        assert [id for text in texts for id in tokenizer.encode(text)] == tokenizer.encode(document)


def test_every_single_safe_cut_is_safe():
    """All cuts of texts over a nasty alphabet, not only those a piece happens to end at."""
    rng, cuts = random.Random(0), 0
    for _ in range(3000):
        text = "".join(rng.choice("aZ1 \n\t'.s_-é\u0301猫。\u00a0") for _ in range(rng.randrange(2, 12)))
        for cut in (match.start() for match in corpus.SAFE_CUT.finditer(text)):
            cuts += 1
            for pattern in (bpe.GPT4_PATTERN, bpe.GPT2_PATTERN):
                for nfc in (False, True):
                    assert (bpe.count_chunks([text[:cut], text[cut:]], pattern, nfc)
                            == bpe.count_chunks([text], pattern, nfc)), (text, cut)
    assert cuts > 3000


def test_a_long_document_has_bounded_pieces_and_no_white_space_around(monkeypatch):
    for constant, value in (("BLOCK", 1000), ("PIECE", 2000), ("LIMIT", 8000)):
        monkeypatch.setattr(corpus, constant, value)
    Path("in.txt").write_text("\n" * 5000 + "word " * 20_000 + "\n" * 5000)
    parts = stream("in.txt")
    assert "".join(text for text, _ in parts) == ("word " * 20_000).strip() and parts[-1][1]
    assert max(len(text) for text, _ in parts) < 7000
    for text in ("x" * 20_000, "a" + " " * 20_000 + "b"):
        Path("in.txt").write_text(text)
        with pytest.raises(ValueError, match="without a place to cut"):
            stream("in.txt")
    Path("in.txt").write_text("word " * 2000)
    with pytest.raises(ValueError, match="without a place to cut"):      # a pattern that we know nothing of
        stream("in.txt", cut=False)


def test_no_cut_goes_through_a_delimiter(monkeypatch):
    monkeypatch.setattr(corpus, "BLOCK", 1)
    Path("in.txt").write_text("word " * 20 + "<x> <x>" + "last " * 20)
    for length in range(1, 30):
        monkeypatch.setattr(corpus, "PIECE", length)
        text = "".join(text + "|" * ends for text, ends in stream("in.txt", "<x> <x>"))
        assert text == ("word " * 20).strip() + "|" + ("last " * 20).strip() + "|"


# ------------------------------------------------------------------------------------------------ the split

def long_text(n_characters, seed=0):
    """Lines of English letters."""
    rng = random.Random(seed)
    lines = []
    while n_characters > 0:
        words = rng.choices(("the", "cat", "sat", "and", "ran"), k=9)
        lines.append(f"{' '.join(words)} {len(lines)}.")
        n_characters -= len(lines[-1]) + 1
    return "\n".join(lines)


def split_of(name):
    return json.loads(Path("data", name, "meta.json").read_text("utf-8"))["split"]


def sides(documents):
    """The two sides by the rule, without files."""
    pieces = [(document, True) for document in documents]
    rule = prepare.choose_rule(prepare.numbered(pieces))
    return rule, *([text for text, _ in prepare.only(split, pieces, rule)] for split in ("train", "val"))


def share(train, val):
    size = len("".join(val).encode())
    return size / (size + len("".join(train).encode()))


def test_split_is_by_whole_documents_and_stays(monkeypatch):
    monkeypatch.setattr(rules, "ENOUGH", 1000)             # else more than 1% of so little text
    documents = make_documents(3000)
    write("a.txt", documents)
    write("b.txt", make_documents(500, seed=9)[250:] + documents[::-1] + documents[:9])
    for name in "ab":
        go("--name", name, "--input", f"{name}.txt", "--vocab_size", 300)
    train, val = decoded("a", "train"), decoded("a", "val")
    assert 15 <= len(val) <= 50 and sorted(train + val) == sorted(documents)
    assert set(val) == set(decoded("b", "val")) & set(documents)         # whatever the order and the company
    assert set(val) == {d for d in documents                              # and this is the rule, for good
                        if int(hashlib.blake2b(d.encode(), digest_size=8).hexdigest(), 16) < 2**64 / 100}


@pytest.mark.parametrize("n, length, least, most", [
    (10_000, 350, 0.005, 0.02), (3000, 1000, 0.005, 0.02),                           # a hundredth of the text
    (10_000, 100, 0.016, 0.064), (900, 600, 0.0295, 0.1),                            # 16,000 bytes
    (1000, 200, 0.05, 0.1), (100, 1000, 0.05, 0.1), (60, 100, 0.05, 0.1)])           # a twentieth of little
def test_many_documents_give_a_hundredth_of_the_text_or_some_thousand_tokens(n, length, least, most):
    rng = random.Random(n)
    documents = [f"{i} {rng.randbytes(int(length / 2 * rng.lognormvariate(0, 0.4))).hex()}" for i in range(n)]
    rule, train, val = sides(documents)
    assert str(rule).startswith("by hash") and sorted(train + val) == sorted(documents)
    assert least <= share(train, val) <= most
    again = sides(documents + ["One more document, " + "x" * length])[2]
    assert [document for document in again if document in set(documents)] == val


def test_equal_documents_never_stand_on_both_sides():
    rng = random.Random(3)
    originals = make_documents(600) + [long_text(2500, seed) for seed in range(4)]
    for n in (3, 30, 300, 3000):
        _, train, val = sides(rng.choices(originals, k=n) + originals[-4:] * 2)
        assert val and not set(train) & set(val) and share(train, val) <= 0.1


def test_a_text_copied_often_is_for_training():
    often = make_documents(3000, seed=1) + ["Equal texts, too many for one side."] * 5000
    _, train, val = sides(often)
    assert 0.01 <= share(train, val) <= 0.1 and sorted(train + val) == sorted(often)
    with pytest.raises(ValueError, match="over and over.*--val_input"):
        sides(["The same old story.", "Another one."] * 1000)


def test_one_plain_file_gives_its_last_tenth(capsys):
    """What every learner of nanoGPT has: input.txt."""
    text = long_text(300_000)
    Path("input.txt").write_text(text)
    go("--name", "mine", "--input", "input.txt", "--vocab_size", 300)
    (train,), (val,) = decoded("mine", "train"), decoded("mine", "val")
    assert train + "\n" + val == text and 0.095 < share([train], [val]) <= 0.1      # cut between two lines
    meta = json.loads(Path("data/mine/meta.json").read_text("utf-8"))
    assert meta["split"] == {"rule": "by position (the last tenth of each of the 1 longest documents)",
                             "empty_documents": 0, "delimiter": prepare.END, "delimiters": 0}
    assert meta["val"] == {"documents": 1, "tokens": len(ids_of("mine", "val")), "bytes": len(val)}
    out, errors = capsys.readouterr()
    assert "split by position" in out and f"{meta['val']['bytes']:,}" in out and "occurs nowhere" in out
    assert "warning" not in errors


def test_two_plain_files_of_which_one_is_a_line():
    text = long_text(190_000)
    Path("a.txt").write_text("one line"), Path("b.txt").write_text(text)
    go("--name", "mine", "--input", "a.txt", "b.txt", "--vocab_size", 300)
    line, train = decoded("mine", "train")
    val, = decoded("mine", "val")
    assert line == "one line" and train + "\n" + val == text and 0.095 < share([train], [val]) <= 0.1


def test_a_hundred_uneven_stories():
    rng = random.Random(0)
    documents = [long_text(int(10_000 * rng.lognormvariate(0, 1.2)), i) for i in range(100)]
    rule, train, val = sides(documents)
    assert str(rule).startswith("by position") and 0.05 <= share(train, val) <= 0.1
    heads = [text for text in train if text not in set(documents)]
    assert len(heads) == len(val) == len(rule.long)
    assert {head + "\n" + tail for head, tail in zip(heads, val)} <= set(documents)
    assert sides(documents + ["A short one."])[2] == val


def test_where_a_long_document_is_cut_does_not_depend_on_its_pieces(monkeypatch):
    texts = [long_text(50_000), "\n".join(["word " * 170 + "end"] * 57), "猫が好き。" * 3000, "naïve 🙂 " * 2000,
             "x" * 895 + " " * 25 + "y" * 80]
    for text in map(str.strip, texts):
        found = set()
        for block, piece, cut in ((700, 300, True), (64, 2000, True), (10**6, 4600, True), (999, 1, False)):
            monkeypatch.setattr(corpus, "BLOCK", block)
            monkeypatch.setattr(corpus, "PIECE", piece)
            pieces = stream(write("in.txt", [text]), cut=cut)
            for split in ("train", "val"):
                parts = list(prepare.only(split, pieces, rules.Rule([], {0: len(text.encode())})))
                assert [ends for _, ends in parts].count(True) == 1 and parts[-1][1]
                found.add((split, "".join(part for part, _ in parts)))
        (_, train), (_, val) = sorted(found)
        assert train + text[len(train):len(text) - len(val)] + val == text and val == val.strip()
        assert text[len(train):len(text) - len(val)].strip() == "" and train == train.rstrip()
        assert 0.07 * len(text.encode()) <= len(val.encode()) <= 0.101 * len(text.encode()) + 3


def test_a_lopsided_split_is_a_warning(capsys):
    write("in.txt", make_documents(60)), write("val.txt", make_documents(300, seed=1))
    warnings = []
    for name, more in (("small", []), ("large", ["--val_input", "val.txt"]), ("good", ["--input", "val.txt"])):
        go("--name", name, "--input", "in.txt", "--vocab_size", 300, *more)
        warnings.append(capsys.readouterr().err)
    small, large, good = warnings
    assert re.fullmatch(r"warning: data.small has \d\d\d tokens for validation, [5-9]\.\d% of all .*\n", small)
    assert re.fullmatch(r"warning: data.large has \d\d,\d+ tokens for validation, 8\d\.\d% of all .*\n", large)
    assert good == ""


def test_empty_documents_and_the_rule_are_recorded(capsys):
    text = "\n<|endoftext|>\n".join(["", *make_documents(80), " \n\t", "", "end"]) + "\n<|endoftext|>\n"
    Path("a.txt").write_text(text, encoding="utf-8"), Path("b.txt").write_text("")
    go("--name", "x", "--input", "a.txt", "b.txt", "--vocab_size", 280)
    split = split_of("x")
    assert split["empty_documents"] == 3 and split["delimiters"] == 84
    assert split["rule"].startswith("by hash (")
    assert "empty documents left out: 3" in capsys.readouterr().out
    go("--name", "y", "--input", "a.txt", "--val_input", "a.txt", "--vocab_size", 280)
    assert split_of("y") == {"rule": "by file (as given)", "empty_documents": 6, "delimiter": prepare.END,
                             "delimiters": 168}


def test_a_delimiter_is_read_as_the_text_is(capsys):
    documents = [d.replace("\n", " ") for d in make_documents(40)]
    for end, text in (("lf", "\n\n"), ("crlf", "\r\n\r\n"), ("cr", "\r\r")):
        Path(f"{end}.txt").write_bytes(text.join(documents).encode())
        for name, delimiter in (("n", r"\n\n"), ("rn", r"\r\n\r\n"), ("r", r"\r\r"), ("raw", "\r\n\r\n")):
            go("--name", end + name, "--input", f"{end}.txt", "--delimiter", delimiter, "--vocab_size", 280)
            assert contents(end + name) == contents("lfn") and split_of(end + name)["delimiters"] == 39
    assert "nowhere" not in "".join(capsys.readouterr())
    assert sorted(decoded("lfn", "train") + decoded("lfn", "val")) == sorted(documents)
    assert prepare.documents("a\r\n\r\nb", "\r\n\r\n") == ["a", "b"]
    go("--name", "none", "--input", "lf.txt", r"--delimiter=---\n", "--vocab_size", 280)
    assert r"The delimiter '---\n' occurs nowhere" in capsys.readouterr().out


def test_the_side_of_a_long_document_does_not_depend_on_where_it_is_cut(monkeypatch):
    monkeypatch.setattr(corpus, "PIECE", 4000)
    monkeypatch.setattr(prepare, "HEAD", 1000)
    write("in.txt", [f"{i} " + "word " * 5000 for i in range(9)])
    keys = set()
    for cut, block in ((True, 700), (True, 7000), (True, 10**6), (False, 7000)):
        monkeypatch.setattr(corpus, "BLOCK", block)
        keys.add(tuple(key for _, key, (_, ends) in prepare.numbered(stream("in.txt", cut=cut)) if ends))
    assert len(keys) == 1 and len(set(*keys)) == 8


def test_a_few_documents_give_their_last_tenths():
    documents = make_documents(4)
    write("few.txt", documents + documents[:1])                          # an equal document goes the same way
    go("--name", "few", "--input", "few.txt", "--vocab_size", 280)
    train, val = decoded("few", "train"), decoded("few", "val")
    assert len(set(train)) == len(set(val)) == 4 and not set(train) & set(val)
    for document, head, tail in zip(documents + documents[:1], train, val):
        assert document.startswith(head) and document.endswith(tail)
        assert 0 < len(tail.encode()) <= len(document.encode()) / 10 + 4
        assert document[len(head):len(document) - len(tail)].strip() == ""
    Path("one.txt").write_text("a")
    assert "too short" in refused_elsewhere("--name", "one", "--input", "one.txt")


def refused_elsewhere(*arguments):
    """As `refused`, beside finished folders."""
    before = sorted(os.listdir("data"))
    with pytest.raises(SystemExit) as end:
        go(*arguments)
    assert sorted(os.listdir("data")) == before
    return end.value.code


# ------------------------------------------------------------------------------------- files as people have them

def test_packed_text_is_read_as_text(monkeypatch):
    write("a.txt", make_documents(200))
    data = Path("a.txt").read_bytes()
    Path("a.txt.gz").write_bytes(gzip.compress(data[:900]) + gzip.compress(data[900:]))      # two packs in one file
    Path("B.TXT.GZ").write_bytes(gzip.compress(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")))
    monkeypatch.setattr(corpus, "BLOCK", 777)
    for name, file in (("plain", "a.txt"), ("packed", "a.txt.gz"), ("upper", "B.TXT.GZ")):
        go("--name", name, "--input", file, "--vocab_size", 280)
        assert contents(name) == contents("plain")
    Path("bad.gz").write_bytes(data)
    assert "bad.gz cannot be read: Not a gzipped file" in refused_elsewhere("--name", "x", "--input", "bad.gz")
    for i, byte in enumerate(gzip.compress(b"z" * 5000 + b"\xff")[12:14]):                    # a damaged pack
        damaged = bytearray(gzip.compress(data))
        damaged[12 + i] ^= byte | 1
        Path("bad.gz").write_bytes(damaged)
        assert "bad.gz" in refused_elsewhere("--name", "x", "--input", "bad.gz")
    Path("bad.gz").write_bytes(gzip.compress(data)[:-9])
    assert "bad.gz cannot be read: Comp" in refused_elsewhere("--name", "x", "--input", "bad.gz")
    Path("bad.gz").write_bytes(gzip.compress(b"z" * 5000 + b"\xff"))
    assert "offset 5000" in refused_elsewhere("--name", "x", "--input", "bad.gz")


def test_a_zero_byte_is_shown_where_it_is(monkeypatch):
    for block in (3, 7, 1 << 20):
        monkeypatch.setattr(corpus, "BLOCK", block)
        for start in (b"", b"\xef\xbb\xbf", "é\r\n猫".encode() * 9):
            Path("bad.txt").write_bytes(start + b"ab\0cd\0")
            with pytest.raises(ValueError, match=f"the first at offset {len(start) + 2} "):
                stream("bad.txt")


@pytest.mark.parametrize("name", ["a.json", "A.JSON.gz", "a.ndjson"])
def test_json_is_called_so(name):
    Path(name).write_text('{"text": "A story."}\n')
    assert f"{name} is JSON; plain text is expected" in refused("--name", "x", "--input", name)


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes")
def test_a_file_name_that_is_not_utf8():
    name = os.fsdecode(b"caf\xe9.txt")
    write(name, make_documents(200))
    go("--name", "x", "--input", name, "--vocab_size", 280)
    assert json.loads(Path("data/x/meta.json").read_text("utf-8"))["source"] == r"caf\udce9.txt"


@posix
def test_a_dangling_link_is_called_so():
    write("in.txt", make_documents(20))
    Path("data").mkdir()
    os.symlink("gone", "data/s")
    for make in (lambda: prepare.main(["--name", "s", "--input", "in.txt"]),
                 lambda: prepare.from_files("s", ["in.txt"]), lambda: corpus.open_data("s", ModelConfig())):
        with pytest.raises(ValueError, match="data/s is a link to .*/gone, which is not there"):
            make()
    Path("data/gone").mkdir()
    os.symlink("nowhere.json", "data/gone/meta.json")
    with pytest.raises(ValueError, match="data/s/meta.json is a link to .*/nowhere.json, which is not there"):
        corpus.open_data("s", ModelConfig())
    Path("data").rename("moved")
    os.symlink("gone/for/good", "data")
    with pytest.raises(ValueError, match="data is a link to .*/gone/for/good, which is not there"):
        prepare.main(["--name", "other", "--input", "in.txt"])


def test_a_folder_that_another_process_makes_meanwhile_stays():
    with pytest.raises(FileExistsError, match="exists already: another process"), corpus.new_folder("x"):
        Path("data/x").mkdir()
    assert os.listdir("data") == ["x"]


# ------------------------------------------------------------------------------------------------- refusals

def test_bad_text_gets_one_sentence():
    assert "does not exist" in refused("--name", "x", "--input", "nowhere.txt")
    assert "not a file" in refused("--name", "x", "--input", ".")
    write("good.txt", make_documents(20))
    for data, word in ((b"", "no text"), (b"\xef\xbb\xbf \n<|endoftext|>\r\n\t", "no text"),
                       ("hello".encode("utf-16"), "UTF-16"), ("hello".encode("utf-16-le"), "zero bytes"),
                       (b"abc \xff def", "offset 4"), ("é".encode()[:1], "offset 0"),
                       (b"ok\xe2\x82", "offset 2"), ("café".encode("latin-1"), "offset 3")):
        Path("bad.txt").write_bytes(data)
        assert word in refused("--name", "x", "--input", "bad.txt"), data
        assert word in refused("--name", "x", "--input", "good.txt", "--val_input", "bad.txt")


def test_the_offset_of_a_bad_byte_counts_from_the_beginning_of_the_file(monkeypatch):
    Path("bad.txt").write_bytes("ä€🙂".encode() * 20 + b"\xf0\x9f" + b"x" * 50)
    for block in (1, 2, 3, 5, 7, 64, 1000):
        monkeypatch.setattr(corpus, "BLOCK", block)
        with pytest.raises(ValueError, match="offset 180"):
            stream("bad.txt")
    for data, offset in ((b"\xef\xbb\xbf" + "ä€🙂".encode() * 9000, 81_003), ("€".encode() * 9000, 27_000)):
        for bad in (b"\xf0\x9f", b"\xf0\x9fx", b"\xff" + bytes(9000)):     # far into the file, and at its end
            Path("bad.txt").write_bytes(data + bad)
            with pytest.raises(ValueError, match=f"offset {offset}\\)"):
                stream("bad.txt")


def test_options_that_do_not_go_together():
    write("in.txt", make_documents(9))
    save_tokenizer(bpe.train_bpe({"a": 1}, 260), "t.json")
    text = ["--name", "x", "--input", "in.txt"]
    for arguments in (["--input", "in.txt"], ["--name", "../x", *text[2:]], ["--name", "raw"], ["--name", ""],
                      ["--val_input", "in.txt"], ["--delimiter", "x"], ["--name", "storybook", *text[2:]],
                      [*text, "--delimiter", ""], [*text, "--tokenizer", "t.json", "--vocab_size", 300],
                      [*text, "--tokenizer", "t.json", "--nfc"], [*text, "--tokenizer", "t.json", "--munch"],
                      [*text, "--vocab_size", 65537], [*text, "--vocab_size", 259],
                      [*text, "--vocab_size", 257, "--munch"], [*text, "--vocab_size", 0],
                      [*text, "--workers", 0], [*text, "--tokenizer", "in.txt"], ["--input", "-a.txt"],
                      [*text, "--tokenizer", "none.json"]):
        refused(*arguments)
    assert '--delimiter="-x"' in refused(*text, "--delimiter", "--")


def test_ids_that_do_not_fit_are_refused_not_wrapped(monkeypatch):
    class Wide:
        end_of_text, encode = 70_000, staticmethod(lambda text: [1, 2])
    monkeypatch.setattr(prepare, "parsed_tokenizer", lambda json_text: Wide)
    assert prepare.encode_batch([("x", False)], "")[0] == b"\1\0\2\0"
    with pytest.raises(ValueError, match="70000"):
        prepare.encode_batch([("x", True)], "")
    big = bpe.train_bpe({"a": 1}, 260)
    big.vocab_size = 65_537
    write("in.txt", make_documents(9))
    with pytest.raises(ValueError, match="65,537"):
        prepare.from_files("x", ["in.txt"], tokenizer=big)
    assert os.listdir("data") == []


def test_a_finished_folder_is_never_touched():
    write("in.txt", make_documents(30))
    go("--name", "x", "--input", "in.txt", "--vocab_size", 280)
    before = contents("x")
    assert "exists already" in refused_elsewhere("--name", "x", "--input", "in.txt")
    assert contents("x") == before


def test_a_given_tokenizer_is_kept_to_the_byte():
    write("in.txt", make_documents(200))
    go("--name", "a", "--input", "in.txt", "--vocab_size", 300, "--nfc")
    go("--name", "b", "--input", "in.txt", "--tokenizer", "data/a/tokenizer.json")
    assert contents("a") == contents("b")


def test_munch_has_the_vocabulary_of_bpe_and_silias_specials(monkeypatch):
    names = "a <|end-text|>, an <|actor|> and <|endoftext are text"
    documents, held_out = make_documents(120) + [names], make_documents(9, seed=1) + [names]
    write("in.txt", documents), write("val.txt", held_out)
    text = ["--input", "in.txt", "--val_input", "val.txt", "--workers", 1]
    monkeypatch.setattr(corpus, "BATCH", 3000)
    go("--name", "munch", *text, "--vocab_size", 400, "--munch")
    go("--name", "two", *text, "--vocab_size", 400, "--munch", "--workers", 2)
    go("--name", "given", *text, "--tokenizer", "data/munch/tokenizer.json")
    go("--name", "bpe", *text, "--vocab_size", 402)          # which has four special tokens
    assert contents("munch") == contents("two") == contents("given")
    assert decoded("munch", "train") == documents and decoded("munch", "val") == held_out
    munch, other = (load_tokenizer(f"data/{name}/tokenizer.json") for name in ("munch", "bpe"))
    assert type(munch) is bpe.LongestMatchTokenizer and type(other) is bpe.Tokenizer
    assert munch.vocab == other.vocab
    assert munch.specials == {"<|end-text|>": 398, "<|actor|>": 399}
    assert json.loads(Path("data/munch/meta.json").read_text("utf-8"))["end_of_text"] == 398
    ids = ids_of("munch", "train").tolist()
    assert ids.count(398) == len(documents) and 399 not in ids           # the names in a text are text
    assert ids != ids_of("bpe", "train").tolist()
    go("--name", "least", *text, "--vocab_size", 258, "--munch")


def run_script(*arguments, **more):
    command = [sys.executable, SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **more)


def test_the_script_ends_with_one_line_and_no_traceback():
    Path("bad.txt").write_bytes(b"abc\xff")
    result = run_script("--name", "x", "--input", "bad.txt")
    assert result.returncode == 1 and result.stdout == "" and not os.path.exists("data")
    assert result.stderr.startswith("error: bad.txt is not UTF-8") and result.stderr.count("\n") == 1


@posix
def test_a_full_disk_leaves_no_folder():
    resource = pytest.importorskip("resource")
    write("in.txt", ["word " * 50_000, "another one"])
    result = run_script("--name", "x", "--input", "in.txt", "--vocab_size", "260",
                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)))
    assert result.returncode == 1 and result.stderr == f"error: {Path('data/x')}: File too large.\n"
    assert os.listdir("data") == []


# ------------------------------------------------------------------------------------------------- workers

def test_the_number_of_workers_does_not_show(monkeypatch):
    write("in.txt", make_documents(700) + ["long one " * 5000])
    for constant, value in (("BLOCK", 4000), ("BATCH", 9000), ("PIECE", 3000)):
        monkeypatch.setattr(corpus, constant, value)
    for workers in (1, 2, 3):
        go("--name", f"w{workers}", "--input", "in.txt", "--vocab_size", 400, "--workers", workers)
    assert contents("w1") == contents("w2") == contents("w3")


def fail(batch):
    raise ValueError(f"The batch of {len(batch)} is no good.")


def die(batch):
    os._exit(1)


def test_an_error_in_a_worker_is_an_error_of_the_program():
    for work, sentence in ((fail, "The batch of 1 is no good."), (die, "A worker process died")):
        with pytest.raises(ValueError, match=sentence):
            list(corpus.map_batches(work, iter([("text", True)]), workers=2))


def test_only_a_few_batches_are_under_way(monkeypatch):
    """A source that is quicker than the workers must not fill the memory."""
    monkeypatch.setattr(corpus, "BATCH", 1)
    read = []
    source = (read.append(i) or (f"text {i}", True) for i in range(50))
    results = corpus.map_batches(partial(prepare.count_batch, nfc=False), source, workers=2)
    next(results)
    assert len(read) <= 6
    assert sum(1 for _ in results) == 49


def start_long_run(name):
    write("in.txt", [f"{i} {i * 7919 % 100_003} " * 30 for i in range(30_000)])
    command = [sys.executable, SCRIPT, "--name", name, "--input", "in.txt", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True,  # below: Ctrl-C is heard, even if a shell's "&" is not
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not list(Path(".").glob("data/.*.tmp")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)
    return process


@posix
def test_interruption_leaves_no_folder_that_looks_complete():
    for send in (lambda p: os.killpg(p.pid, signal.SIGINT), lambda p: p.terminate()):    # Ctrl-C, kill
        process = start_long_run("x")
        send(process)
        out, errors = process.communicate(timeout=30)
        assert process.returncode == 1 and errors.startswith("error: interrupted") and errors.count("\n") == 1
        assert os.listdir("data") == []
    process = start_long_run("x")
    process.kill()
    process.communicate(timeout=30)          # returns when the workers too have closed stdout: none lives on
    left, = os.listdir("data")
    assert re.fullmatch(r"\.x\.\d+\.tmp", left)
    write("in.txt", make_documents(20))
    go("--name", "x", "--input", "in.txt", "--vocab_size", 280)
    assert os.listdir("data") == ["x"]                                   # what the dead run left is gone


# ------------------------------------------------------------------------------------------------ storybook

def test_storybook_and_its_floor(capsys):
    folder = prepare.storybook(vocab_size=400, train=80, val=20, seed=3)
    meta = json.loads((folder / "meta.json").read_text("utf-8"))
    told = list(storybook.stories(20, 7))
    assert decoded("storybook", "train") == [text for text, _ in storybook.stories(80, 6)]
    assert decoded("storybook", "val") == [text for text, _ in told]
    nats = -sum(log_prob for _, log_prob in told)
    val = meta["val"]
    assert val["documents"] == 20 and meta["seed"] == 3 and meta["source"] == "storybook.py"
    assert meta["split"] == {"rule": "by random numbers (each side has its own)", "empty_documents": 0}
    assert val["floor_nats_per_token"] == pytest.approx(nats / len(ids_of("storybook", "val")))
    size = sum(len(text) for text, _ in told)
    assert val["floor_bits_per_byte"] == pytest.approx(nats / math.log(2) / size)
    assert 40 < nats / 20 < 110
    before = contents("storybook")
    assert prepare.storybook() == folder and contents("storybook") == before         # there already: no work
    assert "exists already" in refused_elsewhere("--name", "storybook")


def test_a_storybook_for_silia_beside_the_other():
    folder = prepare.storybook("silia_storybook", 400, train=80, val=20, seed=3, longest_match=True)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    assert type(tokenizer) is bpe.LongestMatchTokenizer and tokenizer.vocab_size == 400
    assert decoded("silia_storybook", "val") == [text for text, _ in storybook.stories(20, 7)]
    floor = json.loads((folder / "meta.json").read_text("utf-8"))["val"]["floor_bits_per_byte"]
    prepare.storybook(vocab_size=400, train=80, val=20, seed=3)
    meta = json.loads(Path("data/storybook/meta.json").read_text("utf-8"))
    assert meta["val"]["floor_bits_per_byte"] == floor                   # a property of the text alone


# ------------------------------------------------------------------------------------------------- download

class Server(ThreadingHTTPServer):
    """Serves `body` under any path, and misbehaves as told."""

    def __init__(self, body, etag='"1"'):
        super().__init__(("127.0.0.1", 0), Answer)
        self.body, self.etag, self.requests = body, etag, []
        self.drop, self.ranges, self.length, self.codes, self.most = [], True, None, [], None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        server, wanted = self.server, self.headers.get("Range")
        server.requests.append(wanted)
        code = server.codes.pop(0) if server.codes else 200
        if code != 200:
            return self.send_error(code)
        start = int(wanted[6:-1]) if wanted and server.ranges else 0
        if wanted and start >= len(server.body):
            return self.send_error(416)
        body, total = server.body[start:], len(server.body)
        body = body[:server.most] if wanted else body
        self.send_response(206 if wanted and server.ranges else 200)
        if server.etag:
            self.send_header("ETag", server.etag)
        if wanted and server.ranges:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{total}")
        self.send_header("Content-Length", str(server.length or len(body)))
        self.end_headers()
        self.wfile.write(body[:server.drop.pop(0)] if server.drop else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(corpus, "PAUSE", 0)
    server = Server(random.Random(0).randbytes(900_000))
    yield server
    server.shutdown()
    server.server_close()


def fetch(server):
    corpus.download(f"{server.url}/file", Path("raw/file"))
    assert os.listdir("raw") == ["file"]
    return Path("raw/file").read_bytes()


def test_a_broken_download_goes_on_where_it_stopped(server):
    server.drop = [300_000, 300_000]
    assert fetch(server) == server.body
    first, second, third = server.requests
    assert first is None and int(second[6:-1]) > 0 and int(third[6:-1]) > int(second[6:-1])
    assert fetch(server) == server.body and len(server.requests) == 3                # there: nothing to do
    os.remove("raw/file")
    server.drop, server.most = [300_000], 250_000            # answers with a part of what we ask for
    assert fetch(server) == server.body


def test_a_changed_file_is_not_glued_to_an_old_part(server):
    def leave_a_part():
        server.drop, server.codes = [400_000], [200] + [404]
        with pytest.raises(ValueError, match="404"):
            fetch(server)
        assert sorted(os.listdir("raw")) == ["file.part", "file.part.etag"]

    leave_a_part()
    server.body, server.etag = server.body[::-1], '"2"'
    assert fetch(server) == server.body
    os.remove("raw/file")
    leave_a_part()
    server.body = b"short now"
    assert fetch(server) == server.body
    os.remove("raw/file")
    server.etag = None                      # nothing says which file a part is of: begin again
    server.body = bytes(900_000)
    server.drop = [500_000]
    assert fetch(server) == server.body and server.requests[-1] is None


def test_a_server_that_ignores_ranges_or_is_busy(server):
    server.drop, server.ranges, server.codes = [300_000], False, [503, 200, 429]
    assert fetch(server) == server.body and len(server.requests) == 4


def test_a_short_file_is_not_taken_for_a_whole_one(server, monkeypatch):
    server.length = len(server.body) + 10                    # promises more than it has, always
    with pytest.raises(ValueError, match="could not be downloaded"):
        fetch(server)
    assert not os.path.exists("raw/file") and len(server.requests) < 30
    server.length = 1000                                     # promises less: only the known size can tell
    monkeypatch.setattr(prepare, "HUB", server.url)
    monkeypatch.setattr(prepare, "TINYSTORIES", {"train.txt": 900_000, "valid.txt": 900_000})
    assert "1,000 bytes and not 900,000" in refused()
    assert sorted(os.listdir("data/raw")) == ["train.txt.part"]


def test_a_file_put_there_by_hand_is_taken_only_if_it_is_whole(server, capsys):
    Path("raw").mkdir()
    Path("raw/file").write_bytes(server.body[:700_000])
    size = len(server.body)
    server.codes = [404]
    with pytest.raises(ValueError, match="404"):
        corpus.download(f"{server.url}/file", Path("raw/file"), size)
    assert Path("raw/file").read_bytes() == server.body[:700_000]            # kept until there is a whole one
    corpus.download(f"{server.url}/file", Path("raw/file"), size)
    assert Path("raw/file").read_bytes() == server.body and os.listdir("raw") == ["file"]
    assert "has 700,000 bytes and not 900,000: downloading it anew." in capsys.readouterr().out
    corpus.download(f"{server.url}/file", Path("raw/file"), size)
    assert len(server.requests) == 2                                         # whole now: nothing to do


def test_tinystories_from_a_server(server, monkeypatch):
    server.body = "\n<|endoftext|>\n".join(make_documents(99)).encode()
    monkeypatch.setattr(prepare, "HUB", server.url)
    monkeypatch.setattr(prepare, "TINYSTORIES", dict.fromkeys(("train.txt", "valid.txt"), len(server.body)))
    go("--vocab_size", 300)
    assert decoded("tinystories", "train") == decoded("tinystories", "val") == make_documents(99)
    server.codes = [404] * 9
    go("--name", "laptop", "--vocab_size", 280)              # the raw files are shared
    assert sorted(os.listdir("data")) == ["laptop", "raw", "tinystories"]


def test_offline_says_what_to_do(monkeypatch):
    monkeypatch.setattr(prepare, "HUB", "http://127.0.0.1:9")
    sentence = refused()
    assert all(word in sentence for word in ("connect", os.path.join("data", "raw"), "storybook", "--input"))


# --------------------------------------------------------------------------------------------- conversations

def make_chats(n, seed=0):
    """n conversations of one to six turns, of the texts of make_documents()."""
    rng = random.Random(seed)
    texts = make_documents(6 * n, seed)
    texts += ["", " <|end|> <|user|>", "<|assistant|>", "<|endoftext|>\n", "\ud83d lone"]
    roles = ("user", "assistant") * 3
    return [[(role, rng.choice(texts)) for role in roles[:rng.choice((2, 2, 3, 4, 6))]] for _ in range(n)]


def line_of(turns, **more):
    return json.dumps({"messages": [{"role": role, "content": text, **more} for role, text in turns], **more})


def write_chats(path, chats):
    Path(path).write_text("".join(line_of(turns) + "\n" for turns in chats), encoding="utf-8")


def test_conversations_from_lines_of_json(monkeypatch):
    """Documents in the format of encode_chat; no content can forge a turn; the mask's tokens are counted."""
    monkeypatch.setattr(corpus, "BLOCK", 100)  # lines in many blocks
    chats, held_out = make_chats(40), make_chats(5, seed=1)
    write_chats("a.jsonl", chats[:25])
    lines = "\r\n \r\n".join(line_of(turns, id=" ", weight=1) for turns in chats[25:])
    Path("b.JSONL.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf\n" + lines.encode()))
    write_chats("val.jsonl", held_out)
    go("--name", "talk", "--input", "a.jsonl", "b.JSONL.gz", "--val_input", "val.jsonl", "--vocab_size", 300)
    tokenizer = load_tokenizer("data/talk/tokenizer.json")
    meta = json.loads(Path("data/talk/meta.json").read_text("utf-8"))
    for split, wanted in (("train", chats), ("val", held_out)):
        ids = [id for turns in wanted for id in [*bpe.encode_chat(tokenizer, turns), tokenizer.end_of_text]]
        assert ids_of("talk", split).tolist() == ids
        turns = [turn for turns in wanted for turn in turns]
        roles = [role for role, _ in turns]
        for name, n in (("<|end|>", len(turns)), ("<|user|>", roles.count("user")),
                        ("<|assistant|>", roles.count("assistant")), ("<|endoftext|>", len(wanted))):
            assert ids.count(tokenizer.specials[name]) == n
        answers = [text for role, text in turns if role == "assistant"]
        size = len(tokenizer.decode([id for id in ids if id not in tokenizer.specials.values()]).encode())
        assert meta[split] == {"documents": len(wanted), "tokens": len(ids), "bytes": size,
                               "assistant_tokens": sum(len(tokenizer.encode(text)) + 1 for text in answers)}


def test_equal_conversations_never_stand_on_both_sides(monkeypatch):
    """However they are spelt; and the ids do not depend on the number of workers."""
    chats = make_chats(300)
    rng = random.Random(2)
    lines = [rng.choice((line_of(turns), line_of(turns, id=i), " " + line_of(turns)))
             for i, turns in enumerate(chats + chats)]
    Path("a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setattr(prepare, "useful_workers", lambda workers, paths: workers)
    for workers in (1, 2):
        go("--name", f"w{workers}", "--input", "a.jsonl", "--vocab_size", 300, "--workers", workers)
    assert contents("w1") == contents("w2")
    train, val = (set(decoded("w1", split)) for split in ("train", "val"))
    assert not train & val and len(val) >= 3
    assert "whole documents" in split_of("w1")["rule"]


def test_a_conversation_is_never_cut_in_two():
    """Nor when a few hold more than half of the text, where the last tenths of plain text are taken."""
    short = [[("user", f"What is {i}?"), ("assistant", "A number. " * 20)] for i in range(200)]
    long = [[("user", "Count."), ("assistant", f"{i}, " * 9000)] for i in range(2)]
    write_chats("a.jsonl", short + long)
    go("--name", "talk", "--input", "a.jsonl", "--vocab_size", 300)
    assert "whole documents" in split_of("talk")["rule"]
    tokenizer = load_tokenizer("data/talk/tokenizer.json")
    told = [tokenizer.decode(bpe.encode_chat(tokenizer, turns)) for turns in short + long]
    assert sorted(decoded("talk", "train") + decoded("talk", "val")) == sorted(told)


HELLO = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'


@pytest.mark.parametrize("line, sentence", [
    ("Once upon a time", "line 3, is not JSON"), ('{"messages": [', "line 3, is not JSON"),
    ("NESTED", "line 3, is not JSON"), ("[]", 'line 3, has no list of "messages"'),
    ('{"text": "A story."}', 'line 3, has no list of "messages"; expected is a line like {"messages": ['),
    ('{"messages": []}', 'line 3, has no list of "messages"'), ('{"messages": [1]}', "line 3, has no list"),
    ('{"messages": [{"content": "Hi"}]}', 'line 3, has a message without "role"'),
    ('{"messages": [{"role": "user"}]}', 'line 3, has a message without "content"'),
    (HELLO.replace("user", "system"), "line 3, has the role 'system'"),
    (HELLO.replace('"user"', "[1]"), "line 3, has the role '[1]'"),
    (HELLO.replace("user", "assistant"), "line 3, has two turns of the assistant in a row"),
    (HELLO.replace('"Hello"', "null"), "line 3, has a content that is no text"),
    ('{"messages": [{"role": "user", "content": "Hi"}]}', "line 3, has no turn of the assistant"),
])
def test_a_line_that_is_no_conversation_is_told_by_its_number(line, sentence):
    line = line.replace("NESTED", "[" * 9999)
    Path("a.jsonl").write_text(f"{HELLO}\n\n{line}\n{HELLO}\n", encoding="utf-8")
    assert f"a.jsonl, {sentence}" in refused("--name", "x", "--input", "a.jsonl")


def test_files_and_options_that_conversations_do_not_go_with(monkeypatch):
    write("a.txt", make_documents(9))
    for name, text in (("empty.jsonl", " \n\n"), ("few.jsonl", f"{HELLO}\n" * 9)):
        Path(name).write_text(text, encoding="utf-8")
    save_tokenizer(bpe.train_bpe({"a": 1}, 260, ("<|endoftext|>", "<|end|>", "<|user|>", "<x>")), "t.json")
    for arguments, sentence in (
            (["empty.jsonl"], "empty.jsonl is empty"), (["few.jsonl"], "too few, or too uneven"),
            (["a.txt", "few.jsonl"], "do not go together"),
            (["a.txt", "--val_input", "few.jsonl"], "do not go together"),
            (["few.jsonl", "--munch"], "--munch does not have"),
            (["few.jsonl", "--delimiter", "x"], "a line is a conversation"),
            (["few.jsonl", "--val_input", "few.jsonl", "--tokenizer", "t.json"], "needs <|assistant|> and")):
        assert sentence in refused("--name", "x", "--input", *arguments)
    assert "--munch does not have" in refused("--name", "storybook_chat", "--munch")
    monkeypatch.setattr(corpus, "BLOCK", 100)
    monkeypatch.setattr(corpus, "LIMIT", 500)
    Path("long.jsonl").write_text(f"{HELLO}\n{HELLO * 9}\n", encoding="utf-8")
    assert "long.jsonl, line 2, has more than 500 char" in refused("--name", "x", "--input", "long.jsonl")


def test_a_storybook_of_conversations():
    folder = prepare.storybook("storybook_chat", 400, train=30, val=5, seed=3)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    for split, n, stream in (("train", 30, 6), ("val", 5, 7)):
        ids = []
        for turns, _, _ in storybook.conversations(n, stream):
            turns = [(("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns)]
            ids += [*bpe.encode_chat(tokenizer, turns), tokenizer.end_of_text]
        assert ids_of("storybook_chat", split).tolist() == ids
    val = json.loads((folder / "meta.json").read_text("utf-8"))["val"]
    told = list(storybook.conversations(5, 7))
    nats = -sum(answers for _, _, answers in told)
    assert val["floor_nats_per_assistant_token"] == pytest.approx(nats / val["assistant_tokens"])
    assert val["floor_nats_per_token"] == pytest.approx(-sum(p for _, p, _ in told) / val["tokens"])
