"""Text -> data/NAME/, a folder that train.py can read.

    python prepare.py                                    TinyStoriesV2 (downloaded), 32,000 tokens
    python prepare.py --name laptop --vocab_size 4096    the same stories, another tokenizer
    python prepare.py --name storybook                   stories made on the spot (storybook.py)
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
import codecs
import contextlib
import hashlib
import itertools
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
from array import array
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

import numpy as np
import requests
from tqdm import tqdm

import storybook as book
import tokenizer as bpe

DATA = Path("data")
END = "<|endoftext|>"          # the default delimiter
BLOCK = 1 << 20                # bytes read at a time
BATCH = 1 << 20                # characters that a worker gets at a time
PIECE = 1 << 20                # characters from which on a document is cut into pieces
LIMIT = 16 * PIECE             # characters without a safe place to cut: no text whose memory we could bound
VAL_SHARE = 0.01

# Where both split patterns (GPT-4's and GPT-2's) begin a new chunk whatever is around, and where the chunk
# before ends the same without a look at what follows: before a space after anything but white space (a chunk
# has such a space only in front); between a letter or digit and a line break or punctuation mark; between a
# letter and a digit. No combining mark follows, so NFC sees no difference either.
SAFE_CUT = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=[\n!-/:-@\[-`{-~，。、])|(?<=[A-Za-z])(?=[0-9])")


# ------------------------------------------------------------------------------------- files to documents

def read_text(path, bar):
    """A UTF-8 file -> str after str, with LF for every line end, even if a block ends within a character."""
    decoder, offset, held, fresh = codecs.getincrementaldecoder("utf-8")(), 0, "", True
    with open(path, "rb") as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise ValueError(f"{path} is UTF-16 text; please save it as UTF-8.")
        file.seek(0)
        while True:
            block = file.read(BLOCK)
            begun = len(decoder.getstate()[0])             # bytes of a character that the last block began
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text (see the byte at offset "
                                 f"{offset - begun + error.start}); please save it as UTF-8.") from None
            if "\0" in text:
                raise ValueError(f"{path} is not plain text: it has zero bytes (UTF-16, or a binary file?).")
            if fresh and text:
                text, fresh = text.removeprefix("\ufeff"), False
            text, held = held + text, ""
            if block and text.endswith("\r"):
                text, held = text[:-1], "\r"
            yield text.replace("\r\n", "\n").replace("\r", "\n")
            if not block:
                return
            offset += len(block)
            bar.update(len(block))


def last_cut(text, end):
    """The last safe place to cut in text[:end]; 0 if there is none."""
    for start in (max(0, end - 4096), 0):
        cut = 0
        for match in SAFE_CUT.finditer(text, start, end):
            cut = match.start()
        if cut:
            return cut
    return 0


def pieces(path, delimiter, cut, bar):
    """A file -> its documents as (text, ends). If `cut`, those longer than PIECE come in several pieces, of
    which only the last one ends the document (and may be empty)."""
    rest, begun = "", False               # of the document at hand: text not given out; was any given out?
    for text in itertools.chain(read_text(path, bar), [None]):                   # None: the end of the file
        *whole, rest = (rest + text).split(delimiter) if text is not None else (rest, "")
        for document in whole:
            document = document.rstrip() if begun else document.strip()
            if document or begun:
                yield document, True
            begun = False
        if len(rest) > PIECE:
            place = last_cut(rest, len(rest) - len(delimiter)) if cut else 0     # not within a delimiter
            if place:
                yield rest[:place] if begun else rest[:place].lstrip(), False
                rest, begun = rest[place:], True
            elif len(rest) > LIMIT:
                raise ValueError(f"{path} has more than {LIMIT:,} characters without a place to cut them; "
                                 "is the --delimiter right?")


def documents(paths, delimiter, cut, label):
    """The pieces of several files, under a progress bar."""
    size = sum(map(os.path.getsize, paths))
    with tqdm(total=size, desc=label, unit="B", unit_scale=True, disable=None) as bar:
        for path in paths:
            yield from pieces(path, delimiter, cut, bar)


def split_by_hash(stream):
    """Documents -> bytearray, 1 for those of the validation split: about 1%, by the hash of the text alone.
    So a document stays on its side whatever the corpus gains or loses, and equal ones stay together.

    One byte a document and not a Python object: TinyStories has 2.7 million. If chance put all on one side
    (there are few), the document with the smallest hash, and its copies, are the validation split."""
    sides, smallest, where = bytearray(), 1 << 64, []
    digest = hashlib.blake2b(digest_size=8)
    for text, ends in stream:
        digest.update(text.encode())
        if ends:
            key = int.from_bytes(digest.digest(), "big")
            if key <= smallest:
                where = where if key == smallest else []
                where.append(len(sides))
                smallest = key
            sides.append(key < VAL_SHARE * 2**64)
            digest = hashlib.blake2b(digest_size=8)
    if not sides:
        raise ValueError("There is no text in the input.")
    if len(set(sides)) == 1:
        sides = bytearray(len(sides))
        for index in where:
            sides[index] = 1
    if 0 not in sides:
        raise ValueError("The input is one document only (or copies of one), so none is left for validation; "
                         "give the --delimiter that separates documents, or a --val_input.")
    return sides


def one_side(stream, sides, side):
    """Of a stream, the documents on one side of the split."""
    index = 0
    for text, ends in stream:
        if sides[index:index + 1] == bytes([side]):
            yield text, ends
        index += ends


# --------------------------------------------------------------------------------------- work and workers

def batches(stream):
    batch, size = [], 0
    for piece in stream:
        batch.append(piece)
        size += len(piece[0]) + 16                         # so that many tiny documents fill a batch as well
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def count_batch(batch, nfc):
    return bpe.count_chunks((text for text, _ in batch), nfc=nfc)


def use_tokenizer(json_text):
    global _tokenizer                                      # one for each process, for encode_batch
    _tokenizer = bpe.parse(json_text) if json_text else None


def encode_batch(batch):
    """Pieces -> (ids as the bytes of a .bin file, documents, bytes of text)."""
    ids, end_of_text = array("I"), _tokenizer.end_of_text
    for text, ends in batch:
        ids.extend(_tokenizer.encode(text))
        if ends:
            ids.append(end_of_text)
    ids = np.asarray(ids)
    if ids.max(initial=0) > 0xFFFF:                        # astype would wrap it without a word
        raise ValueError(f"The token id {ids.max()} does not fit into 16 bits.")
    size = sum(len(text.encode()) for text, _ in batch)
    return ids.astype("<u2").tobytes(), sum(ends for _, ends in batch), size


def begin_worker(json_text):
    """In a new process: leave Ctrl-C to the parent, and end with it even if it was killed."""
    def follow_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=follow_parent, daemon=True).start()
    use_tokenizer(json_text)


def start_pool(workers, json_text):
    """A pool of fresh ("spawned") processes: alike on every system, none inherits our threads or files."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, begin_worker, (json_text,))
    in_main = threading.current_thread() is threading.main_thread()
    if in_main:                                # processes born while we ignore Ctrl-C ignore it from birth
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(workers):
            pool.submit(int)
    finally:
        if in_main:
            signal.signal(signal.SIGINT, handler)
    return pool


