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
from pathlib import Path
from unittest.mock import patch

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from model import PARTS, Attention, Cache, LanguageModel, ModelConfig, NoCache, apply_rotary, split_heads


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


# ----------------------------------------------------------------------------------------------------------
# The checks


def reason(slips, otherwise=""):
    """The sentence of the first slip, a pair (is it so?, sentence), that was made."""
    return next((sentence for so, sentence in slips if so), otherwise)


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
            budget = LanguageModel(config).budget(length)
        with patch.object(torch.nn.Module, "__init__", refuse):
            got = count(config), cache_bytes(config, length), state_bytes(config)
        n, V, C, F = config.n_layer, config.vocab_size, config.d_model, config.d_ff
        H, K, D = config.n_head, config.kv_heads, config.head_width
        case = f"ModelConfig({', '.join(f'{name}={value}' for name, value in changes.items())})"

        size, gate = sum(budget["parameters"].values()), D * H + H * H + H
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
        cache = budget["cache_bytes"]
        compare(f"cache_bytes({case}, {length})", got[1], cache, {
            cache // 2: "That is half of it: keys and values are both kept, at 4 bytes for each number.",
            cache // 4: "A number in float32 has 4 bytes.",
            cache // n: "Every layer has rows of its own.",
            cache * H // K: f"The cache keeps the K = {K} heads of the keys and values, not H = {H}.",
        })
        state = budget["state_bytes"]
        compare(f"state_bytes({case})", got[2], state, {
            state // 4: "A number in float32 has 4 bytes.",
            state // n: "Every layer has a sum of its own.",
            state * H: "The sum is of the mean of all heads' queries: D numbers, not H D.",
            n * D * 4: "With gate=False there is no running sum.",
        })


def check_02(my):
    """Standard rotary is the spiral of alpha 0; and the alpha that gives the slowest pair a turn more."""
    standard, alpha_of_a_turn = need(my, "standard_rotary"), need(my, "alpha_of_a_turn")
    position = torch.arange(5, 45, dtype=torch.float64)
    for changes in ({}, {"rope_base": 500.0}, {"d_head": 6, "rope_base": 1e6}):
        config = ModelConfig(alpha=0.3, **changes)
        half, base = config.head_width // 2, config.rope_base
        tables = standard(config, position)
        if not (isinstance(tables, (tuple, list)) and len(tables) == 2 and all(map(torch.is_tensor, tables))):
            raise Wrong("standard_rotary must return two tensors, the cosines and the sines.")
        if config != ModelConfig(alpha=0.3, **changes):
            raise Wrong("standard_rotary changes the config that it is given; others still need it.")
        T = len(position)
        for table in tables:
            if table.shape != (T, half):
                raise Wrong(f"for {T} positions and heads of width {2 * half} a table has the shape "
                            f"{(T, half)}, a column for each pair; not {tuple(table.shape)}.")
        tables = torch.stack(list(tables)).double()

        def fits(frequency, scale=1.0, tolerance=1e-9):
            angle = position[:, None] * torch.as_tensor(frequency, dtype=torch.float64) * scale
            return (tables - torch.stack([angle.cos(), angle.sin()])).abs().max() < tolerance

        i = torch.arange(half, dtype=torch.float64)
        right = base ** (-i / half)
        if fits(right):
            continue
        degrees = "angles are in radians: nothing is to be converted from or into degrees."
        exponent = "the exponent is -2i/D, and D is the width of the head, twice the number of pairs."
        slips = [
            (fits(right * (1 + 0.3 * ((i + 1) / half).sqrt())), "it is still the spiral: it reads alpha."),
            (fits(10000 ** (-i / half)), "the base is config.rope_base, which is not always 10000."),
            (fits(base ** (-i / (2 * half))) or fits(base ** (-2 * i / half)), exponent),
            (fits(base ** (-(i + 1) / half)), "pairs count from i = 0: the fastest turns by 1 a token."),
            (fits(base ** (i / half)), "the exponent is negative: later pairs turn more slowly."),
            (fits(right, 180 / math.pi) or fits(right, math.pi / 180), degrees),
            (fits(right, 2 * math.pi), "the angle is position times frequency, without 2 pi."),
            (fits(right, -1.0), "it turns the other way: the sines have the wrong sign."),
            (fits(right, tolerance=1e-3), "it is rounded: compute in the type of `position`, here float64."),
        ]
        tables = tables.flip(0)
        slips += [(fits(right), "sines and cosines have changed places.")]
        raise Wrong(f"standard_rotary differs from the spiral of alpha 0 (rope_base={base:g}): "
                    + reason(slips, "see the formula of spiral_rotary."))

    for changes, distance in (({}, 1024), ({}, 100), ({"d_head": 6, "rope_base": 500.0, "alpha": 0.3}, 7)):
        config = ModelConfig(**changes)
        half, base = config.head_width // 2, config.rope_base
        slowest = base ** (-(half - 1) / half)
        right = 2 * math.pi / (distance * slowest)
        got = float(alpha_of_a_turn(config, distance))
        slips = [
            (360 / (distance * slowest), "a full turn is 2 pi: angles are in radians, not degrees."),
            (2 * math.pi / distance * half**0.5, "that is for the fastest pair, i = 0; the last is slowest."),
            (2 * math.pi * base / distance, "the slowest pair is i = D/2 - 1: there is none with i = D/2."),
            (right - 1, "that is a full turn in all; asked is one more than standard rotary makes."),
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
        out = sample(logits, temperature, min_p, generator=generator)
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
    """[3, 4, 5] -> "3 to 5" """
    whole = tokens and tokens == list(range(tokens[0], tokens[-1] + 1))
    return f"{tokens[0]} to {tokens[-1]}" if whole else str(tokens)


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
