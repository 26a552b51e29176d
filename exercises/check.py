"""
Is my answer right?

    python exercises/check.py 5 my_05.py

loads the file, puts it through the checks of exercise 5 and says "right", or what is wrong. README.md beside
this file has the exercises. A check is the function `check_NN(my)` below, where `my` is the learner's file as
a module; it raises Wrong with a sentence that says what was expected and what came instead.
"""

import importlib.util
import json
import math
import subprocess
import sys
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import storybook  # noqa: E402: found by now
import tokenizer  # noqa: E402
from model import (PARTS, Attention, Cache, LanguageModel, ModelConfig, NoCache, apply_rotary,  # noqa: E402
                   running_mean, split_heads, unit_rms)
from extras import figures  # noqa: E402
from support.checkpoint import checkpoint_tokenizer, load_checkpoint, load_model  # noqa: E402
from support.report import budget  # noqa: E402


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
        raise Wrong(f"for an input of shape {tuple(x.shape)} the mixer gives {shape}, not the same{said}.")
    full = model(ids)[0]
    if not full.isfinite().all():
        raise Wrong(f"some logits are not finite{said}. Is there a token that sees nothing, not even itself?")
    for t in (1, 17, 39):
        changed = ids.clone()
        changed[:, t] = (ids[:, t] + 1) % 61
        if not (model(changed)[0][:, :t] - full[:, :t]).abs().max() < 1e-10:
            raise Wrong(f"a token sees a later one: to change token {t} changes logits before it{said}.")
    for sizes in ([1] * 40, [1, 7, 32]):
        fed = "1 token at a time" if sizes[1] == 1 else "chunks of 1, 7 and 32 tokens"
        try:
            logits = in_chunks(model, ids, sizes, Cache(48))
        except RuntimeError as error:
            raise Wrong(f"fed {fed}, with a cache, it stops; in one pass not ({error}). {hint}") from None
        gap = (logits - full).abs().max()
        if not gap < 1e-10:
            raise Wrong(f"fed {fed}, with a cache, logits differ by {gap:.2g} from one pass{said}. {hint}")


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


def gap_of(a, b):
    """The largest difference of two tensors, a result and what it should be."""
    if a.shape != b.shape:
        raise Wrong(f"a result has the shape {tuple(a.shape)}; it should have {tuple(b.shape)}.")
    return (a - b).abs().max().item()


def reason(slips, otherwise=""):
    """The sentence of the first slip, a pair (is it so?, sentence), that was made."""
    return next((sentence for so, sentence in slips if so), otherwise)


def slip(got, slips, tolerance=1e-9):
    """What to say of a wrong result: the sentence of the first of slips, (value, sentence), that gives it."""
    return next((sentence for value, sentence in slips if gap_of(got, value) < tolerance), "")


# ----------------------------------------------------------------------------------------------------------
# The checks


def compare(what, got, want, slips):
    """Wrong if got is not want; slips are known wrong values, each with its sentence."""
    if got != want:
        shown = f"{got:,}" if isinstance(got, (int, float)) else repr(got)
        raise Wrong(f"{what} gives {shown}; the model has {want:,}. " + slips.get(got, ""))


