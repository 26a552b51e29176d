"""Text of any size for prepare.py: files -> documents in bounded memory, worker processes, a folder that is
whole or absent, a download that can be resumed. And open_data(), which checks a prepared folder."""

import codecs
import contextlib
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
import zlib
from collections import deque
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

import tokenizer as bpe
from support import need
from support.files import leftovers
from support.hf_tokenizer import tokenizer_from_json

DATA = Path("data")
END = "<|endoftext|>"  # the default delimiter
EXAMPLE = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
byte_bar = partial(tqdm, unit="B", unit_scale=True, disable=None)  # a progress bar, on a terminal only


def check_arguments(args, storybooks):
    """Check the options of prepare.py and fill in what follows from --name.

    `storybooks` holds the names that stand for generated text. ValueError says what does not go together.
    """
    need(args.name is not None or not args.input, "Text of your own needs a --name for its folder.")
    args.name = "tinystories" if args.name is None else args.name
    need(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", args.name) and args.name != "raw",
         f"--name {args.name!r} will not do: use letters, digits, '.', '_', '-' (and 'raw' is taken).")
    need(args.name not in storybooks or not args.input,
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
    if args.name == "storybook_chat" or any(map(is_chat, args.input or [])):
        need(not args.munch, "Conversations need <|user|> and <|assistant|>, which --munch does not have.")
        need(args.delimiter == END, "A --delimiter is for plain text; in .jsonl a line is a conversation.")


def is_chat(path):
    """Whether a file has conversations, by its name."""
    return bool(re.search(r"\.jsonl(\.gz)?$", str(path).lower()))


def check_files(paths):
    """ValueError unless all paths are files, by their names all of plain text or all of conversations.

    Nobody wants a model of braces.
    """
    for path in paths:
        need(os.path.isfile(path), f"{path} does not exist or is not a file.")
        need(not re.search(r"\.(json|ndjson)(\.gz)?$", str(path).lower()),
             f"{path} is JSON; plain text is expected, the documents separated by the --delimiter, or "
             f"conversations in a .jsonl, each a line like {EXAMPLE}.")
        need(is_chat(path) == is_chat(paths[0]),
             f"{path} and {paths[0]} do not go together: conversations (.jsonl) need a --name of their own.")


# ----------------------------------------------------------------------------------------------------------
# From files to documents

BLOCK = 1 << 20  # bytes read at a time
PIECE = 1 << 20  # characters from which on a document is cut into pieces
LIMIT = 16 * PIECE  # characters without a safe place to cut: no text whose memory we could bound
# Where both split patterns (GPT-4's and GPT-2's) begin a new chunk whatever is around, and where the chunk
# before ends the same without a look at what follows: before a space after anything but white space (a chunk
# has such a space only in front); between a letter or digit and a line break or punctuation mark; between a
# letter and a digit. No combining mark follows, so NFC sees no difference either.
SAFE_CUT = re.compile(r"(?<=\S)(?= )|(?<=[^\W_])(?=[\n!-/:-@\[-`{-~，。、])|(?<=[A-Za-z])(?=[0-9])")


def read_text(path, bar):
    """Yield a UTF-8 file's text block by block, without a byte order mark and with LF for every line end.

    A name in .gz stands for a packed text. ValueError if the file cannot be read or unpacked, is not UTF-8 or
    has zero bytes, with the offset of the first bad byte (of the unpacked text).
    """
    start = bar.n
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    offset = 0  # bytes decoded so far
    data = None
    try:
        with open(path, "rb") as raw, unpacked(raw, path) as file:
            while data != b"":
                data = file.read(BLOCK)
                text = decoder.decode(data, final=not data)
                need(b"\0" not in data, f"{path} is no plain text: it has zero bytes, the first at offset "
                                        f"{offset + data.find(0)} (UTF-16, or binary?).")
                yield text
                offset += len(data)
                bar.update(start + raw.tell() - bar.n)
    except UnicodeDecodeError as error:
        offset += len(data) - len(error.object) + error.start  # object's bytes end where data's do
        raise ValueError(f"{path} is not UTF-8 text, but perhaps UTF-16 or Latin-1 (see the byte at "
                         f"offset {offset}); please save it as UTF-8.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None


def unpacked(file, path):
    """Return a binary file, or what gzip has packed in it."""
    return gzip.GzipFile(fileobj=file) if str(path).lower().endswith(".gz") else file


def last_piece(text, begun):
    """Yield what is left of a document: nothing, if all of it is white space and no piece was given out."""
    text = text.rstrip() if begun else text.strip()
    if text or begun:
        yield text, True


def read_pieces(path, delimiter, cut_long, bar, seen):
    """Yield the documents of a file as (text, ends). Count "delimiters" and "empty" documents in `seen`.

    If `cut_long`, those longer than PIECE come in several pieces, of which only the last one ends the
    document (and may be empty). ValueError if more than LIMIT characters have no place to cut them.
    """
    rest = ""  # of the document being read: text not given out yet
    begun = False  # was a piece of it given out?
    for block in read_text(path, bar):
        *complete, rest = (rest + block).split(delimiter)
        seen["delimiters"] += len(complete)
        for text in complete:
            seen["empty"] += not (begun or text.strip())
            yield from last_piece(text, begun)
            begun = False
        while cut_long and (cut := SAFE_CUT.search(rest, PIECE, len(rest) - len(delimiter))):
            piece = rest[:cut.start()]
            rest = rest[cut.start():]
            yield piece if begun else piece.lstrip(), False
            begun = True
        need(len(rest) <= LIMIT, f"{path} has more than {LIMIT:,} characters without a place to cut them; "
                                 "is the --delimiter right?")
    yield from last_piece(rest, begun)


def total_size(paths):
    return sum(map(os.path.getsize, paths))


def read_documents(paths, delimiter, cut_long, label, seen):
    """Yield the pieces of several files, under a progress bar with this label; see read_pieces()."""
    with byte_bar(desc=label, total=total_size(paths)) as bar:
        for path in paths:
            yield from read_pieces(path, delimiter, cut_long, bar, seen)


# ----------------------------------------------------------------------------------------------------------
# Conversations: in a .jsonl each line is one


def read_lines(path, bar):
    """Yield (number, line) for each line of a file that is not blank."""
    rest = ""
    number = 0
    for block in read_text(path, bar):
        *lines, rest = (rest + block).split("\n")
        for line in lines:
            number += 1
            if line.strip():
                yield number, line
        need(len(rest) <= LIMIT, f"{path}, line {number + 1}, has more than {LIMIT:,} characters.")
    if rest.strip():
        yield number + 1, rest


def read_conversations(paths, label):
    """Yield the conversations of several files as (text, True), where chat_turns(text) has the turns.

    Of a line, the text keeps no spaces, no order of keys, and no keys but role and content: lines that differ
    in these alone are equal documents. ValueError with the number of a line that is no conversation.
    """
    with byte_bar(desc=label, total=total_size(paths)) as bar:
        for path in paths:
            lines = 0
            for number, line in read_lines(path, bar):
                messages = check_messages(line, f"{path}, line {number}")
                yield json.dumps({"messages": messages}), True
                lines += 1
            need(lines, f"{path} is empty: there is no conversation in it.")


def check_messages(line, where):
    """A line of a .jsonl -> [{"role": ..., "content": ...}, ...], or ValueError that begins with `where`."""
    try:
        conversation = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where}, is not JSON; expected is a line like {EXAMPLE}.") from None
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    need(messages and isinstance(messages, list) and all(isinstance(message, dict) for message in messages),
         f'{where}, has no list of "messages"; expected is a line like {EXAMPLE}, or text '
         "in a file of another name, the documents separated by the --delimiter.")
    before = None
    for message in messages:
        for key in ("role", "content"):
            need(key in message,
                 f'{where}, has a message without "{key}"; expected is a line like {EXAMPLE}.')
        role = message["role"]
        need(role in ("user", "assistant"),
             f"{where}, has the role {str(role)[:40]!r}; the roles are user and assistant.")
        need(role != before, f"{where}, has two turns of the {role} in a row: join them, or leave one out.")
        need(isinstance(message["content"], str), f"{where}, has a content that is no text.")
        before = role
    need(len(messages) > 1 or before == "assistant",
         f"{where}, has no turn of the assistant, so there is nothing to learn: leave it out.")
    return [{key: message[key] for key in ("role", "content")} for message in messages]


def chat_turns(text):
    """The text of a conversation, as read_conversations gives it -> turns for encode_chat()."""
    return [(message["role"], message["content"]) for message in json.loads(text)["messages"]]


# ----------------------------------------------------------------------------------------------------------
# Workers

BATCH = 1 << 20  # characters that a worker gets at a time


def batches(pieces):
    """Yield lists of pieces, of about BATCH characters each."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0]) + 16  # so that many tiny documents fill a batch as well
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def useful_workers(workers, paths):
    """Return how many workers to use for these files: for a few batches of text, fewer are quicker."""
    return min(workers, 1 + total_size(paths) // BATCH)


def begin_worker():
    """In a new process: leave Ctrl-C to the parent, and end with it even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def start_workers(workers):
    """Return a pool of running workers. They are fresh ("spawned") processes: alike on every system, and none
    inherits our threads or files."""
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), begin_worker)
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is born meanwhile ignores Ctrl-C from birth
    for _ in range(workers):
        pool.submit(int)
    signal.signal(signal.SIGINT, handler)
    return pool


