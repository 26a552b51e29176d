"""The split, for prepare.py: measure a corpus, decide what is for validation, cut long documents in two, say
what came of it."""

import heapq
import re
import sys
from typing import NamedTuple

from support import need
from support.corpus import last_piece

ENOUGH = 16_000  # bytes for validation, about 4,000 tokens: a loss measured on fewer says little
LONG = 2_000  # bytes of a document whose last tenth says something
SEAM = 1_000  # characters in which to look for the end of a line where a document is cut in two


class Rule(NamedTuple):
    """What is for validation: the documents of some hundredths, or, if there are none, the last tenths of the
    documents in `long`."""

    hundredths: list
    long: dict  # {index of the document: its bytes}

    def __str__(self):
        if self.hundredths:
            return f"by hash (whole documents, {len(self.hundredths)}% of all hashes)"
        return f"by position (the last tenth of each of the {len(self.long)} longest documents)"


def choose_rule(numbered_pieces, cut=True):
    """Read a corpus as a stream of (index, hundredth, piece) -> Rule. ValueError if it cannot be split.

    Without `cut`, no document may be cut in two.
    """
    sizes, longest = survey(numbered_pieces)
    size = sum(sizes)
    need(size, "There is no text in the input.")
    hundredths = choose_hundredths(sizes)
    need(hundredths or cut, "These conversations are too few, or too uneven, to set some aside for "
                            "validation: give more of them, or a --val_input.")
    if not cut or hundredths and 2 * sum(n_bytes for n_bytes in longest.values() if n_bytes > LONG) < size:
        return Rule(hundredths, {})
    need(longest, "The input is a few short texts over and over, so none is left for validation; give more "
                  "text, or a --val_input.")
    return Rule([], longest)


def choose_hundredths(sizes):
    """Choose for validation from the bytes in each hundredth -> a list, empty if none will do.

    In a large even corpus it is the first one, 1% of the text. Others follow if that is little; one that has
    too much (copies of a text) is left out. The choice rarely changes when a document is added.
    """
    size = sum(sizes)
    least = min(max(ENOUGH, size / 200), size / 20)
    most = min(4 * least, size / 10)
    chosen, chosen_size = [], 0
    for hundredth, n_bytes in enumerate(sizes):
        if chosen_size < least and chosen_size + n_bytes <= most:
            chosen.append(hundredth)
            chosen_size += n_bytes
    return chosen if chosen_size >= least else []


def survey(numbered_pieces):
    """Measure a stream of (index, hundredth, piece) -> ([bytes in each hundredth], {index: bytes}).

    The latter has the documents that hold over 1% of all bytes, each of them.
    """
    sizes = [0] * 100
    longest = [(0, -1)] * 100  # a heap of (bytes, index): no more can hold over 1%
    size = 0
    for index, hundredth, (text, ends) in numbered_pieces:
        size += len(text.encode())
        if ends:
            sizes[hundredth] += size
            heapq.heappushpop(longest, (size, index))
            size = 0
    return sizes, {index: size for size, index in longest if size > sum(sizes) / 100}


def cut_document(document, size):
    """Cut a document of `size` bytes before its last tenth -> its pieces, as ("train" or "val", piece).

    The cut is at the next end of a line, else at the next white space, if one is near. Where it is depends on
    the text alone, not on its pieces.
    """
    left = size * 9 // 10  # bytes before the last tenth
    near = min(SEAM, size // 40)  # so at least three quarters of the tenth stay
    begun = False
    for text, ends in document:
        data = text.encode()
        if len(data) <= left:
            yield "train", (text, False)
            left -= len(data)
            begun = True
            continue
        place = len(data[:left].decode(errors="ignore"))
        while len(text) <= place + near and not ends:
            more, ends = next(document)
            text += more
        window = text[place:place + near]
        seam = re.search(r"\n", window) or re.search(r"\s", window)
        place += seam.start() if seam else 0
        for piece in last_piece(text[:place], begun):
            yield "train", piece
        yield "val", (text[place:].lstrip(), ends)
        for piece in document:
            yield "val", piece


def report(meta, folder):
    """Print what meta.json says of the split. Warn on stderr if it is lopsided."""
    train, val, split = meta["train"], meta["val"], meta["split"]
    print(f"{folder}: a vocabulary of {meta['vocab_size']:,}; {train['tokens']:,} tokens for training, "
          f"{val['tokens']:,} for validation.")
    for name, side in (("train", train), ("val", val)):
        print(f"{name}: {side['documents']:,} documents, {side['tokens']:,} tokens, {side['bytes']:,} bytes")
    print(f"split {split['rule']}; empty documents left out: {split['empty_documents']:,}")
    if split.get("delimiters") == 0:
        print(f"The delimiter {split['delimiter']!r} occurs nowhere, so each file is one document.")
    share = val["tokens"] / (train["tokens"] + val["tokens"])
    if val["tokens"] < 1000 or share > 1 / 5:
        print(f"warning: {folder} has {val['tokens']:,} tokens for validation, {share:.1%} of all (better: "
              "over 1,000, under 20%); give more text, or another --val_input.", file=sys.stderr)