def check_01(my):
    """A budget by hand, against the one that is read off the model."""
    count, cache_bytes, state_bytes = (need(my, n) for n in ("parameters", "cache_bytes", "state_bytes"))

    def refuse(*args, **kwargs):
        raise Wrong("your functions build a model or a part of one; they are to calculate with the config.")

    small = {"vocab_size": 500, "n_layer": 2, "d_model": 48, "n_head": 6, "d_ff": 90}
    for changes in ({}, small, {"n_layer": 2, "n_kv_head": 2}, {"n_layer": 2, "d_head": 20},
                    {"n_layer": 2, "d_head": 40, "n_kv_head": 4}, {"n_layer": 2, "gate": False}):
        config, length = ModelConfig(**changes), 100
        with torch.device("meta"):
            costs = budget(LanguageModel(config), length)
        with patch.object(torch.nn.Module, "__init__", refuse):
            got = count(config), cache_bytes(config, length), state_bytes(config)
        n, V, C, F = config.n_layer, config.vocab_size, config.d_model, config.d_ff
        H, K, D = config.n_head, config.n_kv_head, config.d_head
        case = f"ModelConfig({', '.join(f'{name}={value}' for name, value in changes.items())})"

        size, gate = sum(costs["parameters"].values()), D * H + H * H + H
        grouped = f"Keys and values have K = {K} heads, not H = {H}: W_k and W_v are that much smaller."
        wide = f"Here D = {D} is not C/H, and H D not C: W_q is C x (H D), W_out (H D) x C."
        compare(f"parameters({case})", got[0], size, {
            size + V * C: "That is vocab_size x d_model too many: the head is the embedding matrix again.",
            size - n * H: "That is n_head a layer too few: a matrix of the gate has a bias.",
            size - C: "That is d_model too few: there is one more norm, after the last block.",
            size - n * C: "That is d_model a layer too few: a block has two norms.",
            size - (2 * n + 1) * C: "The norms have a gain for each of the d_model coordinates.",
            size - n * C * H * D: "Is one of the matrices W_q, W_k, W_v, W_out missing?",
            size - n * C * F: "The butterfly has three matrices up and one down: 4 C F.",
            size + n * gate: "With gate=False there is no gate to count.",
            size - n * gate: "The gate has parameters, too.",
            size + n * (D * H - H): "The gate's W_2 is H x H, with H biases; its W_1 alone is H x D.",
            size + n * C * (4 * C - 2 * D * (H + K)): wide,
            size + n * (C // H - D) * (2 * C * (H + K) + H): wide,
            size + 2 * n * C * D * (H - K): grouped,
        })
        cache = costs["cache_bytes"]
        compare(f"cache_bytes({case}, {length})", got[1], cache, {
            cache // 2: "That is half of it: keys and values are both kept, at 4 bytes for each number.",
            cache // 4: "A number in float32 has 4 bytes.",
            cache // n: "Every layer has rows of its own.",
            cache * H // K: f"The cache keeps the K = {K} heads of the keys and values, not H = {H}.",
        })
        state = costs["state_bytes"]
        compare(f"state_bytes({case})", got[2], state, {
            state // 4: "A number in float32 has 4 bytes.",
            state // n: "Every layer has a sum of its own.",
            state * H: "The sum is of the mean of all heads' queries: D numbers, not H D.",
            n * D * 4: "With gate=False there is no running sum.",
        })


def as_tables(tables, T, D):
    """What stretched_rotary returned, in float64 (2, T, D/2): the cosines, then the sines."""
    if not (isinstance(tables, (tuple, list)) and len(tables) == 2 and all(map(torch.is_tensor, tables))):
        raise Wrong("stretched_rotary must return two tensors, the cosines and the sines.")
    for table in tables:
        if table.shape != (T, D // 2):
            raise Wrong(f"for {T} positions and heads of width {D} a table has the shape {(T, D // 2)}, "
                        f"a column for each pair; not {tuple(table.shape)}.")
    return torch.stack(list(tables)).double()


def slip_02(fits, base, s, D):
    """The sentence for wrong tables of stretched rotary; fits(frequency, ...) says whether they turn so."""
    half = D // 2
    i = torch.arange(half, dtype=torch.float64)

    def turns(base):
        return base ** (-i / half)

    def with_exponent(exponent):  # of s: the base of a slip
        return s != 1 and fits(turns(base * s**exponent))

    right, whole = turns(base * s ** (D / (D - 2))), s // 1
    spiral = 1 + 0.3 * ((i + 1) / half).sqrt()
    between = turns(base) * (1 + (1 / s - 1) * i / (half - 1))
    exponent = "base * s to this power makes the slowest pair {:.4g} times as slow, not s = {:g} times."
    return reason([
        (s != 1 and fits(turns(base)), "it is plain rotary: nothing is stretched."),
        (s != 1 and fits(turns(base) / s),
         "that is linear interpolation: the fastest pair is slowed, too; it should turn as before."),
        (fits(right * spiral) or fits(turns(base) * spiral), "it is a spiral: it reads alpha."),
        (fits(turns(10000 * s ** (D / (D - 2)))), "the base is config.rope_base, which is not always 10000."),
        (fits(turns(base * whole ** (D / (D - 2)))), f"s is {s:g}, not {whole:g}: do not round it."),
        (with_exponent(-D / (D - 2)),
         "the slow pairs turn faster: s is config.context / trained, not the inverse."),
        *((with_exponent(power), exponent.format(s ** (power * (D - 2) / D), s))
          for power in (1, 2, (D - 2) / D, D, half, D - 2, half - 1)),
        (half > 2 and with_exponent(half / (half - 2)),
         "D is the width of the head, twice the number of pairs: you take D/2 for it."),
        (fits(between), "the fastest and the slowest pair are right, but not those between: only the base "
                        "is to change."),
        (fits(right.sqrt()) or fits(right**2),
         "pair i turns by base^(-2i/D), and D is the width of the head, twice the number of pairs."),
        (fits(1 / right), "the exponent is negative: later pairs turn more slowly."),
        (fits(right, 180 / math.pi) or fits(right, math.pi / 180),
         "angles are in radians: nothing is to be converted from or into degrees."),
        (fits(right, 2 * math.pi), "the angle is position times frequency, without 2 pi."),
        (fits(right, -1.0), "it turns the other way: the sines have the wrong sign."),
        (fits(right, swapped=True), "sines and cosines have changed places."),
        (fits(right, tolerance=1e-3), "it is rounded: compute in the type of `position`, here float64."),
    ], "the fastest pair must turn by 1 radian a token, as before, the slowest by 1/s of what it did, and "
       "all pairs by new_base^(-2i/D).")


def check_02(my):
    """The base that stretches the slowest pair only; and the alpha that gives this pair a turn more."""
    stretched, alpha_of_a_turn = need(my, "stretched_rotary"), need(my, "alpha_of_a_turn")
    position = torch.arange(5, 45, dtype=torch.float64)
    for changes, trained in (({}, 256), ({"rope_base": 500.0, "context": 160}, 64), ({"d_head": 4}, 512),
                             ({"d_head": 6, "rope_base": 1e6}, 128), ({}, 1024)):
        config = ModelConfig(alpha=0.3, **changes)
        D, base, s = config.d_head, config.rope_base, config.context / trained
        tables = stretched(config, position, trained)
        if config != ModelConfig(alpha=0.3, **changes):
            raise Wrong("stretched_rotary changes the config that it is given; others still need it.")
        tables = as_tables(tables, len(position), D)

        def fits(frequency, scale=1.0, tolerance=1e-9, swapped=False):
            angle = position[:, None] * frequency * scale
            table = torch.stack([angle.cos(), angle.sin()])
            return (tables - (table.flip(0) if swapped else table)).abs().max() < tolerance

        pair = torch.arange(D // 2, dtype=torch.float64)
        if not fits((base * s ** (D / (D - 2))) ** (-2 * pair / D)):
            raise Wrong(f"stretched_rotary is not right with D = {D}, rope_base={base:g}, "
                        f"context={config.context} and trained={trained}: " + slip_02(fits, base, s, D))

    for changes, distance in (({}, 1024), ({}, 100), ({"d_head": 6, "rope_base": 500.0, "alpha": 0.3}, 7)):
        config = ModelConfig(**changes)
        half, base = config.d_head // 2, config.rope_base
        slowest = base ** (-(half - 1) / half)
        right = 2 * math.pi / (distance * slowest)
        got = float(alpha_of_a_turn(config, distance))
        slips = [
            (360 / (distance * slowest), "a full turn is 2 pi: angles are in radians, not degrees."),
            (2 * math.pi / distance * half**0.5, "that is for the fastest pair, i = 0; the last is slowest."),
            (2 * math.pi * base / distance, "the slowest pair is i = D/2 - 1: there is none with i = D/2."),
            (right - 1, "that is a full turn in all; asked is one more than plain rotary makes."),
            (right / 2, "that is half a turn."),
            (right / (2 * math.pi), "that is one radian more, not one turn."),
            (right * (half / (half - 1)) ** 0.5, "the root is of (i + 1)/(D/2): 1 for the slowest pair."),
            (2 * math.pi / slowest, "that is after one token, not after `distance`."),
            (1 / right, "that is the inverse."),
        ]
        if not math.isclose(got, right, rel_tol=1e-6):
            slips = [(math.isclose(got, value, rel_tol=1e-6), sentence) for value, sentence in slips]
            raise Wrong(f"alpha_of_a_turn(config, {distance}) gives {got:.6g}, which is not right: "
                        + reason(slips, f"with it the slowest pair gains {got / right:.3g} turns."))


def check_03(my):
    """Min-p: which tokens can be drawn, how often, row by row."""
    sample, n = need(my, "sample_min_p"), 20_000
    p = torch.tensor([0.03, 0.30, 0.002, 0.11, 0.20, 0.05, 0.01, 0.16, 0.08, 0.04, 0.015, 0.003])

    def draw(probs, temperature, min_p, seed=0):
        logits = probs.log() + 5  # not log-probabilities, which logits need not be
        before, generator = logits.clone(), torch.Generator().manual_seed(seed)
        try:
            out = sample(logits, temperature, min_p, generator=generator)
        except RuntimeError as error:  # of multinomial: weights that are all 0, or not finite
            raise Wrong(f"at temperature {temperature} and min_p {min_p} it stops ({error}). "
                        + ("Is the likeliest token dropped, which is at the threshold of min_p = 1?"
                           if temperature else "Temperature 0 is a case of its own.")) from None
        if not torch.is_tensor(out) or out.shape != (len(probs), 1) or out.dtype != torch.long:
            kind = f"{tuple(out.shape)}, {out.dtype}" if torch.is_tensor(out) else type(out).__name__
            raise Wrong(f"for logits {tuple(logits.shape)} it must return ids ({len(probs)}, 1), not {kind}.")
        if not torch.equal(before, logits):
            raise Wrong("sample_min_p changes the logits that it is given; make a copy first.")
        return out[:, 0]

    def kept(probs, min_p):
        return set((probs >= min_p * probs.max()).nonzero()[:, 0].tolist())

    rows = p.expand(n, -1)
    if set(draw(rows, 0, 0.25).tolist()) != {1}:
        raise Wrong("temperature 0 must always give the likeliest token, as in sample_token.")
    for temperature, min_p in ((1.0, 0.25), (2.0, 0.25), (0.5, 0.25), (1.0, 0.0), (1.0, 1.0)):
        case = f"at temperature {temperature} and min_p {min_p}"
        q = p ** (1 / temperature) / (p ** (1 / temperature)).sum()
        count = torch.bincount(draw(rows, temperature, min_p), minlength=12)
        want, drawn = kept(q, min_p), set(count.nonzero()[:, 0].tolist())
        if drawn != want:
            absolute = set((q >= min_p).nonzero()[:, 0].tolist())
            places = [set(range(len(want))), set(range(12 - len(want), 12))]
            slips = [
                (temperature != 1 and drawn == kept(p, min_p),
                 "it cuts before the temperature is applied: divide the logits by it first."),
                (drawn == absolute, "the threshold is min_p times the largest probability, not min_p."),
                (drawn in places, "these are places in the sorted order; gather the ids of the tokens."),
                (drawn == set(range(12)),
                 "nothing is dropped. What must not be drawn needs the probability 0 (as a logit: -inf)."),
            ]
            raise Wrong(f"{case} it draws the tokens {sorted(drawn)} instead of {sorted(want)}: "
                        + reason(slips, "compare with the definition."))
        q = torch.tensor([x if i in want else 0.0 for i, x in enumerate(q.tolist())])
        q = q / q.sum()
        share, spread = count / n, (q * (1 - q) / n).sqrt()  # one standard deviation
        worst = int(((share - q).abs() - 5 * spread).argmax())
        if (share - q).abs()[worst] > 5 * spread[worst]:
            raise Wrong(f"{case} the right tokens are drawn, but in the wrong proportions: token {worst} is "
                        f"{share[worst]:.3f} of the draws instead of {q[worst]:.3f}. What is left keeps its "
                        "ratios. Is there a second softmax, or no temperature?")
    if torch.equal(draw(rows, 1.0, 0.1, seed=1), draw(rows, 1.0, 0.1, seed=2)) or not torch.equal(
            draw(rows, 1.0, 0.1, seed=1), draw(rows, 1.0, 0.1, seed=1)):
        raise Wrong("the draws must come from the generator: the same seed again, the same tokens again.")
    peaked, flat = [0.6] + [0.08] * 5, [0.2] * 3 + [0.4 / 3] * 3
    both = draw(torch.tensor([peaked, flat]).repeat_interleave(1000, dim=0), 1.0, 0.25)
    if set(both[:1000].tolist()) != {0} or set(both[1000:].tolist()) != set(range(6)):
        raise Wrong("rows of a batch influence each other: each has its own largest probability (dim=-1).")


CACHED = {  # three models that remember in different ways
    "nano": {},
    "helix": {"position": "helix", "mixer": "cross_layer", "ffn": "dual_stream", "norm": "offset_rms"},
    "silia": {"position": "mirrored", "alpha": 0.0, "mixer": "hydra", "norm": "bare_rms", "block": "silia"},
}


@torch.no_grad()
def check_04(my):
    """A cache that decodes wrongly, and a test that fails with it and passes without."""
    broken, test = need(my, "BrokenCache"), need(my, "TEST")
    if not (isinstance(broken, type) and issubclass(broken, Cache)):
        raise Wrong("BrokenCache must be a class made from Cache: class BrokenCache(Cache).")
    if broken is Cache or not {"append", "running_sum", "advance", "reset", "__init__"} & set(vars(broken)):
        raise Wrong("BrokenCache is Cache, unchanged: write one of its methods anew, with a mistake.")
    if not (isinstance(test, str) and test.startswith("tests/") and "::" in test):
        raise Wrong("TEST must name one test of this project: tests/test_model.py::test_something.")
    largest = 0.0
    for name, changes in CACHED.items():
        model, ids = small_model(**changes), random_ids(B=1)
        for sizes in ([12], [1], [1] * 40, [1, 7, 32]):
            right = model(ids[:, : sum(sizes)])[0]
            try:
                logits = in_chunks(model, ids[:, : sum(sizes)], sizes, broken(48))
            except Exception as error:
                raise Wrong(f"decoding with BrokenCache stops ({type(error).__name__}: {error}). It must "
                            "go on, and be wrong: an error that all see needs no test.") from None
            gap = (logits - right).abs().max().nan_to_num(math.inf).item()
            largest = max(largest, gap)
            if gap > 1e-10 and len(sizes) == 1:
                raise Wrong(f"the first chunk ({sizes[0]} tokens, {name}) is wrong already; only what comes "
                            "after it may be.")
    with_cache, with_broken, errors = run_with_both(test, my.__file__)
    if with_cache in (4, 5):  # pytest's codes for "no such test"
        raise Wrong(f"there is no test {test}.")
    if with_cache:
        raise Wrong(f"{test} fails with the right Cache as well.")
    if not with_broken and largest > 1e-10:
        raise Wrong(f"decoding goes wrong, by up to {largest:.2g} in the logits, but {test} does not notice: "
                    "it passes with BrokenCache, too. Which test compares what you broke?")
    if not with_broken:
        raise Wrong(f"BrokenCache decodes as Cache does, in chunks of any length, and {test} passes with it.")
    if not set(errors) <= {"AssertionError", "Failed"}:
        raise Wrong(f"{test} fails because of a {errors[0]}, not because it finds something wrong.")


def run_with_both(test, file):
    """Run a test with Cache and with the BrokenCache of a file, in a process of its own.

    -> pytest's exit codes (0: passed, 1: failed), and the kinds of errors of the second run.
    """
    program = "import sys; sys.path.insert(0, 'exercises'); import check; check.swap(*sys.argv[1:])"
    file = Path(file).resolve()
    done = subprocess.run([sys.executable, "-c", program, test, file], cwd=ROOT, capture_output=True,
                          encoding="utf-8", errors="replace")
    return json.loads(done.stdout.splitlines()[-1])


def swap(test, file):
    """In the process of `run_with_both`: the tests import Cache from model.py, and find the one put there."""
    import pytest

    import model

    class Watch:
        def pytest_exception_interact(self, call):
            errors.append(call.excinfo.typename)

    codes = []
    for cache in (model.Cache, load(file).BrokenCache):
        model.Cache, errors = cache, []
        for name in [name for name in sys.modules if name.startswith("test_")]:
            del sys.modules[name]  # so that it is imported again
        codes.append(int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", test], plugins=[Watch()])))
    print("\n" + json.dumps([*codes, errors]))


def tokens_seen(mixer, t, config):
    """Which tokens' inputs make a difference to the output at token t, found by changing each."""
    x = random_x()
    changed = x + torch.eye(x.size(1), dtype=x.dtype)[..., None]  # (T, T, C): in row s, token s is another
    gap = (alone(mixer, changed, config) - alone(mixer, x, config))[:, t].abs().amax(dim=-1)
    return (~(gap < 1e-9)).nonzero()[:, 0].tolist()


@torch.no_grad()
def check_05(my):
    """A sliding window: how far a token sees, in one pass and in chunks."""
    mixer = registered(my, "SlidingWindow", "mixer", "window")
    if not isinstance(getattr(mixer, "W", None), int):
        raise Wrong("SlidingWindow needs a class attribute W, the number of tokens that are seen: W = 32.")
    for W, t in ((5, 30), (2, 30), (5, 3), (1, 30)):
        with patch.object(mixer, "W", W):
            model = small_model(mixer="window")
            seen = tokens_seen(model.blocks[0].mixer, t, model.config)
        want = list(range(max(0, t - W + 1), t + 1))
        if seen != want:
            slips = [
                (max(seen, default=0) > t, "It must not see later ones."),
                (seen == list(range(t + 1)), "Nothing is cut off."),
                (len(seen) == W + 1, "That is one too many: token t - W is just outside."),
                (len(seen) == W - 1, "That is one too few: the token itself is one of the W."),
            ]
            raise Wrong(f"with W = {W}, token {t} sees the tokens {shown(seen)} instead of {shown(want)}. "
                        + reason(slips))
    cache = Cache(48)
    small_model(mixer="window")(random_ids(), cache=cache)
    if not cache.rows:
        raise Wrong("nothing is kept for the tokens to come: keys and values must go through past.append.")
    hint = "The T queries of a chunk are the last T of the S rows so far: query 0 is token S - T, not 0."
    for W in (5, 32):
        with patch.object(mixer, "W", W):
            try_mixer("window", hint)
    for changes in ({}, {"n_kv_head": 2}):
        with patch.object(mixer, "W", 5):
            model, x = small_model(mixer="window", **changes), random_x(T=12)
            part = model.blocks[0].mixer
            try:
                y = alone(part, x, model.config)
            except RuntimeError as error:
                raise Wrong(f"with n_kv_head=2 it stops ({error}). PyTorch must be told that heads share "
                            "keys and values: see enable_gqa in causal_attention.") from None
            q, k, v = part.project(x)
            tables = PARTS["position"]["spiral"](model.config, torch.arange(12, dtype=x.dtype))
            q, k = apply_rotary(q, *tables), apply_rotary(k, *tables)
            slow = part.out(slow_attention(q[0], k[0], v[0], first=lambda t: max(0, t - 4)))
            gap = (y - slow).abs().max()
            if not gap < 1e-9:
                raise Wrong(f"each token sees the right ones, but outputs differ by {gap:.2g} from a loop's. "
                            "Are scores divided by sqrt(D), and is the softmax over the window alone?")
        with patch.object(mixer, "W", 99):
            plain = Attention(model.config, "0").double()
            plain.load_state_dict(part.state_dict())
            if not (alone(part, x, model.config) - alone(plain, x, model.config)).abs().max() < 1e-9:
                raise Wrong("a window wider than the text must give what Attention gives; it does not.")


def shown(tokens):
    """[3, 4, 5, 9] -> "3 to 5 and 9" """
    starts = [t for t in tokens if t - 1 not in tokens]
    ends = [t for t in tokens if t + 1 not in tokens]
    return " and ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in zip(starts, ends)) or "none"


@torch.no_grad()
def check_06(my):
    """QK-norm: lengths of queries and keys do not matter, and the gate still does."""
    registered(my, "GatedQKNorm", "mixer", "gated_qk_norm")
    x = random_x(T=12)

    def mixer(scale=(1, 1, 1), bias=None, **changes):
        """A mixer whose W_q, W_k, W_v are so much larger, and whose gate is the same for all tokens."""
        model = small_model(mixer="gated_qk_norm", **changes)
        part = model.blocks[0].mixer
        for weight, factor in zip(part.qkv.weight.split(part.sizes), scale):
            weight *= factor
        if bias is not None:
            part.gate[2].weight.zero_()
            part.gate[2].bias.fill_(bias)
        return part, model.config

    def output(*args, **changes):
        part, config = mixer(*args, **changes)
        return alone(part, x, config)

    def same(a, b):
        return (a - b).abs().max() < 1e-4 * b.abs().max()

    plain = output(gate=False)
    if not same(output((9, 1, 1), gate=False), plain):
        raise Wrong("to make W_q 9 times as large changes the output (gate=False): queries have no norm.")
    if not same(output((1, 9, 1), gate=False), plain):
        raise Wrong("to make W_k 9 times as large changes the output (gate=False): keys have no norm.")
    if not same(output((1, 1, 9), gate=False), 9 * plain):
        raise Wrong("9 times as large a W_v must give 9 times as large an output: values keep their length.")
    if same(output(bias=2.0), output(bias=-2.0)):
        raise Wrong("gates of 0.88 and of 0.12 give the same output: queries are normalised after the gate, "
                    "which divides it away. Norm first, then gate.")
    if not same(output((9, 1, 1)), output()):
        raise Wrong("to make W_q 9 times as large changes the output, but not with gate=False: the gate "
                    "reads the raw queries. It should read the normalised ones.")
    for changes in ({"gate": False}, {}, {"n_kv_head": 2}, {"position": "helix"},
                    {"position": "helix", "gate_after_rotary": True}):
        part, config = mixer(**changes)
        y = alone(part, x, config)
        q, k, v = (split_heads(y, part.d_head)[0] for y in part.qkv(x).split(part.sizes, dim=-1))
        tables = PARTS["position"][config.position](config, torch.arange(12, dtype=x.dtype))

        def slow(norm, after=False):
            """The formula, with a norm before the rotation (or after it)."""
            a, b = norm(q), norm(k)
            source, a, b = a, apply_rotary(a, *tables), apply_rotary(b, *tables)
            if after:
                a, b = norm(a), norm(b)
            if part.gate is not None:
                mean = (a if config.gate_after_rotary else source).mean(dim=0)  # (T, D)
                mean = torch.stack([mean[: t + 1].mean(dim=0) for t in range(12)])
                a = a * part.gate(mean).T[..., None]
            return part.out(slow_attention(a, b, v))

        by_head = lambda z: z / z.square().mean(dim=-1, keepdim=True).sqrt()
        if same(y, slow(by_head)):
            continue
        said = "".join(f" ({name}={value})" for name, value in changes.items())
        slips = [
            (slow(lambda z: z / z.square().mean(dim=(0, 2), keepdim=True).sqrt()),
             "all heads of a token are normalised together; each head should be by itself."),
            (slow(lambda z: z / z.norm(dim=-1, keepdim=True)),
             "they have length 1; after RMS normalisation the mean square is 1, the length sqrt(D)."),
            (slow(lambda z: (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True, correction=0)),
             "the mean is subtracted, as in LayerNorm; RMS normalisation only divides."),
            (slow(by_head, after=True),
             "normalise before the rotation: with helix positions that is not the same."),
        ]
        raise Wrong(f"the output is not that of a loop{said}: "
                    + reason([(same(y, other), sentence) for other, sentence in slips],
                             "compare with unit_rms, head by head."))
    for changes in ({}, {"n_kv_head": 2}):
        try_mixer("gated_qk_norm", **changes)


class Names(NoCache):
    """Remembers nothing but the names of the running sums that it was asked for."""

    def __init__(self):
        self.names = []

    def running_sum(self, name, x):
        self.names.append(name)
        return super().running_sum(name, x)


@torch.no_grad()
def check_07(my):
    """The second moment: names of the sums; what the gate reads, by a loop; no second moment, no change."""
    registered(my, "SecondMoment", "mixer", "second_moment")
    model, x = small_model(mixer="second_moment"), random_x(T=12)
    config, part = model.config, model.blocks[0].mixer
    D = config.d_head
    width = getattr(part.gate[0], "in_features", None)
    if width != 2 * D:
        raise Wrong(f"the gate's first matrix, gate[0], reads {width} numbers, not 2 D = {2 * D}.")
    memory = Names()
    model(random_ids(), cache=memory)
    twice = [name for name in memory.names if memory.names.count(name) > 1]
    if twice:
        raise Wrong(f"in one pass, several running sums have the name {twice[0]!r}. In a cache they would "
                    "overwrite each other: each sum of each layer needs a name of its own.")

    y = alone(part, x, config)
    q, k, v = (rows[0] for rows in part.project(x))  # (H, T, D) each
    tables = PARTS["position"]["spiral"](config, torch.arange(12, dtype=x.dtype))

    def slow(read):
        """The formula. read takes the queries up to a token, (H, t + 1, D), and gives what the gate reads."""
        gates = torch.stack([part.gate(torch.cat(read(q[:, : t + 1]))) for t in range(12)])  # (T, H)
        turned = apply_rotary(q, *tables) * gates.T[..., None]
        return part.out(slow_attention(turned, apply_rotary(k, *tables), v))

    def c(q):
        return q.mean(dim=0).mean(dim=0)

    def m(q):
        return q.mean(dim=0).square().mean(dim=0)

    right = slow(lambda q: (c(q), m(q)))
    if not gap_of(y, right) < 1e-9:
        raise Wrong(f"the output differs by {gap_of(y, right):.2g} from that of a loop. " + slip(y, [
            (slow(lambda q: (c(q), c(q).square())), "You square the mean, which tells the gate nothing new; "
             "m_t is the mean of the squares."),
            (slow(lambda q: (c(q), q.square().mean(dim=0).mean(dim=0))), "You square the query of each head; "
             "the mean over the heads comes first."),
            (slow(lambda q: (m(q), c(q))), "c_t and m_t have changed places."),
            (slow(lambda q: (c(q), m(q) - c(q).square())), "That is the variance, m_t less the square of "
             "c_t; the gate is to read m_t."),
            (slow(lambda q: (c(q), m(q) * q.size(1))), "m_t is a sum, not divided by the number of tokens."),
        ]))
    plain = PARTS["mixer"]["gated_spiral"](config, "0").double()
    part.gate[0].weight[:, D:] = 0
    state = part.state_dict()
    plain.load_state_dict(state | {"gate.0.weight": state["gate.0.weight"][:, :D]})
    if not gap_of(alone(part, x, config), alone(plain, x, config)) < 1e-9:
        raise Wrong("when W_1 has zeros for m_t, it must be GatedSpiralAttention; it is not.")
    for changes in ({}, {"n_kv_head": 2}):
        try_mixer("second_moment", "Does each sum of each layer have a name of its own?", **changes)


def check_08(my):
    """A spiral for each layer: at first the usual one; then, with other alphas, by a loop over layers."""
    registered(my, "LearnedSpiral", "mixer", "learned_spiral")
    plain, ids = small_model(alpha=0.25), random_ids()
    config = replace(plain.config, mixer="learned_spiral")
    model = LanguageModel(config).double()
    model.load_state_dict(plain.state_dict(), strict=False)  # all but the alphas
    alphas = [p for name, p in model.named_parameters() if name.endswith(".alpha")]
    if len(alphas) != 2 or any(alpha.numel() != 1 for alpha in alphas):
        raise Wrong(f"a model of 2 layers has {len(alphas)} parameters called alpha: each mixer needs a "
                    "self.alpha that is an nn.Parameter of one number. (A mere tensor is not trained.)")
    if any(alpha.item() != 0.25 for alpha in alphas):
        raise Wrong(f"with config.alpha = 0.25, alpha starts at {alphas[0].item():.4g}; it should be 0.25.")
    with torch.no_grad():
        spiral = plain(ids)[0]
        gap = gap_of(model(ids)[0], spiral)
    if not gap < 1e-10:
        raise Wrong(f"at first, the logits must be those of gated_spiral; they differ by {gap:.2g}. "
                    + ("So little is rounding: compute the angles in float64." if gap < 1e-3 else
                       "Is all but the tables as in GatedSpiralAttention, and are they spiral_rotary's?"))
    model(ids, ids)[1].backward()
    if any(alpha.grad is None or alpha.grad == 0 for alpha in alphas):
        raise Wrong("no gradient reaches alpha, so it would never learn. Calculate with the tensor itself: "
                    "float(alpha), alpha.item(), alpha.data and torch.tensor(alpha) cut it off.")

    with torch.no_grad():
        x = plain.embedding(ids)
        for alpha, value, block in zip(alphas, (0.5, -0.125), plain.blocks):
            alpha.fill_(value)
            tables = PARTS["position"]["spiral"](replace(config, alpha=value), torch.arange(40.0).double())
            x = block(x, tables, NoCache())
        logits, right = model(ids)[0], plain.norm(x) @ plain.embedding.weight.T
    if not gap_of(logits, right) < 1e-10:
        raise Wrong("with alpha = 0.5 in the first layer and -0.125 in the second, the logits differ by "
                    f"{gap_of(logits, right):.2g} from those of these two spirals. " + slip(logits, [
                        (spiral, "They have not changed at all: do you turn by the tables you are given?")]))
    for changes in ({}, {"n_kv_head": 2}):
        try_mixer("learned_spiral", "The first token of a chunk is number past.length, not 0.", **changes)


@torch.no_grad()
def check_09(my):
    """A decayed sum: by a loop over tokens; in chunks; without decay it is Hydra; long texts in float32."""
    part = registered(my, "DecayedHydra", "mixer", "decayed_hydra")
    if not isinstance(getattr(part, "decay", None), float) or not 0 < part.decay < 1:
        raise Wrong("DecayedHydra needs a class attribute decay, a number between 0 and 1: decay = 0.9.")
    d = 0.9

    def q_k_v(T, D=6):
        return torch.randn(3, 1, T, 2, D, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def sums_of(mixer, *q_k_v):  # the heads of a mixer are (B, H, T, D); here (B, T, H, D)
        return mixer.sum_heads(*(y.transpose(1, 2) for y in q_k_v), NoCache()).transpose(1, 2)

    def slow(q, k, v, above=d, below=d):
        """The formula as a recurrence; above and below are the decays of the two sums."""
        weight, weighted, total, out = unit_rms(k).exp(), 0, 0, []
        for t in range(q.size(1)):
            weighted = above * weighted + weight[:, t] * v[:, t]
            total = below * total + weight[:, t]
            out.append(unit_rms(q[:, t]).sigmoid() * weighted / (total + 1e-6))
        return torch.stack(out, dim=1)

    with patch.object(part, "decay", d):
        q, k, v = q_k_v(12)
        got, right = sums_of(small_model(mixer="decayed_hydra").blocks[0].mixer, q, k, v), slow(q, k, v)
        growth = d ** -torch.arange(12.0).double()[:, None, None]
        if not (gap := gap_of(got, right)) < 1e-9:
            above, below = slow(q, k, v, d, 1), slow(q, k, v, 1, d)
            slips = [
                (right, "So little is the epsilon: when numerator and denominator are multiplied by d^-t, so "
                 "is the 1e-6."),
                (slow(q, k, v, 1, 1), "There is no decay."),
                (above, "The sum in the denominator does not decay: both must."),
                (above * growth, "The sum in the denominator does not decay: both must."),
                (below, "The sum in the numerator does not decay: both must."),
                (below / growth, "The sum in the numerator does not decay: both must."),
                (slow(q, k, v, 1 / d, 1 / d), "It decays the wrong way: old tokens weigh more than new ones. "
                 "d^(t-s) is d^t times d^-s, so token s enters the sums with d^-s."),
            ]
            raise Wrong(f"sum differs by {gap:.2g} from the formula (d = {d}). " + slip(got, slips, 1e-4))
        try_mixer("decayed_hydra", "Tokens count from the beginning of the text: the first of a chunk is "
                  "number past.length, not 0.")
    with patch.object(part, "decay", 1.0):
        model, hydra = small_model(mixer="decayed_hydra"), small_model(mixer="hydra")
        model.load_state_dict(hydra.state_dict())
        if not gap_of(model(random_ids())[0], hydra(random_ids())[0]) < 1e-10:
            raise Wrong("with decay = 1.0 it must be HydraAttention; it is not. Does it read self.decay?")

    long = [(d, context) for context in (*range(700, 900, 20), 8192)]
    for decay, context in ((d, 256), (1.0, 8192), (0.5, 256), *long):
        with patch.object(part, "decay", decay):
            try:
                mixer = part(ModelConfig(context=context, n_head=4, d_head=16, mixer="decayed_hydra"), "0")
            except ValueError as error:
                if (decay, context) in ((d, 256), (1.0, 8192)):
                    raise Wrong(f"it refuses a context of {context} with decay = {decay}: {error} But float32"
                                f" can hold {decay}^-{context}, which is {decay**-context:.0e}.") from None
                continue
            q, k, v = q_k_v(context, D=16)
            k[..., 0], k[..., 1:] = 1, 0  # n(k) is now sqrt(D) in one coordinate, as large as it can be
            got = sums_of(mixer, q.float(), k.float(), v.float()).double()
        if not gap_of(got, slow(q, k, v, decay, decay)) < 1e-4:
            raise Wrong(f"in float32, at a context of {context} with decay = {decay}, results are "
                        + ("off" if got.isfinite().all() else "not finite") + ": __init__ must refuse, with "
                        "a ValueError, a config.context at which the sums of d^-s exp(n(k_s)) can overflow.")


def check_10(my):
    """A model that sees the future: its summaries, its loss below the floor, and how it decodes."""
    cls, train, measure = (need(my, name) for name in ("MeanPooled", "train", "measure"))
    honest, ids, count = small_model(mixer="cross_layer", phi=0.0), random_ids(), torch.arange(1, 41)
    model = cls(honest.config).double()
    model.load_state_dict(honest.state_dict())

    def with_summaries(summary):
        with patch("model.running_mean", lambda past, name, x: summary(x).expand_as(x)):
            return honest(ids)[0]

    with torch.no_grad():
        logits, running = model(ids)[0], honest(ids)[0]
        pooled = with_summaries(lambda x: x.mean(dim=1, keepdim=True))
        divided = with_summaries(lambda x: x.mean(dim=1, keepdim=True) / count[:, None])
        if not gap_of(logits, pooled) < 1e-9:
            raise Wrong(f"the logits of MeanPooled differ by {gap_of(logits, pooled):.2g} from those with "
                        "the mean over all tokens. " + slip(logits, [
                            (running, "They are those of LanguageModel: its summaries are running means."),
                            (divided, "running_mean divides what running_sum returns by the number of "
                             "tokens so far; allow for that."),
                        ]))
        gap = gap_of(in_chunks(model, ids, [1] * 40, Cache(48)), running)
        if not gap < 1e-9:
            raise Wrong(f"fed one token at a time, with a Cache, its logits differ by {gap:.2g} from "
                        "LanguageModel's. At each step all tokens are those so far: the usual running mean.")

    model = train()
    if not isinstance(model, cls):
        raise Wrong(f"train() must return a trained MeanPooled, not {type(model).__name__}.")
    if (model.config.vocab_size, model.config.context) != (8, 8):
        raise Wrong(f"train() returns a model with vocab_size={model.config.vocab_size} and "
                    f"context={model.config.context}; both must be 8.")
    fresh, floor = torch.randint(8, (512, 9), generator=torch.Generator().manual_seed(4)), math.log(8)
    x, y = fresh[:, :-1], fresh[:, 1:]
    with torch.no_grad():
        logits, loss = model.eval()(x, y)
        steps = in_chunks(model, x, [1] * 8, Cache(8))
        decoded = torch.nn.functional.cross_entropy(steps.flatten(0, 1), y.flatten()).item()
    if not loss < floor - 0.05:
        raise Wrong(f"on new random tokens, the trained model has a loss of {loss:.3f}; it is to be 0.05 "
                    f"below the floor, ln 8 = {floor:.3f}. "
                    + ("It knows its training windows by heart: draw new ones for each step."
                       if loss > floor + 0.1 else
                       "Try more steps, a higher learning rate, or phi=0: sigmoid(phi) is the share that "
                       "the summaries get at first."))
    try:
        below, mismatch = map(float, measure(model, fresh))
    except (TypeError, ValueError):
        raise Wrong("measure(model, idx) must return two numbers: nats below the floor, mismatch.") from None
    if not abs(below - (floor - loss)) < 1e-4:
        raise Wrong(f"measure says that the loss is {below:.4f} below the floor; it is {floor - loss:.4f}, "
                    f"ln 8 = {floor:.4f} less a loss of {loss:.4f}.")
    if not math.isclose(mismatch, gap_of(logits, steps), rel_tol=1e-3):
        raise Wrong(f"measure says that the logits differ by {mismatch:.4g} when decoded step by step; they "
                    f"differ by up to {gap_of(logits, steps):.4g}. " + (
                        "Feed one token at a time, model(token, cache=cache), with one Cache for all of them."
                        if mismatch < 1e-3 else "It is the largest absolute difference of all."))
    print(f"The floor is {floor:.3f} nats. In full passes the loss is {loss:.3f}, {below:.3f} below it; "
          f"decoded step by step it is {decoded:.3f}, and logits are off by up to {mismatch:.1f}.")


def check_11(my):
    """Merging: not when decoding, not where nothing is similar; fewer tokens, no later ones; by a loop."""
    registered(my, "CausalMerging", "block", "causal_merging")
    for mixer in ({"mixer": "gated_spiral"}, {"mixer": "cross_layer", "n_kv_head": 2, "phi": 0.0}):
        changes = {"n_layer": 3, "token_merging": "paper", "merge_threshold": 0.0} | mixer
        model, plain = small_model(block="causal_merging", **changes), small_model(**changes)
        try:
            plain.load_state_dict(model.state_dict())
        except RuntimeError:
            raise Wrong("CausalMerging must have the parameters of MergingBlock, and no others.") from None
        try_merging(model, plain, f" (mixer={mixer['mixer']})")


@torch.no_grad()
def try_merging(model, plain, case):
    """What exercise 11 asks of a model whose middle layer merges; plain is the same with a MergingBlock."""
    B, T, C, ids = 3, 24, 24, random_ids(B=3, T=24)
    logits = plain.eval()(ids)[0]
    if not gap_of(model.eval()(ids)[0], logits) < 1e-10:
        raise Wrong(f"in eval mode nothing may merge; the logits are not those of a PreNormBlock{case}.")
    if not gap_of(in_chunks(model.train(), ids, [1, 7, T - 8], Cache(48)), logits) < 1e-10:
        raise Wrong(f"with a cache nothing may merge, not even in training mode{case}.")

    block, tables = model.blocks[1], model.rotary(0, T)  # from here on this layer alone, in training mode
    x, other = torch.randn(2, B, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    given = []  # how many tokens the mixer was given, in each call
    block.mixer.register_forward_pre_hook(lambda mixer, args: given.append(args[0].size(1)))

    def summaries_of(x):
        return [running_mean(NoCache(), "", x)] if model.lookback else []

    def run(block, x):
        return block(x, tables, NoCache(), summaries_of(x))

    def slow(chosen, chosen_summary=None):
        """Row by row. chosen takes vectors (T, C) and the pairs, lists of one or two tokens, -> (M, C)."""
        h, rows = block.norm_1(x), []
        for b, marks in enumerate(block.find_pairs(h, block.merge_threshold).tolist()):
            pairs = []
            for t, second in enumerate(marks):
                pairs[-1:] = [[*pairs[-1], t]] if second else [*pairs[-1:], [t]]
            summaries = [(chosen_summary or chosen)(summary[b], pairs)[None] for summary in summaries_of(x)]
            tables_here = [table[: len(pairs)] for table in tables]
            mixed = block.mixer(chosen(h[b], pairs)[None], tables_here, NoCache(), summaries)[0]  # (M, C)
            rows.append(torch.stack([y for y, pair in zip(mixed, pairs) for _ in pair]))  # (T, C)
        mixed = x + torch.stack(rows)
        return mixed + block.ffn(block.norm_2(mixed))

    def first(y, pairs):
        return y[[pair[0] for pair in pairs]]

    def last(y, pairs):
        return y[[pair[-1] for pair in pairs]]

    def average(y, pairs):
        return torch.stack([y[pair].mean(dim=0) for pair in pairs])

    got, ratio = run(block, x), float(block.merge_ratio)
    share = block.find_pairs(block.norm_1(x), block.merge_threshold).double().mean().item()
    if min(given, default=T) == T:
        raise Wrong(f"in training mode the mixer is given all {T} tokens, though {share:.0%} are marked as "
                    f"second of a pair: nothing merges{case}. Is find_pairs given self.merge_threshold?")
    for t in range(1, T):
        changed = torch.cat([x[:, :t], other[:, t:]], dim=1)  # the tokens before t are the same
        leak = gap_of(run(block, changed)[:, :t], got[:, :t])
        if not leak < 1e-10:
            said = slip(got, [
                (slow(average, last), "A pair is still the average of both its tokens."),
                (slow(average, first), "A pair is still the average of both its tokens."),
                (slow(last), "A pair is represented by its second token."),
                (slow(first, last), "The summaries are those of the second token."),
                (slow(first, average), "The summaries are averages over the pair."),
            ]) or ("What goes in for a pair must be its first token, whatever the second is. (Averaged with "
                   "zeros it is halved; roll(1, dims=1), not -1, brings a token the one before it.) And does "
                   "a token decide by the next one whether it merges?")
            raise Wrong(f"in training mode, to change token {t} and those after it changes outputs before "
                        f"it by {leak:.2g}{case}. {said}")
    if not gap_of(got, slow(first)) < 1e-9:
        raise Wrong(f"no token sees a later one, but the output differs by {gap_of(got, slow(first)):.2g} "
                    f"from that of a loop in which a pair goes through the mixer as its first token, and "
                    f"both get the result{case}. find_pairs and the mixer are given the same h, the normed "
                    "input; and are `summaries` handed on, as they should be for a pair?")
    if not abs(ratio - share) < 1e-6:
        raise Wrong(f"merge_ratio is {ratio:.3f} after a pass that merged {share:.3f} of "
                    "the tokens; train.py reports it.")
    block.merge_threshold = 1.0
    if not gap_of(run(block, x), run(plain.blocks[1], x)) < 1e-10:
        raise Wrong(f"at a threshold of 1, where nothing is similar, it is not a PreNormBlock{case}.")


def check_12(my):
    """Another trainer: each merge is the best by count times length; and was the effect foreseen?"""
    train, prediction, n_merges = need(my, "train_variant"), need(my, "PREDICTION"), 140
    if not isinstance(prediction, (int, float)):
        raise Wrong("PREDICTION must be a number: 0.5 for 50% more tokens, -0.5 for 50% fewer.")
    counts = tokenizer.count_chunks(text for text, _ in storybook.stories(1000, seed=2))
    merges = train(counts.copy(), n_merges)

    def spell(token):
        return "".join(tokenizer.BYTE_TO_CHAR[byte] for byte in token)

    try:
        spelt = [(spell(a), spell(b)) for a, b in merges]
    except (TypeError, ValueError, IndexError):
        spelt = []
    if len(spelt) != n_merges:
        raise Wrong(f"train_variant(counts, {n_merges}) must return a list of {n_merges} pairs of bytes, "
                    "(left, right), in the order in which they are merged.")

    words = [([bytes([byte]) for byte in chunk.encode("utf-8")], n) for chunk, n in counts.items()]
    for number, (a, b) in enumerate(merges, 1):
        pairs = Counter()
        for word, n in words:
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        scores = {(a, b): 0} | {(x, y): n * len(x + y) for (x, y), n in pairs.items()}
        best = max(scores, key=scores.get)
        if scores[a, b] != scores[best]:
            usual = "That is the standard trainer's choice. " if pairs[a, b] == max(pairs.values()) else ""
            raise Wrong(f"merge {number} joins {a} and {b}. {usual}By count times length their score is "
                        f"{scores[a, b]:,}, {best[0]} and {best[1]} have {scores[best]:,}.")
        words = [(join_pair(word, a, b), n) for word, n in words]

    tokens = [*tokenizer.BYTE_TO_CHAR, *map("".join, spelt)]
    standard = tokenizer.train_bpe(counts, 256 + n_merges, specials=())
    variant = tokenizer.Tokenizer({token: id for id, token in enumerate(tokens)}, spelt, {})
    by_count, by_score = (sum(len(t.encode(text)) for text, _ in storybook.stories(200, seed=3)) / 200
                          for t in (standard, variant))
    effect = by_score / by_count - 1
    print(f"Tokens per story: {by_count:.1f} by count, {by_score:.1f} by count times length. You predicted "
          f"a change of {prediction:+.1%}.")
    if prediction * effect <= 0:
        raise Wrong("the merges are right, but the effect has the other sign. How many tokens does one "
                    "merge save, and what has the length of the new token to do with it?")
    if not 1 / 4 < prediction / effect < 4:
        raise Wrong("the merges are right, and the sign, but the effect is more than four times as "
                    f"{'small' if prediction > effect else 'large'} as predicted. How many merges do the "
                    "two share?")


def join_pair(word, a, b):
    """The tokens of a word, with each a, b side by side joined, from the left."""
    joined, t = [], 0
    while t < len(word):
        step = 2 if word[t : t + 2] == [a, b] else 1
        joined.append(b"".join(word[t : t + step]))
        t += step
    return joined


LETTERS, USER, ASSISTANT, END = 8, 8, 9, 10


def talk(n):
    """The conversations of exercise 13: (n, 24)."""
    letters = torch.randint(LETTERS, (n, 2, 4))
    user, assistant, end = (torch.full((n, 2, 1), mark) for mark in (USER, ASSISTANT, END))
    return torch.cat([user, letters, end, assistant, letters, end], dim=2).flatten(1)


def check_13(my):
    """The loss mask: by hand, then the lowest losses, then what two models have learned."""
    try_mask(need(my, "mask"))
    floors, train = need(my, "floors")(), need(my, "train")
    true = 0.0, 8 * math.log(LETTERS) / 23  # of the 23 targets, the user's 8 letters are drawn
    told = {0: {math.log(LETTERS): "What the assistant says is what the user has just said. "},
            1: {math.log(LETTERS): "Not every token is drawn. ",
                8 * math.log(LETTERS) / 24: "A row of 24 ids has 23 targets: nothing predicts the first. ",
                math.log(LETTERS) / 2: "The marks are targets, too, and certain. "}}
    for i, of in enumerate(("the assistant's tokens", "all 23 targets")):
        if not (isinstance(floors, tuple) and len(floors) == 2):
            raise Wrong("floors() must return two numbers.")
        if abs(floors[i] - true[i]) > 1e-3:
            known = next((s for value, s in told[i].items() if abs(floors[i] - value) < 1e-3), "")
            raise Wrong(f"floors() says {floors[i]:.4f} for {of}. {known}Which of them can be foretold by a "
                        "model that knows all about these conversations, and how many are there in all?")
    losses = []
    for user_counts, kind in ((False, "the assistant's tokens alone"), (True, "all tokens")):
        answers, letters = losses_of(train(user_counts))
        losses.append(letters)
        print(f"Trained on {kind}: a loss of {answers:.3f} on the assistant's, {letters:.3f} on the user's.")
        if answers > 0.1:
            raise Wrong(f"the model trained on {kind} has a loss of {answers:.3f} on the assistant's in "
                        "other conversations; it can come below 0.1. Try more steps, a higher learning rate.")
    if losses[0] < losses[1] + 0.5:
        raise Wrong("both models know the user's letters as well as one another: does train use the mask?")
    if losses[1] > math.log(LETTERS) + 0.2:
        raise Wrong(f"the model trained on all tokens has a loss of {losses[1]:.3f} on the user's letters, "
                    f"and not the {math.log(LETTERS):.3f} that can be reached: does train(True) count them?")


def try_mask(mask):
    """Is each target counted, or not, as in a loop over the ids?"""
    torch.manual_seed(0)
    rows = talk(3)
    rows[1] = rows[0].roll(-8)  # from the middle of the assistant's turn
    rows[2, 12:] = torch.tensor([END, 1, USER, 2, END, ASSISTANT, END, ASSISTANT, 3, USER, 4, ASSISTANT])
    inputs, targets = rows[:, :-1], rows[:, 1:]
    before = inputs.clone(), targets.clone()
    wanted = torch.full_like(targets, -100)
    for row, (ids, nexts) in enumerate(zip(inputs.tolist(), targets.tolist())):
        latest = None
        for t, id in enumerate(ids):
            latest = id if id in (USER, ASSISTANT, END) else latest
            if latest == ASSISTANT:
                wanted[row, t] = nexts[t]
    got = {True: mask(inputs, targets, True), False: mask(inputs, targets, False)}
    if not (torch.equal(inputs, before[0]) and torch.equal(targets, before[1])):
        raise Wrong("mask changes its arguments: the caller still needs them.")
    if not torch.equal(got[True], targets):
        raise Wrong("with user_counts=True every target counts, so that mask returns them as they are.")
    if got[False].shape == targets.shape and torch.equal(got[False], wanted):
        return
    if got[False].shape != targets.shape or not ((got[False] == -100) | (got[False] == targets)).all():
        raise Wrong(f"mask must return the targets, of shape {tuple(targets.shape)}, with -100 for some.")
    row, t = (got[False] != wanted).nonzero()[0].tolist()
    known = {ASSISTANT: "The mark that begins its turn is put there by whoever asks, not by the assistant. ",
             END: "The END of its own turn is the assistant's to say, and no other END. "}
    counts = "does not count" if got[False][row, t] == -100 else "counts"
    raise Wrong(f"of the ids {rows[row].tolist()} the target number {t}, {targets[row, t]}, {counts}. "
                + known.get(targets[row, t].item(), "Whose turn it is, the latest mark among the inputs up "
                                                    "to there says; before the first mark nothing counts."))


@torch.no_grad()
def losses_of(model):
    """The mean losses of a model on what the assistant says, and on the user's letters."""
    torch.manual_seed(0)
    rows = talk(256)
    loss = -model.eval()(rows[:, :-1])[0].log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0].view(256, 23)
    loss = torch.cat([torch.zeros(256, 1), loss], dim=1).view(256, 2, 12).mean(dim=(0, 1))
    return loss[7:].mean().item(), loss[1:5].mean().item()


@torch.no_grad()
def check_14(my):
    """A trained model, questioned: the head that copies names, and a token at which the gate matters."""
    place, before = need(my, "HEAD"), need(my, "BEFORE")
    path = Path(need(my, "CHECKPOINT"))
    try:
        checkpoint = load_checkpoint(path)
    except ValueError as error:
        raise Wrong(f"{error} The exercise is about config/tiny.py, trained to the end.") from None
    trained, tokens = load_model(checkpoint).eval(), checkpoint_tokenizer(checkpoint, path)
    layers, H = trained.config.n_layer, trained.config.n_head
    if place not in [(layer, head) for layer in range(layers) for head in range(H)]:
        raise Wrong(f"HEAD must be (layer, head); there are {layers} layers of {H} heads, counted from 0.")
    layer, head = place
    names = {id for name in storybook.GIRLS + storybook.BOYS for id in tokens.encode(f" {name}")[:1]}
    shares = []  # for each name that comes back: its share of what the heads read one token before
    for text, _ in storybook.stories(20, seed=5):
        ids = [tokens.end_of_text, *tokens.encode(text)][: trained.config.context]
        weights = figures.attention(trained, torch.tensor([ids]))  # (layers, H, T, T)
        for t, coming in enumerate(ids[1:]):
            earlier = [s for s in range(t + 1) if ids[s] == coming]
            if coming in names and earlier:
                shares.append(weights[:, :, t, earlier].sum(dim=-1))
    share = torch.stack(shares).mean(dim=0)
    if not share[layer, head] > 0.8 * share.max():
        raise Wrong(f"where a name is about to come back, head {head} of layer {layer} gives its earlier "
                    f"mentions {share[layer, head]:.0%} of its attention, on average over 20 stories; there "
                    f"is a head that gives them {share.max():.0%}. Choose the token before a name in the "
                    "page, and look from head to head.")
    idx = torch.tensor([[tokens.end_of_text, *tokens.encode(before)]])
    if idx.size(1) > trained.config.context:
        raise Wrong(f"BEFORE has {idx.size(1) - 1} tokens, more than the context.")
    with_gate = trained(idx, last_only=True)[0][0, -1].softmax(dim=-1)
    for gate in figures.gate_modules(trained):
        gate.register_forward_hook(lambda gate, inputs, g: torch.ones_like(g))
    change = (trained(idx, last_only=True)[0][0, -1].softmax(dim=-1) - with_gate).abs().max()
    if not change >= 0.1:
        raise Wrong(f"behind BEFORE, with all gates at 1, no probability changes by more than {change:.1%}; "
                    "10% is asked for. In the page, switch to gate = 1 and back: which colours change? "
                    "BEFORE is the text up to the token before that one, as the model was told it.")


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
        sys.exit("error: say the number of an exercise, 1 to 14, and the file with your answer: "
                 "python exercises/check.py 5 my_05.py")
    number, path = arguments[0].zfill(2), Path(arguments[1])
    if not path.is_file():
        sys.exit(f"error: there is no file {path}.")
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
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
