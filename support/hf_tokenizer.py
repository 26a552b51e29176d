"""Tokenizers as Hugging Face tokenizer.json files, in and out."""

import json

import regex

from support import need
from support.files import atomic_write
from tokenizer import CHAR_TO_BYTE, GPT2_PATTERN, LongestMatchTokenizer, Tokenizer


def load_tokenizer(path):
    """Read a tokenizer.json -> Tokenizer or LongestMatchTokenizer."""
    try:
        with open(path, encoding="utf-8") as file:
            return tokenizer_from_json(file.read())
    except ValueError as error:  # a UnicodeDecodeError is one, too
        raise ValueError(f"{path}: {error}") from None


def tokenizer_from_json(json_text):
    """The text of a tokenizer.json -> Tokenizer, or LongestMatchTokenizer if its model is WordPiece.

    What could not be encoded with the same ids is refused.
    """
    try:
        file = json.loads(json_text)
        return _build(file, file["model"])
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError, MemoryError,
            regex.error) as error:
        raise ValueError(f"This is not a sound tokenizer.json: {type(error).__name__} {error}.") from None


def _build(file, model):
    need(model["type"] in ("BPE", "WordPiece"), f"Only BPE and WordPiece can be read, not {model['type']}.")
    nfc, added = bool(file.get("normalizer")), file["added_tokens"]
    kinds = {"normalizer": (None, "NFC"), "decoder": ("ByteLevel",), "post_processor": (None, "ByteLevel")}
    flags = ("single_word", "lstrip", "rstrip", "normalized")[:4 if nfc else 3]
    odd = [key for key in kinds if (file.get(key) or {"type": None})["type"] not in kinds[key]]
    odd += [key for key in ("truncation", "padding", "dropout", "continuing_subword_prefix",
                            "end_of_word_suffix", "ignore_merges") if (file | model).get(key)]
    odd += [f"{flag} of {token['content']}" for token in added for flag in flags if token.get(flag)]
    need(not odd, f"The tokenizer asks for what is not supported: {', '.join(odd)}.")

    *first, last = file["pre_tokenizer"].get("pretokenizers") or [file["pre_tokenizer"]]
    by_itself = last.get("use_regex", True)  # ByteLevel can also split, by GPT-2's pattern
    need(last["type"] == "ByteLevel" and not last["add_prefix_space"] and len(first) + by_itself < 2
         and all(s | {"type": "Split", "behavior": "Isolated", "invert": False} == s for s in first),
         "The pre-tokenizer must be ByteLevel without prefix space, after at most one isolating Split.")
    pattern = first[0]["pattern"]["Regex"] if first else GPT2_PATTERN if by_itself else r"[\s\S]+"

    specials = {token["content"]: token["id"] for token in added}
    need(model["vocab"] | specials == specials | model["vocab"], "An added token has two ids.")
    vocab = {token: id for token, id in model["vocab"].items() if token not in specials}
    if model["type"] == "WordPiece":
        # A chunk beyond the limit becomes one unknown token; words of 10,000 bytes are no text that matters.
        need(model["continuing_subword_prefix"] == "" and model["max_input_chars_per_word"] >= 10_000,
             "WordPiece must have an empty prefix and a max_input_chars_per_word of 10,000 or more.")
        return LongestMatchTokenizer(vocab, specials, pattern, nfc)
    merges = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    _check_merges(vocab, merges)
    return Tokenizer(vocab, merges, specials, pattern, nfc)


def _check_merges(vocab, merges):
    """Refuse merges that tiktoken would not follow to the letter.

    tiktoken knows no merges: it joins the neighbours that spell the token of the smallest id. For any text
    that is the same if each token, spelt in bytes, is encoded as itself: then only its own two parts can come
    to spell it. In training that is so: when a token is made, its parts stand side by side, so no earlier
    merge joined anything across the seam between them. In a file, the seams are checked here.
    """
    def edge(id, until, side):  # the tokens at one end of `id` while it is built, each with what ends it
        yield id, until
        while id in parts:
            id, until = parts[id][side], id
            yield id, until

    made, parts, newest = {}, {}, -1  # made: (left id, right id) -> id; parts: id -> (left id, right id)
    need(len(vocab) == 256 + len(merges), f"{len(merges)} merges cannot make {len(vocab) - 256} tokens.")
    for merge in merges:
        pair, new = tuple(map(vocab.get, merge)), vocab.get("".join(merge))
        if (len(pair) != 2 or None in (*pair, new) or new <= newest
                or not all(id in parts or token in CHAR_TO_BYTE for id, token in zip(pair, merge))):
            raise ValueError(f"The merge {merge} does not join two earlier tokens into the next one.")
        for x, x_until in edge(pair[0], new, 1):
            for y, y_until in edge(pair[1], new, 0):
                # Of three equals in a row, w x y, the pair w x is merged before x y: hence < and <=.
                if made.get((x, y), new) < x_until and made[x, y] <= y_until:
                    raise ValueError(f"The merges never leave {merge} side by side to be joined.")
        made[pair], parts[new], newest = new, pair, new


def tokenizer_to_json(tokenizer):
    """The text of a Hugging Face tokenizer.json, always the same for the same tokenizer."""
    def by_id(tokens):
        return dict(sorted(tokens.items(), key=lambda item: item[1]))

    vocab = by_id(tokenizer.vocab | tokenizer.specials)
    if isinstance(tokenizer, LongestMatchTokenizer):
        # There is no <unk>: a chunk beyond any limit would be an error, not lost text.
        model = {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "",
                 "max_input_chars_per_word": 10**9, "vocab": vocab}
    else:
        model = {"type": "BPE", "vocab": vocab, "merges": tokenizer.merges}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": tokenizer.pattern}, "behavior": "Isolated",
             "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    file = {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [{"id": i, "content": s, **flags} for s, i in by_id(tokenizer.specials).items()],
            "normalizer": {"type": "NFC"} if tokenizer.nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, plain]},
            "post_processor": None, "decoder": plain, "model": model}
    lines = (f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in file.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def save_tokenizer(tokenizer, path):
    """Write tokenizer.json whole or not at all."""
    with atomic_write(path) as file:
        file.write(tokenizer_to_json(tokenizer).encode("utf-8"))
