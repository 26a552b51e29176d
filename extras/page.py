"""
Look inside: one page that shows what every part of a model did, token by token. Any browser opens it.

    python extras/page.py --checkpoint out/tiny/ckpt.pt --prompt "Once upon a time" --out story.html

The model goes on with the prompt to the end of the story, or reads --text, a file. One pass over it gives all
numbers; they are in the page, and so is the JavaScript that shows them (page.html): nothing else is loaded.
What is computed stands in figures.py, for its pictures and for this page.
"""

import base64
import gzip
import json
import math
import sys
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

import storybook
from extras.figures import gate_modules, gates, heads, layers_below, merges, read_checkpoint, spell, watch
from extras.judge import fill, words_of
from support import need
from support.checkpoint import load_model
from support.files import atomic_write
from support.runtime import run_main, sink_ids
from support.settings import CommandLine

LONGEST = 512  # tokens on a page; what heads read grows with the square
UNIT = 1024  # logits are kept as whole numbers, in units of 1/1024
END = "\0"  # the end of a story, as a character that no story has

# ----------------------------------------------------------------------------------------------------------
# The floor at each token


def tellings(text, parts, at=0, slots={}, p=1.0):
    """Yield (characters, probability) for each way to tell the parts: how far it agrees with text.

    Whatever departs from the text is not told on, so there are few.
    """
    part, rest = (parts[0], parts[1:]) if parts else ("", [])
    if at == len(text):
        yield at, p
    elif isinstance(part, list):
        for option in part:
            yield from tellings(text, [*option, *rest], at, slots, p / len(part))
    elif isinstance(part, tuple) and part[0] not in slots:
        words = words_of(":".join(part), slots)
        for word in words:
            yield from tellings(text, [word, *rest], at, fill(slots, part[0], word), p / len(words))
    else:
        told = part if isinstance(part, str) else slots[part[0]]
        agree = next((i for i, (a, b) in enumerate(zip(told, text[at:])) if a != b), len(told))
        agree = min(agree, len(text) - at)
        if agree < len(told):
            yield at + agree, p
        else:
            yield from tellings(text, rest, at + agree, slots, p)


def floors(pieces):
    """The texts of a story's tokens -> the floor at each, in bits: -log2 of its probability, given the text
    before. inf where no story of the storybook goes on like this, None behind that.

    The sum is exact. Of a word that is cut into tokens, the way it is cut may give away more.
    """
    text = "".join(pieces)
    departing = [0.0] * (len(text) + 1)  # the probability that a story agrees with just so many characters
    for agree, p in tellings(text, [*storybook.BOOK, END]):
        departing[agree] += p
    agreeing = list(accumulate(reversed(departing)))[::-1]  # ... with at least so many
    found, at = [], 0
    for piece in pieces:
        before, at = agreeing[at], at + len(piece)
        found.append(None if before == 0 else math.log2(before / agreeing[at]) if agreeing[at] else math.inf)
    return found


# ----------------------------------------------------------------------------------------------------------
# The numbers of a page, in JSON's types


def pack(numbers, kind):
    """An array as text: whole numbers of this NumPy type, gzip, base64."""
    data = np.ascontiguousarray(numbers, dtype=kind).tobytes()
    return base64.b64encode(gzip.compress(data, mtime=0)).decode("ascii")


def in_255ths(weights):
    """Weights (..., S) that add up to 1 -> whole numbers that add up to 255, each off by less than 1.

    All are rounded down, then those up that lost most.
    """
    scaled = 255 * weights.double() / weights.double().sum(dim=-1, keepdim=True)
    whole = scaled.floor()
    missing = 255 - whole.sum(dim=-1, keepdim=True)
    rank = (whole - scaled).argsort(dim=-1, stable=True).argsort(dim=-1)
    return whole + (rank < missing)


def rounded(x, digits=4):
    return np.round(x.double().numpy(), digits).tolist()


@torch.no_grad()
def look(model, tokenizer, idx):
    """Token ids idx (1, T) -> what every part did in one pass; what a part does not report is left out."""
    logits, past = watch(model, idx)
    T, logits = len(logits), logits.float()
    bits = F.cross_entropy(logits[:-1], idx[0, 1:], reduction="none") / math.log(2)
    ordered, ids = logits[:, : tokenizer.vocab_size].sort(descending=True, stable=True)
    behind = ((ordered[:, :1] - ordered) * UNIT).round().clamp(max=65535)  # the likeliest
    weights = heads(past)
    lower = torch.ones(T, T, dtype=torch.bool).tril()
    return {
        "bits": [None, *rounded(bits)],
        "likeliest": [spell(tokenizer, row) for row in ids[:, :10].tolist()],
        "rank": [*(ids[:-1] == idx[0, 1:, None]).int().argmax(dim=1).tolist(), None],  # of the next token
        "steps": pack(behind.diff(dim=1, prepend=behind[:, :1]), np.uint16),  # most are small: gzip likes it
        "heads": [[name, head] for name, w in weights.items() for head in range(len(w))],
        "weights": pack(torch.cat([in_255ths(w)[:, lower] for w in weights.values()]) if weights else [], np.uint8),
        "gates": rounded(gates(model, idx)) if gate_modules(model) else [],
        "below": [[name, blend, rounded(w.transpose(0, 1))] for name, (blend, w) in layers_below(model, idx).items()],
        "row_bytes": sum(rows.nbytes for rows in past.rows.values()) // T,
        "sum_bytes": sum(total[:, -1].nbytes for _, total in past.sums.values()),
    }


