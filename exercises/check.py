"""
Is my answer right?

    python exercises/check.py 5 my_05.py

loads the file, puts it through the checks of exercise 5 and says "right", or what is wrong. README.md beside
this file has the exercises. A check is the function `check_NN(my)` below, where `my` is the learner's file as
a module; it raises Wrong with a sentence that says what was expected and what came instead.
"""

import importlib.util
import sys
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from model import PARTS, Cache, LanguageModel, ModelConfig, NoCache, apply_rotary  # noqa: E402: found by now


class Wrong(Exception):
    """What is not right yet, as a sentence for the learner."""


def need(my, name):
    """The learner's function or class of this name."""
    if not hasattr(my, name):
        raise Wrong(f"the file has no {name}; the exercise asks for one.")
    return getattr(my, name)


# ----------------------------------------------------------------------------------------------------------
# What several checks need


def registered(my, name, slot, key):
    """The learner's class or function, which must be in the table of parts."""
    part = need(my, name)
    if PARTS[slot].get(key) is not part:
        line = f'PARTS["{slot}"]["{key}"] = {name}'
        raise Wrong(f"{name} is not in the table of parts: the file needs the line {line} at its end.")
    return part


def small_model(**changes):
    """A small float64 model. Its weights are far from the initial ones, so that nothing is nearly linear."""
    settings = {"vocab_size": 61, "context": 48, "n_layer": 2, "d_model": 24, "n_head": 4, "d_ff": 40}
    model = LanguageModel(ModelConfig(**(settings | changes))).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (1.0 if p.dim() == 1 else 0.0))
    return model


def random_ids(B=2, T=40):
    return torch.randint(0, 61, (B, T), generator=torch.Generator().manual_seed(1))


def in_chunks(model, ids, sizes, cache):
    """The logits of ids (B, T), fed in chunks of these sizes."""
    return torch.cat([model(chunk, cache=cache)[0] for chunk in ids.split(sizes, dim=1)], dim=1)


def alone(mixer, x, config):
    """What a mixer by itself makes of x (B, T, C), in one pass, without cache."""
    position = torch.arange(x.size(1), dtype=x.dtype)
    return mixer(x, PARTS["position"][config.position](config, position), NoCache())


def random_x(T=40, C=24):
    return torch.randn(1, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def try_mixer(key, hint="", **changes):
    """What every mixer owes: its shape, no look ahead, and the same logits in chunks as in one pass.

    hint is a sentence for whoever fails the last.
    """
    model, ids = small_model(mixer=key, **changes), random_ids()
    said = "".join(f", {name}={value}" for name, value in changes.items())
    x = random_x()
    y = alone(model.blocks[0].mixer, x, model.config)
    if not torch.is_tensor(y) or y.shape != x.shape:
        shape = tuple(y.shape) if torch.is_tensor(y) else type(y).__name__
        raise Wrong(f"for an input of shape {tuple(x.shape)} the mixer gives {shape}; it must be the same{said}.")
    full = model(ids)[0]
    if not full.isfinite().all():
        raise Wrong(f"some logits are not finite{said}. Is there a token that sees nothing, not even itself?")
    for t in (1, 17, 39):
        changed = ids.clone()
        changed[:, t] = (ids[:, t] + 1) % 61
        if not (model(changed)[0][:, :t] - full[:, :t]).abs().max() < 1e-10:
            raise Wrong(f"a token sees a later one: to change token {t} changes logits before it{said}.")
    for sizes in ([1] * 40, [1, 7, 32]):
        shown = "1 token at a time" if sizes[1] == 1 else "chunks of 1, 7 and 32 tokens"
        try:
            logits = in_chunks(model, ids, sizes, Cache(48))
        except RuntimeError as error:
            raise Wrong(f"fed {shown}, with a cache, it stops, as it does not in one pass: {error} {hint}") from None
        if not (gap := (logits - full).abs().max().item()) < 1e-10:
            raise Wrong(f"fed {shown}, with a cache, logits differ by {gap:.2g} from those of one pass{said}. "
                        + hint)


def slow_attention(q, k, v, first=lambda t: 0):
    """A loop over heads and tokens, to compare with: token t sees the tokens first(t) .. t.

    q (H, T, D), k and v (K, T, D), all that is done to them done -> (1, T, H*D)
    """
    out = torch.zeros_like(q)
    for h in range(len(q)):
        kv = h // (len(q) // len(k))  # head h reads this key/value head
        for t in range(q.size(1)):
            seen = slice(first(t), t + 1)
            weights = (k[kv, seen] @ q[h, t] / q.size(2) ** 0.5).softmax(dim=0)
            out[h, t] = weights @ v[kv, seen]
    return out.transpose(0, 1).flatten(1)[None]


# ----------------------------------------------------------------------------------------------------------
# The checks


# ----------------------------------------------------------------------------------------------------------


def load(path):
    """The file as a module. Its own errors are shown as Python shows them, from the learner's line on."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments):
    checks = {name[6:]: check for name, check in globals().items() if name.startswith("check_")}
    if len(arguments) != 2 or arguments[0].zfill(2) not in checks:
        sys.exit("error: say the number of an exercise, 1 to 12, and the file with your answer: "
                 "python exercises/check.py 5 my_05.py")
    number, path = arguments[0].zfill(2), Path(arguments[1])
    if not path.is_file():
        sys.exit(f"error: there is no file {path}.")
    try:
        checks[number](load(path))
    except Wrong as wrong:
        sys.exit(f"not yet: {wrong}")
    except Exception:
        traceback.print_exc()  # an error in the learner's code: the traceback is what helps
        sys.exit("not yet: your code stopped with the error above.")
    print(f"Exercise {int(number)}: right.")


if __name__ == "__main__":
    main(sys.argv[1:])
