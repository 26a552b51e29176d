"""Files -> documents in bounded memory, workers, the folder that is whole or absent, download."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter, deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import requests
from tqdm import tqdm

import tokenizer as bpe
from support import need
from support.hf_tokenizer import tokenizer_from_json

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


parse = lru_cache(maxsize=1)(tokenizer_from_json)  # each process parses the tokenizer once, though each batch brings it


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


TRIES, PAUSE = 5, 2.0  # attempts in a row that bring nothing new; seconds between them, growing


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


def open_data(name, model_config):
    """data/<name>/ -> ([train ids, val ids], tokenizer, meta), all checked against each other.

    The ids are uint16 arrays that stay on disk: a batch reads its windows only. meta is meta.json, with the
    text of tokenizer.json as meta["tokenizer"].
    """
    folder = Path("data") / name
    if name == "storybook" and model_config.sink_token not in ("", *bpe.SPECIALS):
        raise ValueError(f"data=storybook has no {model_config.sink_token}: take data=storybook_munch.")
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        meta["tokenizer"] = (folder / "tokenizer.json").read_bytes().decode("utf-8")
        same = hashlib.sha256(meta["tokenizer"].encode("utf-8")).hexdigest() == meta["tokenizer_sha256"]
        sizes = {split: int(meta[split]["tokens"]) for split in ("train", "val")}
        found = {split: (folder / f"{split}.bin").stat().st_size for split in sizes}
        readable = meta["format"] == 1
    except (FileNotFoundError, NotADirectoryError):
        command = f"python prepare.py --name {name} --vocab_size {model_config.vocab_size}"
        command += " --munch" if model_config.sink_token else ""
        raise ValueError(f"there is no data in {folder}: {command} makes it of TinyStories, or of your own "
                         "text with --input.") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        readable = False
    if not readable:
        raise ValueError(f"{folder} is damaged, or of another version: remove it and make it anew.")
    if not same:
        raise ValueError(f"{folder}/tokenizer.json is not the one that the data was made with.")
    tokenizer = tokenizer_from_json(meta["tokenizer"])
    if model_config.sink_token not in ("", *tokenizer.specials):
        raise ValueError(f"{folder}/tokenizer.json has no token sink_token={model_config.sink_token!r}.")
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(f"{folder}/tokenizer.json has {tokenizer.vocab_size} tokens, more than the model's "
                         f"vocab_size={model_config.vocab_size}.")
    for split, needed in (("train", model_config.context + 1), ("val", 1)):
        tokens = sizes[split]
        if found[split] != 2 * tokens:
            raise ValueError(f"{folder}/{split}.bin has {found[split]} bytes; meta.json says 2 x {tokens}.")
        if tokens < needed:
            raise ValueError(f"{folder}/{split}.bin has {tokens} tokens, but at least {needed} are "
                             f"needed with context={model_config.context}.")
    splits = [np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r") for split in sizes]
    if max(ids.max() for ids in splits) >= tokenizer.vocab_size:
        raise ValueError(f"the data in {folder} has ids that its tokenizer does not know.")
    return splits, tokenizer, meta
