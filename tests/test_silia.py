"""The promises of Silia: size, a slow twin, what its heads remember, precision, the sink, the recipe."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from support import settings
import train
from model import Cache, LanguageModel, ModelConfig, NoCache, unit_rms
from test_model import SILIA, ids, make
from support.report import budget
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent


def published():
    return settings.read_settings([str(ROOT / "config" / "silia.py")], TrainConfig, ModelConfig)[1]


# ----------------------------------------------------------------------------------------- sizes and parts


def test_the_published_shape_has_524672_parameters_in_31_tensors():
    with torch.device("meta"):
        model = LanguageModel(published()[1])
    assert sum(p.numel() for p in model.parameters()) == 524_672
    assert len(list(model.parameters())) == 31


def test_half_of_the_heads_keep_rows_and_half_two_sums_each():
    with torch.device("meta"):
        model = LanguageModel(published()[1])
    short, long = budget(model, 512), budget(model, 1024)
    assert long["cache_bytes"] == 2 * short["cache_bytes"] == 6 * 2 * 64 * 1024 * 4  # units, keys and values
    assert long["state_bytes"] == short["state_bytes"] == 6 * 2 * 64 * 4  # units, sums
    cache = Cache(48)
    make(**SILIA)(ids(), cache=cache)
    assert len(cache.rows) == len(cache.sums) == 2 * 2 * 3  # of each unit; 2 units in 3 blocks


def twin(model, tokens):
    """Logits of Silia, written from its description as loops over units, tokens and heads."""
    c, E = model.config, model.embedding.weight
    D, eps = c.d_head, torch.finfo(E.dtype).eps
    norm = lambda v: v / torch.sqrt((v * v).mean() + eps)

    def rotate(v, p):
        out = [None] * D
        for i in range(D // 2):
            angle = -p * c.rope_base ** (-2 * i / D)  # the other way
            a, b = v[i], v[i + D // 2]
            out[i], out[i + D // 2] = (a * math.cos(angle) - b * math.sin(angle),
                                       a * math.sin(angle) + b * math.cos(angle))
        return torch.stack(out)

    def unit(m, x):
        normed = [norm(v) for v in x]
        qkv = [(m.qkv.weight @ (m.latent.weight @ h)).view(c.n_head, 3, D) for h in normed]
        gate = [torch.sigmoid(m.gate.weight @ h + m.gate.bias).view(-1, D) for h in normed]
        out = []
        for t in range(len(x)):
            heads = []
            for n in range(c.n_head):
                q, _, v = qkv[t][n]
                if n % 2 == 0:
                    q = norm(rotate(q, t))
                    scores = torch.stack([q @ norm(rotate(qkv[s][n][1], s)) for s in range(t + 1)])
                    weights = torch.softmax(scores / math.sqrt(D), dim=0)
                    y = sum(w * qkv[s][n][2] for s, w in enumerate(weights)) * gate[t][n // 2]
                    own = v / v.norm()
                    heads.append(y - (y @ own) * own)
                else:
                    weights = [torch.exp(norm(qkv[s][n][1])) for s in range(t + 1)]
                    total = sum(w * qkv[s][n][2] for s, w in enumerate(weights))
                    heads.append(torch.sigmoid(norm(q)) * total / (sum(weights) + 1e-6))
            out.append(m.out.weight @ torch.cat(heads))
        return out

    stream = [norm(E[t]) for t in tokens]
    for block in model.blocks:
        uv = unit(block.unit_1, stream)
        inner = [y[: c.d_ff] * F.silu(y[c.d_ff :]) for y in uv]
        stream = [x + y for x, y in zip(stream, unit(block.unit_2, inner))]
    return torch.stack([E @ norm(x) for x in stream])


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"n_head": 4}, {"n_layer": 1, "d_head": 16}], ids=str)
def test_agrees_with_a_loop_over_tokens(changes):
    model, x = make(**SILIA | {"n_layer": 2} | changes), ids(1, 9)
    assert (model(x)[0][0] - twin(model, x[0].tolist())).abs().max() < 1e-9


def test_rotary_turns_the_other_way():
    mirrored, standard = make(**SILIA).rotary(0, 9), make(alpha=0.0, d_head=12).rotary(0, 9)
    assert torch.equal(mirrored[0], standard[0]) and torch.equal(mirrored[1], -standard[1])
    model, x = make(**SILIA), ids()
    other = make(**SILIA | {"position": "spiral"})
    assert torch.equal(model(x[:, :1])[0], other(x[:, :1])[0])  # not to be seen at position 0
    assert (model(x)[0] - other(x)[0]).abs().max() > 0.1


def test_an_even_head_says_nothing_along_its_own_value():
    unit, g = make(**SILIA).blocks[0].unit_1, torch.Generator().manual_seed(0)
    q, k, v, gate = torch.randn(4, 2, 1, 9, 12, dtype=torch.float64, generator=g)  # (B, H/2, T, D) each
    rotary = make(**SILIA).rotary(0, 9)
    y = unit.softmax_heads(q, k, v, gate, rotary, NoCache())
    assert (y * v).sum(dim=-1).abs().max() < 1e-12 and y.abs().max() > 0.1


def test_initial_weights_are_those_of_pytorch():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=500, **SILIA | {"d_model": 64, "d_head": 64, "d_ff": 256}))
    assert abs(model.embedding.weight.std() - 1) < 0.02
    for module in model.modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            assert 0.9 * bound < module.weight.abs().max() <= bound
            assert module.bias is None or 0 < module.bias.abs().max() <= bound


@pytest.mark.parametrize("changes, word", [
    ({"n_head": 3, "d_head": 8}, "n_head=3 must be even"), ({"n_kv_head": 1}, "n_kv_head=1"),
    ({"mixer": "attention"}, "mixer='hydra'"),
])
def test_bad_combinations_are_refused(changes, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig(**SILIA | changes)


# ------------------------------------------------------------------------------------------------ precision


def test_a_value_of_zero_in_half_precision_is_no_nan():
    """Guards against a norm in float16, whose smallest eps rounds to 0."""
    model = make(**SILIA).half()
    with torch.no_grad():
        for block in model.blocks:
            block.unit_1.qkv.weight.zero_()
    assert model(ids())[0].isfinite().all()


def test_no_key_makes_exp_overflow():
    model, x = make(**SILIA).float(), ids()
    with torch.no_grad():
        for block in model.blocks:
            block.unit_1.qkv.weight *= 1e6
    assert model(x)[0].isfinite().all()
    k = unit_rms(torch.randn(1000, 12) * 1e6)
    assert k.norm(dim=-1).max() <= math.sqrt(12) * (1 + 1e-6)


def test_1024_tokens_in_bfloat16_autocast_stay_near_float32(monkeypatch):
    """A sum of exp(k) over 1,024 tokens that is kept in bfloat16 is off by a third."""
    kinds, running_sum = set(), NoCache.running_sum

    def watched(self, name, x):
        total = running_sum(self, name, x)
        kinds.add(total.dtype)
        return total

    monkeypatch.setattr(NoCache, "running_sum", watched)
    torch.manual_seed(0)
    model, x = LanguageModel(published()[1]), ids(1, 1024, 512)
    exact = model(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(x)[0].float()
    assert kinds == {torch.float32} and rounded.isfinite().all()
    error = (rounded - exact).abs().mean(dim=(0, 2)) / exact.std()
    assert error.max() < 0.05 and error[-100:].mean() < 2 * error[:100].mean()  # nor does it grow


# ------------------------------------------------------------------------------------------------- the sink


def test_the_sink_replaces_the_first_input_and_no_target():
    stream, config = np.arange(100, dtype="<u2"), TrainConfig(batch_size=4, seed=3)
    x, y = train.get_batch(stream, 5, config, 8)
    with_sink, same = train.get_batch(stream, 5, config, 8, sink=777)
    assert torch.equal(y, same) and torch.equal(with_sink[:, 1:], x[:, 1:])
    assert (with_sink[:, 0] == 777).all() and torch.equal(with_sink[:, 1:], y[:, :-1])
    inputs, targets = zip(*train.validation_batches(stream[:21], 50, 8, 2, sink=777))
    assert torch.cat([t.flatten() for t in targets]).tolist() == list(range(21))
    assert [row[0] for batch in inputs for row in batch.tolist()] == [777] * 3
    assert inputs[-1].tolist() == [[777, 16, 17, 18, 19]]


def test_a_refilled_window_begins_with_the_sink():
    model = make(**SILIA | {"context": 16, "sink_token": "<|actor|>"})
    x = torch.cat([torch.full((1, 1), 60), ids(1, 4, 60)], dim=1)
    window = x
    for token in model.generate(x, 60, temperature=0):
        assert torch.equal(token, model(window)[0][:, -1].argmax(-1, keepdim=True))
        window = torch.cat([window, token], dim=1)
        window = window if window.size(1) <= 16 else torch.cat([x[:, :1], window[:, -7:]], dim=1)


# ----------------------------------------------------------------------------------------------- the recipe


def test_the_learning_rate_stays_and_then_cools_down():
    config, _ = published()
    rates = [train.learning_rate(step, config) for step in range(20000)]
    assert rates[499] == pytest.approx(1.5e-3) and rates[999] == pytest.approx(3e-3)
    assert set(rates[1000:11000]) == {3e-3}
    assert rates[11000:] == sorted(rates[11000:], reverse=True)
    assert rates[15500] == pytest.approx((3e-3 + 3e-4) / 2) and rates[-1] == pytest.approx(3e-4, rel=1e-3)


def test_muon_has_the_matrices_of_the_blocks_and_adamw_all_else():
    model = make(**SILIA).float()
    optimizers = train.make_optimizers(model, TrainConfig(optimizer="muon", weight_decay=0.1))
    of = lambda name: [p for group in optimizers[name].param_groups for p in group["params"]]
    assert {id(p) for p in of("Muon")} == {id(p) for p in model.blocks.parameters() if p.dim() == 2}
    rest = {id(p) for p in of("AdamW")}
    assert id(model.embedding.weight) in rest
    assert all(id(block.unit_1.gate.bias) in rest for block in model.blocks)  # the reference forgets them
    everything = sorted(id(p) for p in of("Muon") + of("AdamW"))
    assert everything == sorted(id(p) for p in model.parameters())


def test_muons_momentum_warms_up_and_all_rates_are_set():
    config = TrainConfig(optimizer="muon")
    optimizers = train.make_optimizers(make(**SILIA).float(), config)
    for step, momentum in ((0, 0.85), (150, 0.9), (300, 0.95), (9999, 0.95)):
        rate = train.set_rates(optimizers, step, config)
        groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        assert {group["lr"] for group in groups} == {rate}
        assert optimizers["Muon"].param_groups[0]["momentum"] == pytest.approx(momentum)


def test_muon_steps_are_as_large_as_those_of_adamw():
    """So that one learning rate serves both: the root mean square is 0.2 of it."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=61, **SILIA | {"d_model": 64, "d_head": 64, "d_ff": 256}))
    optimizers = train.make_optimizers(model, TrainConfig(optimizer="muon", lr=1.0, weight_decay=0.0))
    before = {name: p.clone() for name, p in model.named_parameters()}
    model(ids(), ids(seed=2))[1].backward()
    optimizers["Muon"].step()
    for name, p in model.blocks.named_parameters():
        if p.dim() == 2:
            step = (p - before[f"blocks.{name}"]).square().mean().sqrt()
            assert 0.1 < step < 0.3, name
