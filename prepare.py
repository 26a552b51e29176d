"""Text -> data/NAME/, a folder that train.py can read.

    python prepare.py                                    TinyStoriesV2 (downloaded), 32,000 tokens
    python prepare.py --name laptop --vocab_size 4096    the same stories, another tokenizer
    python prepare.py --name storybook                   stories made on the spot (storybook.py)
    python prepare.py --name munched --munch             encoded by longest match, as Silia does
    python prepare.py --name mine --input a.txt b.txt    text of your own

    train.bin, val.bin   token ids, little-endian uint16, each document followed by the end-of-text id
    tokenizer.json       trained on the training documents alone, or a copy of --tokenizer
    meta.json            documents, tokens, bytes of each split; the tokenizer's sha256; the source

What is a document: files are cut at the delimiter (`<|endoftext|>`), and no document spans two files. A byte
order mark is dropped, CRLF and CR become LF, white space around a document (str.strip) goes, empty documents
go. All else stays, and the name of a special token inside a document is ordinary text. `bytes` in meta.json
counts this text in UTF-8.

How any size fits into memory: a file is a stream of pieces (text, ends), read block by block. A piece is a
document or, if that is long, a part of it, cut only where the tokenizer would cut anyway (SAFE_CUT). The
stream is read anew for each task: to hash (which documents are for validation?), to count chunks for the
tokenizer, to encode. Batches of pieces go to worker processes and come back in order, so the output does not
depend on the number of workers. The folder is written under a temporary name and renamed last: whatever
happens, data/NAME is whole or absent.
"""

import argparse
import hashlib
import json
import math
import os
import re
import signal
import sys
from collections import Counter
from functools import partial

from tqdm import tqdm

import storybook as book
import tokenizer as bpe
from support import need
from support.corpus import (BATCH, DATA, END, count_batch, documents, download, hashed, new_folder, size_of,
                            spread, val_limit, write_split)
from support.hf_tokenizer import load_tokenizer


# ----------------------------------------------------------------------------------------------------------
# From files to documents


# ----------------------------------------------------------------------------------------------------------
# Work and workers


# ----------------------------------------------------------------------------------------------------------
# The folder, and the three sources of what is in it


def build(name, source, read, tokenizer=None, vocab_size=32000, nfc=False, munch=False, workers=1, seed=None,
          nats=None):
    """Writes data/NAME. `read(split, label)` gives a fresh stream, label being for the progress bar. Where
    -log p of the whole validation split is known (`nats`), it gives the floor that no model gets below."""
    with new_folder(name) as folder:
        if tokenizer is None:
            counts = Counter()
            for some in spread(partial(count_batch, nfc=nfc), read("train", "count"), workers):
                counts.update(some)
            need(counts, "There is no text for train.bin: the input is empty.")
            tokenizer = bpe.train_bpe(counts, vocab_size, bpe.SILIA_SPECIALS if munch else bpe.SPECIALS, nfc,
                                      progress=sys.stderr.isatty(), munch=munch)
        need(tokenizer.vocab_size <= 1 << 16,
             f"The tokenizer has {tokenizer.vocab_size:,} tokens; 16-bit ids allow 65,536.")
        json_text = tokenizer.to_json()
        (folder / "tokenizer.json").write_bytes(json_text.encode())
        meta = {"format": 1, "name": name, "source": source, "vocab_size": tokenizer.vocab_size,
                "end_of_text": tokenizer.end_of_text,
                "tokenizer_sha256": hashlib.sha256(json_text.encode()).hexdigest()}
        for split in ("train", "val"):
            meta[split] = write_split(folder / f"{split}.bin", read(split, split), json_text, workers)
        if nats is not None:
            meta["seed"] = seed
            meta["val"] |= {"floor_nats_per_token": nats / meta["val"]["tokens"],
                            "floor_bits_per_byte": nats / (meta["val"]["bytes"] * math.log(2))}
        (folder / "meta.json").write_bytes(json.dumps(meta, indent=2, ensure_ascii=False).encode() + b"\n")
    print(f"{DATA / name}: a vocabulary of {meta['vocab_size']:,}; {meta['train']['tokens']:,} tokens for "
          f"training, {meta['val']['tokens']:,} for validation.")
    return DATA / name


