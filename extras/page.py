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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

from extras.figures import gate_modules, gates, heads, layers_below, merges, read_checkpoint, spell, watch
from extras.judge import END, floors
from support import need
from support.checkpoint import load_model, newest_checkpoint
from support.files import atomic_write
from support.runtime import run_main, start_ids
from support.settings import CommandLine

LONGEST = 512  # tokens on a page; what heads read grows with the square
UNIT = 1024  # logits are kept as whole numbers, in units of 1/1024

# ----------------------------------------------------------------------------------------------------------
# The numbers of a page, in JSON's types


def pack(numbers, kind):
    """An array as text: whole numbers of this NumPy type, gzip, base64."""
    data = np.ascontiguousarray(numbers, dtype=kind).tobytes()
    return base64.b64encode(gzip.compress(data, 4, mtime=0)).decode("ascii")


def in_255ths(weights):
    """Weights (..., S) that add up to 1 -> whole numbers that add up to 255, each off by less than 1.

    All are rounded down, then those up that lost most.
    """
    scaled = 255 * weights.double() / weights.double().sum(dim=-1, keepdim=True)
    whole = scaled.floor()
    missing = 255 - whole.sum(dim=-1, keepdim=True)
    rank = (whole - scaled).argsort(dim=-1, stable=True).argsort(dim=-1)
    return whole + (rank < missing)


def rounded(x):
    return np.round(x.double().numpy(), 4).tolist()


@torch.no_grad()
def look(model, tokenizer, idx):
    """Token ids idx (1, T) -> what every part did in one pass; what a part does not report is left out."""
    logits, past = watch(model, idx)
    T, logits = len(logits), logits.float()
    bits = F.cross_entropy(logits[:-1], idx[0, 1:], reduction="none") / math.log(2)
    ordered, ids = logits[:, : tokenizer.vocab_size].sort(descending=True, stable=True)
    behind = ((ordered[:, :1] - ordered) * UNIT).round().clamp(max=65535)  # the likeliest
    weights, lower = heads(past), torch.ones(T, T, dtype=torch.bool).tril()
    return {
        "bits": [None, *rounded(bits)],
        "likeliest": [spell(tokenizer, row) for row in ids[:, :10].tolist()],
        "rank": [*(ids[:-1] == idx[0, 1:, None]).int().argmax(dim=1).tolist(), None],  # of the next token
        "steps": pack(behind.diff(dim=1, prepend=behind[:, :1]), np.uint16),  # most are small: gzip likes it
        "heads": [[name, head, head % 2 == 1 and name + ".weight" in past.sums]  # by running sums?
                  for name, w in weights.items() for head in range(len(w))],
        "weights": pack(np.concatenate([[], *(in_255ths(w)[:, lower].flatten() for w in weights.values())]),
                        np.uint8),
        "gates": rounded(gates(model, idx)) if gate_modules(model) else [],
        "below": [[name, blend, rounded(w.transpose(0, 1))]
                  for name, (blend, w) in layers_below(model, idx).items()],
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


def page_data(checkpoint, tokenizer, ids, start):
    """All that the page shows of the token ids, the first `start` of which are no part of the text."""
    idx = torch.tensor([ids])
    texts = [END if id == tokenizer.end_of_text else tokenizer.token_bytes(id).decode("latin-1")
             for id in ids[start:]]
    merged = {}
    if checkpoint["model_config"].get("token_merging", "off") != "off":
        merged = merges(load_model(checkpoint), idx)
    return {
        "tokens": spell(tokenizer, ids), "start": start, "floor": [None] * start + floors(texts),
        "merged": {layer: second.nonzero()[:, 0].tolist() for layer, second in merged.items()},
        "unit": UNIT, "passes": look_without(load_model(checkpoint).eval(), tokenizer, idx),
    }


# ----------------------------------------------------------------------------------------------------------


def read_ids(args, model, tokenizer):
    """The ids, and how many stand before the text: of --text, or of the prompt and how the model goes on."""
    start = start_ids(model.config, tokenizer)
    room = min(model.config.context, LONGEST) - len(start)
    try:
        text = args.text.read_text(encoding="utf-8-sig").removesuffix("\n") if args.text else args.prompt
    except UnicodeDecodeError:
        raise ValueError(f"{args.text} is not UTF-8 text.") from None
    ids = tokenizer.encode(text)
    need(len(ids) <= room and (ids or not args.text),
         f"the text has {len(ids)} tokens; a page of this model has room for 1 to {room}.")
    idx, generator = torch.tensor([start + ids]), torch.Generator().manual_seed(args.seed)
    n_new = 0 if args.text else room - len(ids)
    for token in model.generate(idx, n_new, 0.8, generator=generator, n_ids=tokenizer.vocab_size):
        ids.append(token.item())
        if ids[-1] == tokenizer.end_of_text:
            break
    return start + ids, len(start)


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
    parser.add_argument("--merge_threshold", type=float,
                        help="show which neighbours merge: those with a cosine above (default: as trained)")
    parser.add_argument("--out", type=Path, default=Path("story.html"), help="the page (story.html)")
    args = parser.parse_args()
    need(0 <= args.seed < 2**63, "--seed must lie between 0 and 2**63 - 1.")
    args.checkpoint = args.checkpoint or newest_checkpoint()
    checkpoint, tokenizer = read_checkpoint(args)
    if args.merge_threshold is not None:
        checkpoint["model_config"] |= {"token_merging": "paper", "merge_threshold": args.merge_threshold}
    ids, start = read_ids(args, load_model(checkpoint).eval(), tokenizer)
    write_page({"source": str(args.checkpoint)} | page_data(checkpoint, tokenizer, ids, start), args.out)
    print(args.out)


def main():
    run_main(make_page, advice="try a shorter text")


if __name__ == "__main__":
    main()
