"""
Is my answer right?

    python exercises/check.py 5 my_05.py

loads the file, puts it through the checks of exercise 5 and says "right", or what is wrong. README.md beside
this file has the exercises. A check is the function `check_NN(my)` below, where `my` is the learner's file as
a module; it raises Wrong with a sentence that says what was expected and what came instead.
"""

import importlib.util
import math
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
from model import (PARTS, Cache, LanguageModel, ModelConfig, NoCache, apply_rotary, running_mean,  # noqa: E402
                   unit_rms)


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


def gap_of(a, b):
    """The largest difference of two tensors, a result and what it should be."""
    if a.shape != b.shape:
        raise Wrong(f"a result has the shape {tuple(a.shape)}; it should have {tuple(b.shape)}.")
    return (a - b).abs().max().item()


def slip(got, slips, tolerance=1e-9):
    """What to say of a wrong result: the sentence of the first of slips, (value, sentence), that gives it."""
    return next((sentence for value, sentence in slips if gap_of(got, value) < tolerance), "")


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
    D = config.head_width
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
        got, right = small_model(mixer="decayed_hydra").blocks[0].mixer.sum(q, k, v, NoCache()), slow(q, k, v)
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

    for context in (256, 8192):
        with patch.object(part, "decay", d):
            try:
                mixer = part(ModelConfig(context=context, n_head=4, d_head=16, mixer="decayed_hydra"), "0")
            except ValueError as error:
                if context == 256:
                    raise Wrong(f"it refuses a context of 256 (decay = 0.9): {error} But 0.9^-256 is 5e11, "
                                "which float32 can hold.") from None
                continue
            q, k, v = q_k_v(context, D=16)
            got, right = mixer.sum(q.float(), k.float(), v.float(), NoCache()).double(), slow(q, k, v)
        if not gap_of(got, right) < 1e-4:
            raise Wrong(f"in float32, at a context of {context} (decay = 0.9), results are "
                        + (f"off by {gap_of(got, right):.2g}" if got.isfinite().all() else "not finite")
                        + ": __init__ must refuse a config.context that is too long, with a ValueError.")


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
            raise Wrong("CausalMerging must have the parameters of PreNormBlock, and no others.") from None
        try_merging(model, plain, f" (mixer={mixer['mixer']})")


@torch.no_grad()
def try_merging(model, plain, case):
    """What exercise 11 asks of a model whose middle layer merges; plain is the same with PreNormBlock."""
    B, T, C, ids = 3, 24, 24, random_ids(B=3, T=24)
    logits = plain.eval()(ids)[0]
    if not gap_of(model.eval()(ids)[0], logits) < 1e-10:
        raise Wrong(f"in eval mode nothing may merge; the logits are not those of PreNormBlock{case}.")
    if not gap_of(in_chunks(model.train(), ids, [1, 7, T - 8], Cache(48)), logits) < 1e-10:
        raise Wrong(f"with a cache nothing may merge, not even in training mode{case}.")

    block, tables = model.blocks[1], model.rotary(0, T)  # from here on this layer alone, in training mode
    x, other = torch.randn(2, B, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    given = []  # how many tokens the mixer was given, in each call
    block.mixer.register_forward_pre_hook(lambda mixer, args: given.append(args[0].size(1)))

    def below(x):
        return [running_mean(NoCache(), "", x)] if model.config.layers_below else []

    def run(block, x):
        return block(x, tables, NoCache(), below(x))

    def slow(chosen, chosen_below=None):
        """Row by row. chosen takes vectors (T, C) and the pairs, lists of one or two tokens, -> (M, C)."""
        h, rows = block.norm_1(x), []
        for b, marks in enumerate(block.find_pairs(h, block.merge_threshold).tolist()):
            pairs = []
            for t, second in enumerate(marks):
                pairs[-1:] = [[*pairs[-1], t]] if second else [*pairs[-1:], [t]]
            summaries = [(chosen_below or chosen)(summary[b], pairs)[None] for summary in below(x)]
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
                    f"second of a pair: nothing merges{case}.")
    for t in range(1, T):
        changed = torch.cat([x[:, :t], other[:, t:]], dim=1)  # the tokens before t are the same
        leak = gap_of(run(block, changed)[:, :t], got[:, :t])
        if not leak < 1e-10:
            reason = slip(got, [
                (slow(average, last), "A pair is still the average of both its tokens."),
                (slow(average, first), "A pair is still the average of both its tokens."),
                (slow(last), "A pair is represented by its second token."),
                (slow(first, last), "The summaries of the layers below are those of the second token."),
                (slow(first, average), "The summaries of the layers below are averages over the pair."),
            ]) or "Does a token decide by the next one whether it merges?"
            raise Wrong(f"in training mode, to change token {t} and those after it changes outputs before "
                        f"it by {leak:.2g}{case}. {reason}")
    if not gap_of(got, slow(first)) < 1e-9:
        raise Wrong(f"no token sees a later one, but the output differs by {gap_of(got, slow(first)):.2g} "
                    f"from that of a loop in which a pair goes through the mixer as its first token, and "
                    f"both get the result{case}.")
    if not abs(ratio - share) < 1e-6:
        raise Wrong(f"merge_ratio is {ratio:.3f} after a pass that merged {share:.3f} of "
                    "the tokens; train.py reports it.")
    block.merge_threshold = 1.0
    if not gap_of(run(block, x), run(plain.blocks[1], x)) < 1e-10:
        raise Wrong(f"at a threshold of 1, where nothing is similar, it is not PreNormBlock{case}.")


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
