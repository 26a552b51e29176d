"""Text -> data/NAME/, a folder that train.py can read.

    python prepare.py                                    TinyStoriesV2 (downloaded), 32,000 tokens
    python prepare.py --name laptop --vocab_size 4096    the same stories, another tokenizer
    python prepare.py --name storybook                   stories made on the spot (storybook.py)
    python prepare.py --name munched --munch             encoded by longest match, as Silia does
    python prepare.py --name mine --input a.txt b.txt    text of your own
    python prepare.py --name talk --input talk.jsonl     conversations, one on each line

    train.bin, val.bin   token ids, little-endian uint16, each document followed by the end-of-text id
    tokenizer.json       trained on the training documents alone, or a copy of --tokenizer
    meta.json            documents, tokens, bytes of each split, the rule; the tokenizer's sha256; the source

For a text that fits into memory, this is the whole program:

    whole = [(document, True) for document in documents(text)]
    rule = choose_rule(numbered(whole))
    train, val = ([document for document, _ in only(split, whole, rule)] for split in ("train", "val"))
    tokenizer = train_bpe(count_chunks(train), vocab_size)
    for name, split in ("train.bin", train), ("val.bin", val):
        ids = [id for document in split for id in [*tokenizer.encode(document), tokenizer.end_of_text]]
        np.array(ids, dtype="<u2").tofile(name)

The code below does the same for text of any size and on many cores: documents come as a stream, read anew for
each of these steps, and support/corpus.py hands batches of it to worker processes.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import signal
import sys
from collections import Counter
from functools import lru_cache, partial

import numpy as np
from tqdm import tqdm

import storybook as book
import tokenizer as bpe
from support import need
from support.corpus import (DATA, END, chat_turns, check_arguments, check_files, check_links, download,
                            is_chat, map_batches, new_folder, read_conversations, read_documents,
                            useful_workers)
from support.hf_tokenizer import load_tokenizer, tokenizer_from_json, tokenizer_to_json
from support.runtime import run_main
from support.settings import CommandLine
from support.split import choose_rule, cut_document, report

# ----------------------------------------------------------------------------------------------------------
# What a document is


def documents(text, delimiter=END):
    """Return the documents of a file's text: the definition. read_documents() gives the same, at any size.

    No document spans two files. White space inside a document stays, and the name of a special token in it is
    ordinary text.
    """
    text = text.removeprefix("\ufeff")  # a byte order mark
    parts = [part.strip() for part in with_lf(text).split(with_lf(delimiter))]
    return [part for part in parts if part]


def with_lf(text):
    return text.replace("\r\n", "\n").replace("\r", "\n")


# From here on, documents are a stream of pieces (text, ends). Nearly always a piece is a document and `ends`
# is True. A document of millions of characters comes in several pieces, of which only the last one `ends` it;
# they are cut where the tokenizer would cut anyway, so together they get the token ids of the whole. A
# conversation is one piece, whose text is JSON; what is trained on are its turns.


# ----------------------------------------------------------------------------------------------------------
# The split: what is for validation?
#
# Of many documents, about 1% of the text (more if that would be little), in whole documents: not every
# hundredth, nor by random numbers, but by a hash of the text itself. So a document stays on its side whatever
# the corpus gains or loses, and its copies go with it: none is trained on and validated on. A few documents,
# or some that hold more than all others together, cannot be shared out like that: of those, the last tenth.
# support/split.py measures the corpus and decides: see its Rule.

HEAD = 1 << 16  # characters of a document that are hashed, from its beginning


def hundredth_of(text):
    """Return the hundredth, 0 to 99, of a document's hash: as good as random, the same on every machine."""
    digest = hashlib.blake2b(text[:HEAD].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") * 100 >> 64


def numbered(pieces):
    """Yield (index of the document, hundredth of the document, piece) for each piece."""
    index = 0
    begins = True
    for text, ends in pieces:
        if begins:
            hundredth = hundredth_of(text)
        yield index, hundredth, (text, ends)
        index += ends
        begins = ends


def only(split, pieces, rule):
    """Yield the pieces that a rule gives to a split, "train" or "val"."""
    for (index, hundredth), group in itertools.groupby(numbered(pieces), lambda item: item[:2]):
        document = (piece for _, _, piece in group)
        if index in rule.long:
            parts = cut_document(document, rule.long[index])
            yield from (piece for side, piece in parts if side == split)
        elif split == ("val" if hundredth in rule.hundredths else "train"):
            yield from document


# ----------------------------------------------------------------------------------------------------------
# The tokenizer: count the chunks (words, roughly) of the training documents, then learn from the counts


def count_batch(batch, nfc, chat=False):
    texts = (text for text, _ in batch)
    if chat:
        texts = (content for text in texts for _, content in chat_turns(text))
    return bpe.count_chunks(texts, nfc=nfc)


def train_tokenizer(corpus, workers, vocab_size=32000, nfc=False, longest_match=False):
    """Train a tokenizer of `vocab_size` tokens on the training documents of a corpus (see "The sources")."""
    counts = Counter()
    pieces = corpus.pieces("train", label="count")
    for batch_counts in map_batches(partial(count_batch, nfc=nfc, chat=corpus.chat), pieces, workers):
        counts.update(batch_counts)
    need(counts, "There is no text for train.bin: the input is empty or too short.")
    specials = bpe.SILIA_SPECIALS if longest_match else bpe.SPECIALS
    return bpe.train_bpe(counts, vocab_size, specials, nfc, progress=sys.stderr.isatty(),
                         longest_match=longest_match)


# ----------------------------------------------------------------------------------------------------------
# The ids, 16 bits each, and the folder

# Workers get the tokenizer as text, with every batch; each of them parses it once.
parsed_tokenizer = lru_cache(maxsize=1)(tokenizer_from_json)


def encode_batch(batch, json_text, chat=False):
    """Encode pieces -> (ids as the bytes of a .bin file, Counter of documents, tokens and bytes of text).

    In a chat it counts "assistant_tokens", too: the assistant's, with the <|end|> of each turn.
    """
    tokenizer = parsed_tokenizer(json_text)
    ids = []
    counts = Counter(documents=sum(ends for _, ends in batch), tokens=0, bytes=0)
    for text, ends in batch:
        if chat:
            turns = chat_turns(text)
            ids += bpe.encode_chat(tokenizer, turns)
            texts = " ".join(content for _, content in turns)
            counts["bytes"] += len(texts.encode("utf-8", "surrogatepass"))
            counts["assistant_tokens"] += sum(len(tokenizer.encode(content)) + 1 for role, content in turns
                                              if role == "assistant")
        else:
            ids += tokenizer.encode(text)
            counts["bytes"] += len(text.encode())
        if ends:
            ids.append(tokenizer.end_of_text)
    ids = np.array(ids, dtype=np.int64)
    largest = ids.max(initial=0)
    need(largest <= 0xFFFF, f"The token id {largest} does not fit into 16 bits.")
    counts["tokens"] = len(ids)
    return ids.astype("<u2").tobytes(), counts


def write_split(path, pieces, json_text, workers, chat):
    """Write the .bin file of a split -> its numbers of documents, tokens and bytes, for meta.json."""
    total = Counter(documents=0, tokens=0, bytes=0)
    encode = partial(encode_batch, json_text=json_text, chat=chat)
    with open(path, "wb") as file:
        for ids, counts in map_batches(encode, pieces, workers):
            file.write(ids)
            total.update(counts)
    need(total["documents"], f"There is no text for {path.name}: the input is empty or too short.")
    return dict(total)


def write_folder(name, corpus, tokenizer=None, workers=1, **options):
    """Write data/NAME -> its path. Without a tokenizer one is trained; the options are train_tokenizer's.

    The folder has a temporary name until all of it is written: data/NAME is whole or absent.
    """
    with new_folder(name) as folder:
        if tokenizer is None:
            tokenizer = train_tokenizer(corpus, workers, **options)
        need(tokenizer.vocab_size <= 1 << 16,
             f"The tokenizer has {tokenizer.vocab_size:,} tokens; 16-bit ids allow 65,536.")
        json_text = tokenizer_to_json(tokenizer)
        (folder / "tokenizer.json").write_bytes(json_text.encode())
        meta = {"format": 1, "name": name, "source": corpus.source, "vocab_size": tokenizer.vocab_size,
                "end_of_text": tokenizer.end_of_text,
                "tokenizer_sha256": hashlib.sha256(json_text.encode()).hexdigest()}
        for split in ("train", "val"):
            pieces = corpus.pieces(split, label=split)
            meta[split] = write_split(folder / f"{split}.bin", pieces, json_text, workers, corpus.chat)
        meta["split"] = corpus.split()
        if isinstance(corpus, Stories):
            corpus.add_floor(meta)
        (folder / "meta.json").write_bytes(json.dumps(meta, indent=2, ensure_ascii=False).encode() + b"\n")
    report(meta, DATA / name)
    return DATA / name


# ----------------------------------------------------------------------------------------------------------
# The sources. A corpus is a class with four members: `source` says in meta.json where the text is from,
# `chat` tells conversations from plain text, pieces(split, label) gives a fresh stream of a split's pieces
# (the label is for the progress bar), and split(), once these are read, says for meta.json how
# they were told apart.


class TextFiles:
    """Documents from text files, or conversations; without files to validate on, a rule splits them."""

    def __init__(self, inputs, val_inputs, delimiter, cut_long):
        self.chat = is_chat(inputs[0])
        self.files = {"train": inputs, "val": val_inputs or inputs}
        names = ", ".join(map(os.path.basename, [*inputs, *val_inputs]))
        self.source = names.encode("utf-8", "backslashreplace").decode("utf-8")  # file names may be any bytes
        self.delimiter = with_lf(delimiter)
        self.cut_long = cut_long
        self.seen = {}  # {split: delimiters and empty documents in its files}
        self.rule = None
        if not val_inputs:
            self.rule = choose_rule(numbered(self.read("train", label="split")), cut=not self.chat)

    def read(self, split, label):
        self.seen[split] = Counter()
        if self.chat:
            return read_conversations(self.files[split], label)
        return read_documents(self.files[split], self.delimiter, self.cut_long, label, self.seen[split])

    def pieces(self, split, label):
        pieces = self.read(split, label)
        return only(split, pieces, self.rule) if self.rule else pieces

    def split(self):
        if self.chat:
            return {"rule": str(self.rule or "by file (as given)"), "empty_documents": 0}
        seen = self.seen["train"] if self.rule else self.seen["train"] + self.seen["val"]
        return {"rule": str(self.rule or "by file (as given)"), "empty_documents": seen["empty"],
                "delimiter": self.delimiter, "delimiters": seen["delimiters"]}


class Stories:
    """Stories of storybook.py. Each split has a random stream of its own, so no hash is needed."""

    source = "storybook.py"
    chat = False

    def __init__(self, seed, train, val):
        self.seed = seed
        self.stories = {}  # (text, natural logarithm of its probability) of each story
        for split, n, stream in ("train", train, 2 * seed), ("val", val, 2 * seed + 1):
            drawn = tqdm(self.draw(n, stream), "stories", n, disable=None, leave=False)
            self.stories[split] = list(drawn)

    def draw(self, n, stream):
        return book.stories(n, stream)

    def pieces(self, split, label):
        return ((text, True) for text, _ in self.stories[split])

    def split(self):
        return {"rule": "by random numbers (each side has its own)", "empty_documents": 0}

    def add_floor(self, meta):
        """Add to meta.json the loss of a model that knows the true probabilities: none gets below it."""
        nats = -math.fsum(log_prob for _, log_prob in self.stories["val"])
        meta["seed"] = self.seed
        meta["val"]["floor_nats_per_token"] = nats / meta["val"]["tokens"]
        meta["val"]["floor_bits_per_byte"] = nats / (meta["val"]["bytes"] * math.log(2))


class Conversations(Stories):
    """Conversations of storybook.py."""

    chat = True

    def draw(self, n, stream):
        self.answers_nats = 0.0  # of the split that is drawn last, for validation
        for turns, log_prob, answers_log_prob in book.conversations(n, stream):
            messages = [{"role": ("user", "assistant")[i % 2], "content": turn}
                        for i, turn in enumerate(turns)]
            self.answers_nats -= answers_log_prob
            yield json.dumps({"messages": messages}), log_prob

    def add_floor(self, meta):
        """Add the floor of all tokens, as for stories, and of the assistant's, given the user's turns."""
        super().add_floor(meta)
        val = meta["val"]
        val["floor_nats_per_assistant_token"] = self.answers_nats / val["assistant_tokens"]
        print(f"floor: no model has a loss below {val['floor_nats_per_assistant_token']:.4f} nats on the "
              f"{val['assistant_tokens']:,} tokens of the assistant in val.bin, nor below "
              f"{val['floor_nats_per_token']:.4f} on all.")


def from_files(name, inputs, val_inputs=(), delimiter=END, tokenizer=None, workers=1, **options):
    """Make data/NAME from text files."""
    paths = [*inputs, *val_inputs]
    check_files(paths)
    # Cutting long documents into pieces is exact for these two patterns; of another one we know nothing.
    cut_long = tokenizer is None or tokenizer.pattern in (bpe.GPT4_PATTERN, bpe.GPT2_PATTERN)
    corpus = TextFiles(inputs, val_inputs, delimiter, cut_long)
    return write_folder(name, corpus, tokenizer, useful_workers(workers, paths), **options)


# Tokens. The second is for Silia; the third has conversations, in the tokens of the first if it can.
STORYBOOKS = {"storybook": 1024, "storybook_munch": 512, "storybook_chat": 1024}


def storybook(name="storybook", vocab_size=0, seed=1, train=25_000, val=300, longest_match=False, **options):
    """Make data/NAME from `train` + `val` stories of storybook.py, unless it is there already."""
    if (DATA / name / "meta.json").exists():
        return DATA / name
    corpus_class = Conversations if name == "storybook_chat" else Stories
    what = "conversations" if corpus_class.chat else "little stories"
    print(f"Making {train + val:,} {what} for {DATA / name}.")
    vocab_size = vocab_size or STORYBOOKS[name]
    longest_match = longest_match or name == "storybook_munch"
    if name == "storybook_chat" and vocab_size == STORYBOOKS["storybook"] and "tokenizer" not in options:
        stories = storybook()  # a model that tells them can learn to talk about them: see config/chat.py
        options["tokenizer"] = load_tokenizer(stories / "tokenizer.json")
    with contextlib.suppress(FileExistsError):  # another run has made the same meanwhile
        write_folder(name, corpus_class(seed, train, val), vocab_size=vocab_size, longest_match=longest_match,
                     **options)
    return DATA / name


HUB = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main"
TINYSTORIES = {"TinyStoriesV2-GPT4-train.txt": 2_227_753_162, "TinyStoriesV2-GPT4-valid.txt": 22_502_601}


def tinystories(name, **options):
    """Make data/NAME from TinyStoriesV2, downloaded to data/raw/ unless it is there (above: its bytes)."""
    for file, size in TINYSTORIES.items():
        download(f"{HUB}/{file}", DATA / "raw" / file, size)
    train, val = (DATA / "raw" / file for file in TINYSTORIES)
    return from_files(name, [train], [val], **options)


# ----------------------------------------------------------------------------------------------------------
# Command line


def arguments(argv):
    """Read the command line -> argparse.Namespace, checked."""
    parser = CommandLine(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("--name", help=f"the folder in data/ (default: tinystories; or: {', '.join(STORYBOOKS)})")
    option("--input", nargs="+", metavar="FILE", help="text of your own, in UTF-8, or that in .gz; or .jsonl")
    option("--val_input", nargs="+", metavar="FILE", help="to validate on (else 1%% to 10%% of the input)")
    option("--delimiter", metavar="S", default=END, help=rf"between documents (default: {END}); \n is LF")
    option("--vocab_size", type=int, metavar="N", help="default: 32000; storybooks: 1024, 512 (munch)")
    option("--tokenizer", metavar="FILE", help="a tokenizer.json to use instead of a new one")
    option("--nfc", action="store_true", help="normalise text to Unicode NFC first")
    option("--munch", action="store_true", help="encode by longest match and with Silia's special tokens")
    cores = min(os.cpu_count() or 1, 32)
    option("--workers", type=int, metavar="N", default=cores, help="processes (default: %(default)s)")
    args = parser.parse_args(argv)
    check_arguments(args, STORYBOOKS)
    return args


def run(args):
    """Make the folder that the arguments ask for, from one of the three sources."""
    check_links(DATA / args.name)
    need(not os.path.lexists(DATA / args.name),
         f"{DATA / args.name} exists already; remove it, or choose another --name.")
    options = {"workers": args.workers, "nfc": args.nfc, "longest_match": args.munch}
    if args.vocab_size:
        options["vocab_size"] = args.vocab_size
    if args.tokenizer:
        options["tokenizer"] = load_tokenizer(args.tokenizer)
    if args.name in STORYBOOKS:
        storybook(args.name, **options)
    elif args.input:
        delimiter = args.delimiter.replace(r"\r", "\r").replace(r"\n", "\n")
        from_files(args.name, args.input, args.val_input or [], delimiter, **options)
    else:
        tinystories(args.name, **options)


def main(argv=None):
    if signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a polite kill cleans up too
    try:
        run(arguments(argv))
    except KeyboardInterrupt:
        sys.exit("error: interrupted, so there is no new folder (a download goes on where it stopped).")
    except ValueError as error:  # argparse's own sentences have no full stop
        raise ValueError(f"{str(error).rstrip('.')}.") from None


if __name__ == "__main__":
    run_main(main, stdout_may_end=True)