def map_batches(work, pieces, workers):
    """Yield work(batch) for the batches of a stream of pieces, in order, whatever the number of workers.

    At most two batches a worker are under way, so a source quicker than the workers does not fill the memory.
    ValueError if a worker dies; an error in `work` is raised here.
    """
    if workers == 1:
        yield from map(work, batches(pieces))
        return
    pool = start_workers(workers)
    under_way = deque()
    try:
        for batch in batches(pieces):
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
# The folder that is whole or absent


@contextlib.contextmanager
def writing(path):
    """Name `path` in a system's error that names no file: that of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def check_links(path):
    """ValueError if a path or a folder above it is a link to what is not there."""
    for link in (path, *path.parents):
        target = os.path.realpath(link)
        need(link.exists() or not link.is_symlink(),
             f"{link} is a link to {target}, which is not there; bring that back, or remove the link.")


@contextlib.contextmanager
def new_folder(name):
    """Give a folder under a temporary name, which becomes data/NAME if all goes well and vanishes if not."""
    check_links(DATA / name)
    DATA.mkdir(parents=True, exist_ok=True)
    for path, hidden_name in list(leftovers(DATA)):
        if hidden_name == f".{name}":
            shutil.rmtree(path, ignore_errors=True)
    folder = DATA / f".{name}.{os.getpid()}.tmp"
    folder.mkdir(exist_ok=True)
    try:
        with writing(DATA / name):
            yield folder
            for path in folder.iterdir():  # what is renamed must be on the disk
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
        if not os.path.lexists(DATA / name):
            with contextlib.suppress(OSError):  # of two processes that get here at once, one is too late
                os.rename(folder, DATA / name)
        if folder.exists():
            raise FileExistsError(f"{DATA / name} exists already: another process has made it meanwhile.")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------
# Download

TRIES = 5  # attempts in a row that bring nothing new
PAUSE = 2.0  # seconds between them, growing


def file_size(path):
    return path.stat().st_size if path.exists() else 0


def has_size(path, size):
    """Return whether a file is there, and of this size if one is known."""
    return path.exists() and size in (None, file_size(path))


def download(url, path, size=None):
    """Download a URL to a file, called PATH.part until it is whole, unless the file is there, all of it.

    A broken download goes on where it stopped, if the server still has the same file (PATH.part.etag says
    which one the part is of). ValueError if it fails TRIES times in a row or has not `size` bytes at last.
    """
    import requests  # needed here only, and slow to import

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not has_size(path, size):  # put there by hand; it stays until we have a whole one
        print(f"{path} has {file_size(path):,} bytes and not {size:,}: downloading it anew.")
    part = Path(f"{path}.part")
    etag_file = Path(f"{path}.part.etag")
    failures = 0  # attempts in a row that brought nothing new
    answered = False  # has the server ever answered?
    while not has_size(path, size):
        before = file_size(part)
        try:
            problem = receive(url, part, etag_file)
            answered = True
        except requests.RequestException:
            problem = "no connection"
            answered = answered or file_size(part) > before
        if not problem:
            etag_file.unlink()
            need(has_size(part, size), f"{url} has {file_size(part):,} bytes and not {size or 0:,}: it is "
                                       "another file by now; use --name storybook, or --input.")
            os.replace(part, path)
            break
        failures = 0 if file_size(part) > before else failures + 1
        need(answered and failures < TRIES,
             f"{url} could not be downloaded ({problem}): connect to the internet and start again (what came "
             f"is kept), or put the file into {path.parent} by hand, or use --name storybook, or --input.")
        time.sleep(PAUSE * failures)


def receive(url, part, etag_file):
    """Make one request and put what comes into `part` -> None if that is the whole file now, or a problem."""
    import requests

    old_etag = etag_file.read_text("utf-8") if etag_file.exists() else ""
    have = file_size(part) if old_etag else 0
    wanted = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=wanted, stream=True, timeout=(10, 30)) as answer:
        code, headers = answer.status_code, answer.headers
        etag = headers.get("ETag") or headers.get("Last-Modified", "")
        span = headers.get("Content-Range", "")
        if code == 200:  # the file from its beginning
            mode, have, total = "wb", 0, int(headers.get("Content-Length", -1))
        elif code == 206 and etag == old_etag and span.startswith(f"bytes {have}-"):
            mode, total = "ab", int(span.rpartition("/")[2])
        elif have and code in (206, 416):  # not (any more) the file that the part is of
            etag_file.unlink()
            return "the file has changed"
        else:
            need(code == 429 or code >= 500, f"The server answers {code} {answer.reason} for {url}.")
            return f"the server answers {code} {answer.reason}"
        bar = byte_bar(desc=part.stem, total=total, initial=have)
        with writing(part), bar, open(part, mode) as file:
            etag_file.write_text(etag, encoding="utf-8")  # after `open` has emptied an older part
            for data in answer.iter_content(1 << 18):
                file.write(data)
                bar.update(len(data))
    return None if file_size(part) == total else "the connection broke"


# ----------------------------------------------------------------------------------------------------------
# Opening a prepared folder


def open_data(name, model_config):
    """Open data/NAME/ -> ([train ids, val ids], tokenizer, meta), checked against each other and the model.

    The ids are uint16 arrays that stay on disk: a batch reads its windows only. meta is meta.json, with the
    text of tokenizer.json as meta["tokenizer"], and as meta["chat"] whether the ids are conversations: an
    <|assistant|> is among them. ValueError says what is missing, damaged or does not fit.
    """
    folder = DATA / name
    sink = model_config.sink_token
    need(name not in ("storybook", "storybook_chat") or sink in ("", *bpe.SPECIALS),
         f"data={name} has no {sink}: take data=storybook_munch.")
    meta, tokens = read_meta(folder, model_config)
    tokenizer = tokenizer_from_json(meta["tokenizer"])
    need(sink in ("", *tokenizer.specials), f"{folder}/tokenizer.json has no token sink_token={sink!r}.")
    need(tokenizer.vocab_size <= model_config.vocab_size,
         f"{folder}/tokenizer.json has {tokenizer.vocab_size} tokens, more than the model's "
         f"vocab_size={model_config.vocab_size}.")
    for split, least in (("train", model_config.context + 1), ("val", 1)):
        size = file_size(folder / f"{split}.bin")
        need(size == 2 * tokens[split],
             f"{folder}/{split}.bin has {size} bytes; meta.json says 2 x {tokens[split]}.")
        need(tokens[split] >= least, f"{folder}/{split}.bin has {tokens[split]} tokens, but at least {least} "
                                     f"are needed with context={model_config.context}.")
    splits = [np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r") for split in tokens]
    need(max(ids.max() for ids in splits) < tokenizer.vocab_size,
         f"the data in {folder} has ids that its tokenizer does not know.")
    assistant = tokenizer.specials.get("<|assistant|>")
    starts = range(0, len(splits[0]), BLOCK)  # in a chat, the first block tells
    meta["chat"] = any((splits[0][start : start + BLOCK] == assistant).any() for start in starts)
    return splits, tokenizer, meta


def read_meta(folder, model_config):
    """Read meta.json and tokenizer.json -> (meta, {split: number of tokens}), or ValueError."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        meta["tokenizer"] = (folder / "tokenizer.json").read_bytes().decode("utf-8")
        digest = hashlib.sha256(meta["tokenizer"].encode("utf-8")).hexdigest()
        same_tokenizer = digest == meta["tokenizer_sha256"]
        tokens = {split: int(meta[split]["tokens"]) for split in ("train", "val")}
        for split in tokens:
            (folder / f"{split}.bin").stat()  # FileNotFoundError if it is missing
        readable = meta["format"] == 1
    except (FileNotFoundError, NotADirectoryError) as error:
        check_links(Path(error.filename))
        command = f"python prepare.py --name {folder.name} --vocab_size {model_config.vocab_size}"
        command += " --munch" if model_config.sink_token else ""
        raise ValueError(f"there is no data in {folder}: {command} makes it of TinyStories, or of your own "
                         "text with --input.") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        readable = False
    need(readable, f"{folder} is damaged, or of another version: remove it and make it anew.")
    need(same_tokenizer, f"{folder}/tokenizer.json is not the one that the data was made with.")
    return meta, tokens