def from_files(name, inputs, val_inputs=(), delimiter=END, tokenizer=None, workers=1, **options):
    """data/NAME from text files; without validation files, the split is by hash."""
    paths = [*inputs, *val_inputs]
    for path in paths:
        need(os.path.isfile(path), f"{path} does not exist or is not a file.")
    workers = min(workers, 1 + sum(map(os.path.getsize, paths)) // BATCH)  # one is quicker for a little
    cut = tokenizer is None or tokenizer.pattern in (bpe.GPT4_PATTERN, bpe.GPT2_PATTERN)
    limit = None if val_inputs else val_limit(documents(inputs, delimiter, cut, "split"))

    def read(split, label):
        stream = documents(val_inputs or inputs if split == "val" else inputs, delimiter, cut, label)
        if val_inputs:
            return stream
        return (piece for key, piece in hashed(stream) if (key < limit) == (split == "val"))

    return build(name, ", ".join(map(os.path.basename, paths)), read, tokenizer, workers=workers, **options)


STORYBOOKS = {"storybook": 1024, "storybook_munch": 512}  # tokens; the latter is for Silia


def storybook(name="storybook", vocab_size=0, seed=1, train=25_000, val=300, munch=False, **options):
    """data/NAME from the generator in storybook.py; returns at once if it is there already. The two splits
    come from independent random streams (2 seed, 2 seed + 1), so they need no split by hash."""
    if (DATA / name / "meta.json").exists():
        return DATA / name
    print(f"Making {train + val:,} little stories for {DATA / name}.")
    told = {split: list(tqdm(book.stories(n, stream), "stories", n, disable=None, leave=False))
            for split, n, stream in (("train", train, 2 * seed), ("val", val, 2 * seed + 1))}
    return build(name, "storybook.py", lambda split, label: ((text, True) for text, _ in told[split]),
                 vocab_size=vocab_size or STORYBOOKS[name], munch=munch or name == "storybook_munch",
                 seed=seed, nats=-math.fsum(log_prob for _, log_prob in told["val"]), **options)


HUB = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
TINYSTORIES = {"TinyStoriesV2-GPT4-train.txt": 2_227_753_162, "TinyStoriesV2-GPT4-valid.txt": 22_502_601}


def tinystories(name, **options):
    """data/NAME from TinyStoriesV2, downloaded to data/raw/ unless it is there (sizes above in bytes)."""
    paths = [DATA / "raw" / file for file in TINYSTORIES]
    for path, size in zip(paths, TINYSTORIES.values()):
        download(f"{HUB}/{path.name}", path)
        need(size_of(path) == size, f"{path} has {size_of(path):,} bytes and not {size:,}; "
                                    "remove it and start again to download it anew.")
    return from_files(name, paths[:1], paths[1:], **options)


# ----------------------------------------------------------------------------------------------------------
# Command line


def arguments(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--name", help="the folder in data/ (default: tinystories; or: storybook, storybook_munch)")
    option("--input", nargs="+", metavar="FILE", help="text of your own, in UTF-8")
    option("--val_input", nargs="+", metavar="FILE", help="to validate on (else 1%% of the input)")
    option("--delimiter", metavar="S", default=END, help=rf"between documents (default: {END}); \n is LF")
    option("--vocab_size", type=int, metavar="N", help="default: 32000; storybooks: 1024, 512 (munch)")
    option("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of a new one")
    option("--nfc", action="store_true", help="normalise text to Unicode NFC first")
    option("--munch", action="store_true", help="encode by longest match and with Silia's special tokens")
    cores = min(os.cpu_count() or 1, 32)
    option("--workers", type=int, metavar="N", default=cores, help="processes (default: %(default)s)")
    parser.error = lambda message: sys.exit(f"error: {message}")
    args = parser.parse_args(argv)

    need(args.name is not None or not args.input, "Text of your own needs a --name for its folder.")
    args.name = "tinystories" if args.name is None else args.name
    need(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", args.name) and args.name != "raw",
         f"--name {args.name!r} will not do: use letters, digits, '.', '_', '-' (and 'raw' is taken).")
    need(args.name not in STORYBOOKS or not args.input,
         "The storybook is made, not read: with --input, choose another --name.")
    args.munch |= args.name == "storybook_munch"
    need(args.input or not args.val_input and args.delimiter == END,
         "--val_input and --delimiter go with --input.")
    need(args.delimiter, "The --delimiter must not be empty.")
    need(not args.tokenizer or not (args.vocab_size or args.nfc or args.munch),
         "A --tokenizer brings its own size and kind: leave out --vocab_size, --nfc and --munch.")
    least = 256 + len(bpe.SILIA_SPECIALS if args.munch else bpe.SPECIALS)
    need(args.vocab_size is None or least <= args.vocab_size <= 1 << 16,
         f"--vocab_size goes from {least} (the bytes and the special tokens) to 65536 (16-bit ids).")
    need(args.workers >= 1, "--workers must be at least 1.")
    return args


def main(argv=None):
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up too
    try:
        args = arguments(argv)
        need(not os.path.lexists(DATA / args.name),
             f"{DATA / args.name} exists already; remove it, or choose another --name.")
        options = {"workers": args.workers, "nfc": args.nfc, "munch": args.munch}
        options |= {"vocab_size": args.vocab_size} if args.vocab_size else {}
        options |= {"tokenizer": load_tokenizer(args.tokenizer)} if args.tokenizer else {}
        if args.name in STORYBOOKS:
            storybook(args.name, **options)
        elif args.input:
            delimiter = args.delimiter.replace(r"\n", "\n")
            from_files(args.name, args.input, args.val_input or [], delimiter, **options)
        else:
            tinystories(args.name, **options)
    except KeyboardInterrupt:
        sys.exit("error: interrupted, so there is no new folder (a download goes on where it stopped).")
    except (ValueError, OSError) as error:
        sys.exit(f"error: {str(error).rstrip('.')}.")


if __name__ == "__main__":
    main()