def look_without(model, tokenizer, idx):
    """{what is changed: what every part then does}: nothing; and for Nano, no spiral, and no gate."""
    found = {"as trained": look(model, tokenizer, idx)}
    alpha = model.config.alpha
    if alpha and model.config.position in ("spiral", "mirrored"):
        model.config.alpha = 0.0
        found["α = 0"] = look(model, tokenizer, idx)
        model.config.alpha = alpha
    hooks = [gate.register_forward_hook(lambda gate, inputs, g: torch.ones_like(g))
             for gate in gate_modules(model)]
    if hooks:
        found["gate = 1"] = look(model, tokenizer, idx)
    for hook in hooks:
        hook.remove()
    return found


def page_data(checkpoint, tokenizer, ids, start, merge_threshold=None):
    """All that the page shows of the token ids, the first `start` of which are no part of the text."""
    model, idx = load_model(checkpoint).eval(), torch.tensor([ids])
    texts = [END if id == tokenizer.end_of_text else tokenizer.token_bytes(id).decode("latin-1")
             for id in ids[start:]]
    floor = [None] * start + floors(texts)
    data = {"tokens": spell(tokenizer, ids), "unit": UNIT, "passes": look_without(model, tokenizer, idx),
            "floor": [x if x in (None, math.inf) else round(x, 4) for x in floor], "merged": {}}
    data["departs"] = floor.index(math.inf) if math.inf in floor else None
    data["floor"] = [None if x == math.inf else x for x in data["floor"]]
    if merge_threshold is not None:
        checkpoint["model_config"] |= {"token_merging": "paper", "merge_threshold": merge_threshold}
    if checkpoint["model_config"].get("token_merging", "off") != "off":
        data["merged"] = {layer: second.nonzero()[:, 0].tolist()
                          for layer, second in merges(load_model(checkpoint), idx).items()}
    return data


# ----------------------------------------------------------------------------------------------------------


def read_ids(args, model, tokenizer):
    """The text's ids and how many stand before it: of --text, or of the prompt and what the model makes of it."""
    start = sink_ids(model.config, tokenizer) or [tokenizer.end_of_text]  # as in training
    room = min(model.config.context, LONGEST)
    text = args.text.read_text(encoding="utf-8-sig").removesuffix("\n") if args.text else args.prompt
    ids = start + tokenizer.encode(text)
    need(len(start) < len(ids) <= room,
         f"the text has {len(ids) - len(start)} tokens; a page of this model has room for 1 to "
         f"{room - len(start)}.")
    if not args.text:
        generator = torch.Generator().manual_seed(args.seed)
        for token in model.generate(torch.tensor([ids]), room - len(ids), temperature=0.8, generator=generator,
                                    n_ids=tokenizer.vocab_size):
            ids.append(token.item())
            if ids[-1] == tokenizer.end_of_text:
                break
    return ids, len(start)


def write_page(data, path):
    """The template with the data in it. Text is data there, never HTML: "<" is written \\u003c."""
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    before, after = template.split("{{data}}")
    page = before + json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c") + after
    with atomic_write(path) as file:
        file.write(page.encode("utf-8"))


def make_page():
    parser = CommandLine(description=__doc__.splitlines()[1])
    parser.add_argument("--checkpoint", type=Path, help="default: the newest out/*/ckpt.pt")
    parser.add_argument("--prompt", default="Once upon a time", help="the beginning of a story")
    parser.add_argument("--text", type=Path, help="UTF-8 file to read instead")
    parser.add_argument("--seed", type=int, default=1337, help="another seed, another story")
    parser.add_argument("--merge_threshold", type=float, help="cosine above which neighbours merge; default: as "
                        "trained")
    parser.add_argument("--out", type=Path, default=Path("story.html"), help="the page (story.html)")
    args = parser.parse_args()
    need(0 <= args.seed < 2**63, "--seed must lie between 0 and 2**63 - 1.")
    checkpoint, tokenizer = read_checkpoint(args)
    ids, start = read_ids(args, load_model(checkpoint).eval(), tokenizer)
    write_page({"source": str(args.checkpoint)} | page_data(checkpoint, tokenizer, ids, start, args.merge_threshold), args.out)
    print(args.out)


def main():
    run_main(make_page, advice="try a shorter text")


if __name__ == "__main__":
    main()