def spread(work, stream, workers, json_text=None):
    """work(batch) for the batches of a stream, in order; at most two batches a worker are under way."""
    if workers == 1:
        use_tokenizer(json_text)
        yield from map(work, batches(stream))
        return
    pool, under_way = start_pool(workers, json_text), deque()
    try:
        for batch in batches(stream):
            under_way.append(pool.submit(work, batch))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise ValueError("A worker process died, perhaps for lack of memory; try fewer --workers.") from None
    finally:
        pool.shutdown(cancel_futures=True)


# -------------------------------------------------------------------------------------------- the folder

def alive(process):
    if os.name == "nt":                                    # there, os.kill(id, 0) is no question but a kill
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def refuse_existing(name):
    if os.path.lexists(DATA / name):
        raise ValueError(f"{DATA / name} exists already; remove it, or choose another --name.")


@contextlib.contextmanager
def new_folder(name):
    """A folder under a temporary name, which becomes data/NAME if all goes well and vanishes if not. What a
    killed run left behind (its name holds the number of a process that is no more) is cleared away."""
    refuse_existing(name)
    DATA.mkdir(parents=True, exist_ok=True)
    for old in DATA.iterdir():
        match = re.fullmatch(rf"\.{re.escape(name)}\.(\d+)\.tmp", old.name)
        if match and (int(match[1]) == os.getpid() or not alive(int(match[1]))):
            shutil.rmtree(old, ignore_errors=True)
    folder = DATA / f".{name}.{os.getpid()}.tmp"
    folder.mkdir()
    try:
        yield folder
        os.rename(folder, DATA / name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write(path, chunks):
    """Writes bytes for good: what is renamed later must be on the disk by then."""
    with open(path, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def write_split(path, stream, json_text, workers):
    """Encodes a stream into a .bin file -> {"documents", "tokens", "bytes"}."""
    total = Counter(documents=0, tokens=0, bytes=0)

    def chunks(results):
        for ids, documents, size in results:
            total.update(documents=documents, tokens=len(ids) // 2, bytes=size)
            yield ids

    with contextlib.closing(spread(encode_batch, stream, workers, json_text)) as results:
        write(path, chunks(results))
    if not total["documents"]:
        raise ValueError(f"There is no text for {path.name}: the input is empty.")
    return dict(total)


def train_tokenizer(stream, vocab_size, nfc, workers):
    counts = Counter()
    with contextlib.closing(spread(partial(count_batch, nfc=nfc), stream, workers)) as results:
        for result in results:
            counts.update(result)
    if not counts:
        raise ValueError("There is no text for train.bin: the input is empty.")
    return bpe.train_bpe(counts, vocab_size, nfc=nfc, progress=sys.stderr.isatty())


def build(name, source, train, val, tokenizer=None, vocab_size=32000, nfc=False, workers=1, seed=None,
          nats=None):
    """Writes data/NAME. `train` and `val` take a label for the progress bar and return a fresh stream. Where
    -log p of the whole validation split is known (`nats`), it gives the floor that no model gets below."""
    with new_folder(name) as folder:
        tokenizer = tokenizer or train_tokenizer(train("count"), vocab_size, nfc, workers)
        if tokenizer.vocab_size > 1 << 16:
            raise ValueError(f"The tokenizer has {tokenizer.vocab_size:,} tokens; 16-bit ids allow 65,536.")
        json_text = tokenizer.to_json()
        write(folder / "tokenizer.json", [json_text.encode()])
        meta = {"format": 1, "name": name, "source": source, "vocab_size": tokenizer.vocab_size,
                "end_of_text": tokenizer.end_of_text,
                "tokenizer_sha256": hashlib.sha256(json_text.encode()).hexdigest()}
        for split, stream in (("train", train), ("val", val)):
            meta[split] = write_split(folder / f"{split}.bin", stream(split), json_text, workers)
        if nats is not None:
            meta["seed"] = seed
            meta["val"] |= {"floor_nats_per_token": nats / meta["val"]["tokens"],
                            "floor_bits_per_byte": nats / (meta["val"]["bytes"] * math.log(2))}
        write(folder / "meta.json", [json.dumps(meta, indent=2, ensure_ascii=False).encode(), b"\n"])
    print(f"{DATA / name}: a vocabulary of {meta['vocab_size']:,}; " + "; ".join(
        f"{split} has {meta[split]['documents']:,} documents, {meta[split]['tokens']:,} tokens"
        for split in ("train", "val")))
    return DATA / name


# -------------------------------------------------------------------------------------- the three sources

def from_files(name, inputs, val_inputs=(), delimiter=END, tokenizer=None, workers=1, **options):
    """data/NAME from text files; without validation files, the split is by hash."""
    delimiter = delimiter.replace("\r\n", "\n").replace("\r", "\n")              # as in the text
    paths = [*inputs, *val_inputs]
    for path in paths:
        if not os.path.isfile(path):
            problem = "is not a file" if os.path.exists(path) else "does not exist"
            raise ValueError(f"{path} {problem}.")
    stamps = lambda: [(os.path.getsize(path), os.stat(path).st_mtime_ns) for path in paths]
    before = stamps()
    workers = min(workers, 1 + sum(size for size, _ in before) // BATCH)         # one is quicker for a little
    cut = tokenizer is None or tokenizer.pattern in (bpe.GPT4_PATTERN, bpe.GPT2_PATTERN)
    train, val = partial(documents, inputs, delimiter, cut), partial(documents, val_inputs, delimiter, cut)
    if not val_inputs:
        sides = split_by_hash(train("split"))
        everything = train
        train, val = (lambda label, side=side: one_side(everything(label), sides, side) for side in (0, 1))

    def last_stream(label):
        yield from val(label)
        if stamps() != before:
            raise ValueError("The input changed while it was being read; please start again.")

    source = ", ".join(os.path.basename(path) for path in paths)
    return build(name, source, train, last_stream, tokenizer, workers=workers, **options)


def storybook(name="storybook", vocab_size=1024, seed=1, train=25_000, val=300, **options):
    """data/NAME from the generator in storybook.py; returns at once if it is there already. The two splits
    come from independent random streams (2 seed, 2 seed + 1), so they need no split by hash."""
    if (DATA / name / "meta.json").exists():
        return DATA / name
    print(f"Making {train + val:,} little stories for {DATA / name}.")
    told = [list(tqdm(book.stories(n, 2 * seed + side), "stories", n, disable=None, leave=False))
            for side, n in enumerate((train, val))]
    train, val = (lambda label, side=side: ((text, True) for text, _ in told[side]) for side in (0, 1))
    nats = -math.fsum(log_prob for _, log_prob in told[1])
    try:
        return build(name, "storybook.py", train, val, vocab_size=vocab_size, seed=seed, nats=nats, **options)
    except (OSError, ValueError):
        if (DATA / name / "meta.json").exists():           # another run made it at the same time
            return DATA / name
        raise


HUB = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
TINYSTORIES = {"TinyStoriesV2-GPT4-train.txt": 2_227_753_162, "TinyStoriesV2-GPT4-valid.txt": 22_502_601}
TRIES, PAUSE = 5, 2.0          # attempts in a row that bring nothing new; seconds between them, growing


def tinystories(name, **options):
    """data/NAME from TinyStoriesV2, downloaded to data/raw/ unless it is there (sizes above in bytes)."""
    paths = [DATA / "raw" / file for file in TINYSTORIES]
    for path, size in zip(paths, TINYSTORIES.values()):
        download(f"{HUB}/{path.name}", path)
        if path.stat().st_size != size:
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes and not {size:,}; "
                             "remove it and start again to download it anew.")
    return from_files(name, paths[:1], paths[1:], **options)


def download(url, path):
    """A URL -> a file, under the name PATH.part until it is whole. A broken download goes on where it
    stopped, if the server still has the same file (PATH.part.etag says which one the part is of)."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part, failures, reached = Path(f"{path}.part"), 0, False
    size = lambda: part.stat().st_size if part.exists() else 0
    while True:
        before = size()
        try:
            problem, reached = receive(url, part), True
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
            problem, reached = "no connection", reached or size() > before
        if problem is None:
            break
        failures = 0 if size() > before else failures + 1
        if failures == TRIES or not reached:
            raise ValueError(f"{url} could not be downloaded ({problem}): connect to the internet and start "
                             f"again (what has come is kept), or put the file into {path.parent} by hand, or "
                             "use --name storybook, or text of your own with --name and --input.")
        time.sleep(PAUSE * failures)
    os.replace(part, path)
    Path(f"{part}.etag").unlink(missing_ok=True)


def receive(url, part):
    """One request; what comes goes into `part`. Returns None if that is the whole file now, or a problem."""
    mark = Path(f"{part}.etag")
    have = part.stat().st_size if part.exists() and mark.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=(10, 30)) as answer:
        code, length = answer.status_code, answer.headers.get("Content-Length")
        etag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        span = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
        if code == 206 and span and int(span[1]) == have and etag == mark.read_text("utf-8"):
            mode, total = "ab", int(span[2])
        elif have and code in (206, 416):                  # not (any more) the file that the part is of
            mark.unlink()
            return "the file has changed"
        elif code == 200 and length:                       # the file from its beginning
            mode, total, have = "wb", int(length), 0
        elif code == 429 or code >= 500:
            return f"the server answers {code} {answer.reason}"
        else:
            problem = "with no length" if code == 200 else f"with {code} {answer.reason}"
            raise ValueError(f"The server answers {problem} for {url}.")
        with (open(part, mode) as file, tqdm(total=total, initial=have, desc=part.stem, unit="B",
                                             unit_scale=True, disable=None) as bar):
            if mode == "wb":
                mark.unlink(missing_ok=True)
                if etag:
                    mark.write_text(etag, encoding="utf-8")
            for data in answer.iter_content(1 << 18):
                file.write(data)
                bar.update(len(data))
    return None if part.stat().st_size == total else "the connection broke"


# ------------------------------------------------------------------------------------------ command line

def arguments(argv):
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Makes data/NAME/ of TinyStories, "
                                     "of the storybook, or of text of your own.")
    parser.add_argument("--name", help="the folder in data/ (default: tinystories; or: storybook)")
    parser.add_argument("--input", nargs="+", metavar="FILE", help="text of your own, in UTF-8")
    parser.add_argument("--val_input", nargs="+", metavar="FILE",
                        help="to validate on (else 1%% of the input)")
    parser.add_argument("--delimiter", metavar="S",
                        help=rf"between documents (default: {END}); \n is a new line")
    parser.add_argument("--vocab_size", type=int, metavar="N", help="default: 32000; storybook: 1024")
    parser.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of a new one")
    parser.add_argument("--nfc", action="store_true", help="normalise text to Unicode NFC first")
    parser.add_argument("--workers", type=int, metavar="N", default=min(os.cpu_count() or 1, 32),
                        help="processes (default: one for each core, at most 32)")
    args = parser.parse_args(argv)

    def check(fine, sentence):
        if not fine:
            raise ValueError(sentence)

    check(args.name is not None or not args.input, "Text of your own needs a --name for its folder.")
    args.name = "tinystories" if args.name is None else args.name
    check(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", args.name) and args.name != "raw",
          f"--name {args.name!r} will not do: use letters, digits, '.', '_', '-' (and 'raw' is taken).")
    check(args.input or not args.val_input, "--val_input goes with --input.")
    check(args.input or args.delimiter is None, "--delimiter goes with --input.")
    check(not (args.name == "storybook" and args.input),
          "The storybook is made, not read: with --input, choose another --name.")
    check(args.delimiter != "", "The --delimiter must not be empty.")
    check(not (args.tokenizer and args.vocab_size), "A --tokenizer has its size: leave out --vocab_size.")
    check(not (args.tokenizer and args.nfc), "A --tokenizer knows whether it wants NFC: leave out --nfc.")
    least = 256 + len(bpe.SPECIALS)
    check(args.vocab_size is None or least <= args.vocab_size <= 1 << 16,
          f"--vocab_size goes from {least} (the bytes and the special tokens) to 65536 (16-bit ids).")
    check(args.workers >= 1, "--workers must be at least 1.")
    return args


def run(argv):
    args = arguments(argv)
    refuse_existing(args.name)
    options = {"workers": args.workers, "nfc": args.nfc}
    options |= {"vocab_size": args.vocab_size} if args.vocab_size else {}
    options |= {"tokenizer": bpe.load(args.tokenizer)} if args.tokenizer else {}
    if args.name == "storybook":
        storybook(args.name, **options)
    elif args.input:
        delimiter = (args.delimiter or END).replace("\\n", "\n").replace("\\t", "\t")
        from_files(args.name, args.input, args.val_input or [], delimiter, **options)
    else:
        tinystories(args.name, **options)


def main(argv=None):
    signal.signal(signal.SIGTERM, signal.default_int_handler)                    # a polite kill cleans up too
    try:
        run(argv)
    except KeyboardInterrupt:
        sys.exit("error: interrupted, so there is no new folder (a download goes on where it stopped).")
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            error = f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
