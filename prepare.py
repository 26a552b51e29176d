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
import contextlib
import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import requests
from tqdm import tqdm

import storybook as book
import tokenizer as bpe
from tokenizer import need

DATA = Path("data")
END = "<|endoftext|>"  # the default delimiter
BLOCK = 1 << 20  # characters read at a time
BATCH = 1 << 20  # characters that a worker gets at a time
PIECE = 1 << 20  # characters from which on a document is cut into pieces
LIMIT = 16 * PIECE  # characters without a safe place to cut: no text whose memory we could bound
HEAD = 1 << 16  # characters of a document that are hashed, from its beginning
progress = partial(tqdm, unit="B", unit_scale=True, disable=None)

# Where both split patterns (GPT-4's and GPT-2's) begin a new chunk whatever is around, and where the chunk
# before ends the same without a look at what follows: before a space after anything but white space (a chunk
# has such a space only in front); between a letter or digit and a line break or punctuation mark; between a
# letter and a digit. No combining mark follows, so NFC sees no difference either.
SAFE_CUT = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=[\n!-/:-@\[-`{-~，。、])|(?<=[A-Za-z])(?=[0-9])")


# ----------------------------------------------------------------------------------------------------------
# From files to documents


def read_text(path, bar):
    """A UTF-8 file -> str after str, without a byte order mark and with LF for every line end, then None."""
    with open(path, encoding="utf-8-sig", newline=None) as file:
        start = bar.n
        try:
            while text := file.read(BLOCK):
                need("\0" not in text, f"{path} is no plain text: it has zero bytes (UTF-16, or binary?).")
                yield text
                bar.update(start + file.buffer.tell() - bar.n)
            yield None
        except UnicodeDecodeError as error:
            offset = file.buffer.tell() - len(error.object) + error.start  # object's bytes end at tell()
            raise ValueError(f"{path} is not UTF-8 text, but perhaps UTF-16 or Latin-1 (see the byte at "
                             f"offset {offset}); please save it as UTF-8.") from None


def pieces(path, delimiter, cut, bar):
    """A file -> its documents as (text, ends). If `cut`, those longer than PIECE come in several pieces, of
    which only the last one ends the document (and may be empty)."""
    rest, begun = "", False  # of the document at hand: text not given out; was any given out?
    for text in read_text(path, bar):
        *whole, rest = (rest, "") if text is None else (rest + text).split(delimiter)
        for document in whole:
            document = document.rstrip() if begun else document.strip()
            if document or begun:
                yield document, True
            begun = False
        while cut and (place := SAFE_CUT.search(rest, PIECE, len(rest) - len(delimiter))):
            piece, rest = rest[:place.start()], rest[place.start():]
            yield piece if begun else piece.lstrip(), False
            begun = True
        need(len(rest) <= LIMIT, f"{path} has more than {LIMIT:,} characters without a place to cut them; "
                                 "is the --delimiter right?")


def documents(paths, delimiter, cut, label):
    """The pieces of several files, under a progress bar."""
    with progress(desc=label, total=sum(map(os.path.getsize, paths))) as bar:
        for path in paths:
            yield from pieces(path, delimiter, cut, bar)


def hashed(stream):
    """Pieces -> (hash of the document's beginning, piece)."""
    fresh = True
    for text, ends in stream:
        if fresh:
            digest = hashlib.blake2b(text[:HEAD].encode(), digest_size=8).digest()
        yield int.from_bytes(digest, "big"), (text, ends)
        fresh = ends


def val_limit(stream):
    """The hash below which a document is for validation: about 1% are, by their text alone. So a document
    stays on its side whatever the corpus gains or loses, and equal ones stay together. If chance puts all on
    one side (there are few), those with the smallest hash are for validation."""
    smallest, largest = 1 << 64, 0
    for key, _ in hashed(stream):
        smallest, largest = min(smallest, key), max(largest, key)
    need(smallest <= largest, "There is no text in the input.")
    need(smallest < largest, "The input is one document only (or copies of one), so none is left for "
                             "validation; give the --delimiter that separates documents, or a --val_input.")
    limit = 2**64 // 100
    return limit if smallest < limit <= largest else smallest + 1


# ----------------------------------------------------------------------------------------------------------
# Work and workers


def batches(stream):
    batch, size = [], 0
    for piece in stream:
        batch.append(piece)
        size += len(piece[0]) + 16  # so that many tiny documents fill a batch as well
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def count_batch(batch, nfc):
    return bpe.count_chunks((text for text, _ in batch), nfc=nfc)


parse = lru_cache(maxsize=1)(bpe.parse)  # each process parses the tokenizer once, though each batch brings it


def encode_batch(batch, json_text):
    """Pieces -> (ids as the bytes of a .bin file, documents, bytes of text)."""
    tokenizer, ids = parse(json_text), []
    for text, ends in batch:
        ids += tokenizer.encode(text)
        ids += [tokenizer.end_of_text] * ends
    ids = np.array(ids, dtype=np.int64)
    most = ids.max(initial=0)
    need(most <= 0xFFFF, f"The token id {most} does not fit into 16 bits.")
    size = sum(len(text.encode()) for text, _ in batch)
    return ids.astype("<u2").tobytes(), sum(ends for _, ends in batch), size


def begin_worker():
    """In a new process: leave Ctrl-C to the parent, and end with it even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def spread(work, stream, workers):
    """work(batch) for the batches of a stream, in order; at most two batches a worker are under way. Workers
    are fresh ("spawned") processes: alike on every system, none inherits our threads or files."""
    if workers == 1:
        yield from map(work, batches(stream))
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin_worker)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is born meanwhile ignores Ctrl-C from birth
    for _ in range(workers):
        pool.submit(int)
    signal.signal(signal.SIGINT, handler)
    under_way = deque()
    try:
        for batch in batches(stream):
            under_way.append(pool.submit(work, batch))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenExecutor:
        raise ValueError("A worker process died, perhaps for lack of memory; try fewer --workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------
# The folder, and the three sources of what is in it


def alive(process):
    try:
        return os.name == "nt" or os.kill(process, 0) is None  # on Windows, that is no question but a kill
    except OSError as error:
        return isinstance(error, PermissionError)


@contextlib.contextmanager
def new_folder(name):
    """A folder under a temporary name, which becomes data/NAME if all goes well and vanishes if not. What a
    killed run left behind (its name holds the number of a process that is no more) is cleared away."""
    DATA.mkdir(parents=True, exist_ok=True)
    for old in DATA.iterdir():
        match = re.fullmatch(rf"\.{re.escape(name)}\.(\d+)\.tmp", old.name)
        if match and not alive(int(match[1])):
            shutil.rmtree(old, ignore_errors=True)
    folder = DATA / f".{name}.{os.getpid()}.tmp"
    folder.mkdir(exist_ok=True)
    try:
        yield folder
        for path in folder.iterdir():  # what is renamed must be on the disk
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        os.rename(folder, DATA / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_split(path, stream, json_text, workers):
    """Encodes a stream into a .bin file -> {"documents", "tokens", "bytes"}."""
    total = Counter(documents=0, tokens=0, bytes=0)
    with open(path, "wb") as file:
        for ids, documents, size in spread(partial(encode_batch, json_text=json_text), stream, workers):
            file.write(ids)
            total.update(documents=documents, tokens=len(ids) // 2, bytes=size)
    need(total["documents"], f"There is no text for {path.name}: the input is empty.")
    return dict(total)


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
TRIES, PAUSE = 5, 2.0  # attempts in a row that bring nothing new; seconds between them, growing


def tinystories(name, **options):
    """data/NAME from TinyStoriesV2, downloaded to data/raw/ unless it is there (sizes above in bytes)."""
    paths = [DATA / "raw" / file for file in TINYSTORIES]
    for path, size in zip(paths, TINYSTORIES.values()):
        download(f"{HUB}/{path.name}", path)
        need(size_of(path) == size, f"{path} has {size_of(path):,} bytes and not {size:,}; "
                                    "remove it and start again to download it anew.")
    return from_files(name, paths[:1], paths[1:], **options)


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def download(url, path):
    """A URL -> a file, called PATH.part until it is whole. A broken download goes on where it stopped, if the
    server still has the same file (PATH.part.etag says which one the part is of)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part, mark, failures, answered = Path(f"{path}.part"), Path(f"{path}.part.etag"), 0, False
    while not path.exists():
        before = size_of(part)
        try:
            problem, answered = receive(url, part, mark), True
        except requests.RequestException:
            problem, answered = "no connection", answered or size_of(part) > before
        if not problem:
            os.replace(part, path)
            mark.unlink()
            return
        failures = 0 if size_of(part) > before else failures + 1
        need(answered and failures < TRIES,
             f"{url} could not be downloaded ({problem}): connect to the internet and start again (what came "
             f"is kept), or put the file into {path.parent} by hand, or use --name storybook, or --input.")
        time.sleep(PAUSE * failures)


def receive(url, part, mark):
    """One request; what comes goes into `part`. Returns None if that is the whole file now, or a problem."""
    known = mark.read_text("utf-8") if mark.exists() else ""
    have = size_of(part) if known else 0
    wanted = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=wanted, stream=True, timeout=(10, 30)) as answer:
        code, headers = answer.status_code, answer.headers
        etag, span = headers.get("ETag") or headers.get("Last-Modified", ""), headers.get("Content-Range", "")
        if code == 200:  # the file from its beginning
            mode, have, total = "wb", 0, int(headers.get("Content-Length", -1))
        elif code == 206 and etag == known and span.startswith(f"bytes {have}-"):
            mode, total = "ab", int(span.rpartition("/")[2])
        elif have and code in (206, 416):  # not (any more) the file that the part is of
            mark.unlink()
            return "the file has changed"
        else:
            need(code == 429 or code >= 500, f"The server answers {code} {answer.reason} for {url}.")
            return f"the server answers {code} {answer.reason}"
        with open(part, mode) as file, progress(desc=part.stem, total=total, initial=have) as bar:
            mark.write_text(etag, encoding="utf-8")  # after `open` has emptied an older part
            for data in answer.iter_content(1 << 18):
                file.write(data)
                bar.update(len(data))
    return None if size_of(part) == total else "the connection broke"


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
        options |= {"tokenizer": bpe.load(args.tokenizer)} if args.tokenizer else {}
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
