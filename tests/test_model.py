"""The promises of model.py: sizes, causality, exact cached decoding, agreement with slow, obvious twins."""

import cmath
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import (PARTS, Cache, HydraAttention, LanguageModel, ModelConfig, NoCache, apply_rotary,
                   attention_by_hand, causal_attention, draw, running_mean, sample_token)
from support.report import budget

# The helix family; its parts alone are in VARIANTS.
HELIX = {"position": "helix", "mixer": "cross_layer", "n_head": 4, "n_kv_head": 2, "ffn": "dual_stream",
         "d_narrow": 12, "norm": "offset_rms", "init": "normal"}

# Silia. Its parts fit into each other only, but its attention fits anywhere.
SILIA = {"position": "mirrored", "alpha": 0.0, "mixer": "hydra", "norm": "bare_rms", "embedding_norm": True,
         "block": "silia", "n_head": 2, "d_head": 12, "init": "pytorch"}

# Every ablation of the papers, the baseline, and heads that share keys and values.
VARIANTS = {
    "nano": {},
    "alpha_0": {"alpha": 0.0},
    "rotary": {"position": "rotary"},
    "untied": {"tie_embeddings": False},
    "no_gate": {"gate": False},
    "gate_after_rotary": {"gate_after_rotary": True},
    "swiglu": {"ffn": "swiglu"},
    "gelu": {"ffn": "gelu"},
    "attention": {"mixer": "attention"},
    "baseline": {"mixer": "attention", "ffn": "swiglu", "alpha": 0.0},
    "grouped": {"n_kv_head": 2},
    "one_kv_head": {"mixer": "attention", "n_kv_head": 1},
    "wide_heads": {"d_head": 10},
    "helix": HELIX,
    **{f"helix_lookback_{n}": HELIX | {"n_layer": 5, "lookback": n} for n in (0, 1, 3)},
    "helix_rotary": {"position": "helix"},
    "cross_layer": {"mixer": "cross_layer"},
    "dual_stream": {"ffn": "dual_stream"},
    "offset_rms": {"norm": "offset_rms"},
    "gated_helix": HELIX | {"mixer": "gated_spiral"},
    "silia": SILIA,
    "silia_4_heads": SILIA | {"n_head": 4},
    "hydra": {"mixer": "hydra"},
    "mirrored": {"position": "mirrored"},
    "bare_rms": {"norm": "bare_rms", "embedding_norm": True},
}
CHUNKS = [[1] * 40, [40], [1, 7, 32], [13, 1, 1, 25], [39, 1]]


def make(seed=0, **changes):
    """A small float64 model. Its weights are far from the initial ones, so that nothing is nearly linear."""
    settings = {"vocab_size": 61, "context": 48, "n_layer": 3, "d_model": 24, "n_head": 4, "d_ff": 40}
    model = LanguageModel(ModelConfig(**(settings | changes))).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + (1.0 if p.dim() == 1 else 0.0))
    return model


def ids(B=2, T=40, V=61, seed=1):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def in_chunks(model, x, sizes):
    cache, out = Cache(model.config.context), []
    for chunk in x.split(sizes, dim=1):
        out.append(model(chunk, cache=cache)[0])
    return torch.cat(out, dim=1)


# ----------------------------------------------------------------------------------- sizes and configuration


def test_parameter_counts_are_exact():
    def count(**changes):
        with torch.device("meta"):
            return sum(p.numel() for p in LanguageModel(ModelConfig(**changes)).parameters())

    assert count() == 12_915_888
    assert count(d_model=384, n_layer=8, n_head=12, d_ff=768) == 26_454_624
    assert count(d_model=512, n_layer=12, n_head=16, d_ff=1024) == 54_154_944
    assert count(gate=False) == 12_915_888 - 6 * 328  # H d_h + H^2 + H a layer


def test_a_butterfly_is_a_gated_unit_of_width_8_3_not_4():
    """The paper's abstract has it match a gated unit of four times the width; that has half as many again."""
    def size(**changes):
        return sum(p.numel() for p in make(d_model=24, **changes).blocks[0].ffn.parameters())

    assert size(d_ff=48) == size(ffn="swiglu", d_ff=64) == size(ffn="gelu", d_ff=96)  # 2, 8/3, 4 times 24
    assert size(ffn="swiglu", d_ff=96) == 1.5 * size(d_ff=48)


def test_budget_counts_parameters_rows_sums_and_flops():
    with torch.device("meta"):
        model = LanguageModel(ModelConfig())
    costs = budget(model, 1024, torch.bfloat16)
    assert sum(costs["parameters"].values()) == 12_915_888
    assert costs["parameters"]["mixer.gate"] == 6 * 328
    assert costs["cache_bytes"] == 6_291_456  # the paper's 2 L T d, in half precision
    assert costs["state_bytes"] == 192 * 4  # the paper's L d_h values, in float32 whatever the dtype
    C, F_, D, H, V = 256, 512, 32, 8, 32000
    per_layer = 4 * C * C + D * H + H * H + 4 * C * F_ + 2 * 1024 * C  # products of the last of 1024 tokens
    assert costs["flops_per_token"] == 2 * (6 * per_layer + V * C)
    assert budget(model, 512)["cache_bytes"] == 6_291_456  # half the tokens, twice the bytes
    assert budget(model, 1)["flops_per_token"] < costs["flops_per_token"]


def test_zeros_in_the_config_are_resolved_once():
    config = ModelConfig(d_model=96, n_head=4, d_ff=100)
    assert (config.n_kv_head, config.d_head, config.d_narrow) == (4, 24, 25)
    assert ModelConfig(**vars(config)) == config


def test_an_untied_head_is_a_matrix_of_its_own_and_learns():
    """The published Nano has that switch; so both are in the count, and both get a gradient."""
    with torch.device("meta"):
        model = LanguageModel(ModelConfig(tie_embeddings=False))
    assert sum(p.numel() for p in model.parameters()) == 12_915_888 + 32_000 * 256
    assert budget(model)["parameters"]["head"] == 32_000 * 256
    model, x, y = make(tie_embeddings=False), ids(), ids(seed=2)
    for model.chunked_loss in (False, True):
        model.zero_grad()
        model.float()(x, y)[1].backward()
        assert model.head.weight.grad.abs().max() > 0 and model.embedding.weight.grad.abs().max() > 0


def test_a_mixer_of_ones_own_is_one_class_and_one_line_in_the_silia_block_too(monkeypatch):
    """The Silia block once named its mixer itself, so that a changed one was silently not used."""
    class Louder(HydraAttention):
        def forward(self, *arguments):
            return 2 * super().forward(*arguments)

    usual, x = make(**SILIA), ids()
    monkeypatch.setitem(PARTS["mixer"], "louder", Louder)
    louder = make(**SILIA | {"mixer": "louder"})
    assert {type(unit) for unit in louder.blocks[0].children()} == {Louder}
    assert (louder(x)[0] - usual(x)[0]).abs().max() > 0.1
    assert (in_chunks(louder, x, [1, 7, 32]) - louder(x)[0]).abs().max() < 1e-10


def test_grouped_heads_shrink_the_cache():
    full, grouped = (budget(make(n_kv_head=n), 48)["cache_bytes"] for n in (4, 1))
    assert full == 4 * grouped


@pytest.mark.parametrize("changes, word", [
    ({"d_model": 30}, "n_head"), ({"n_kv_head": 3}, "n_kv_head"), ({"d_head": 3}, "d_head"),
    ({"mixer": "atention"}, "choices: gated_spiral, cross_layer"), ({"ffn": "butterfy"}, "ffn"),
    ({"position": "x"}, "position"),
    ({"n_layer": 0}, "n_layer"), ({"vocab_size": -1}, "vocab_size"), ({"rope_base": 0.0}, "rope_base"),
    ({"norm_eps": 0.0}, "norm_eps"), ({"n_kv_head": -1}, "n_kv_head"), ({"weight_std": -0.1}, "weight_std"),
])
def test_bad_settings_are_refused_by_name(changes, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig(**({"d_model": 24, "n_head": 4} | changes))


def test_initial_weights_are_as_published():
    model = LanguageModel(ModelConfig(vocab_size=500, n_layer=2))
    matrices = torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() == 2])
    assert matrices.abs().max() <= 0.04 and abs(matrices.std() - 0.0176) < 2e-4  # 0.02, cut at two sigma
    assert all((p == 1).all() or (p == 0).all() for p in model.parameters() if p.dim() == 1)
    _, loss = model(ids(4, 100, 500), ids(4, 100, 500, seed=2))
    assert abs(loss.item() - math.log(500)) < 0.1


@pytest.mark.parametrize("init", ["truncated_normal", "normal"])
def test_weight_std_0_keeps_the_size_of_what_a_product_gets(init):
    config = ModelConfig(vocab_size=500, n_layer=2, d_model=128, d_ff=512, init=init, weight_std=0.0)
    model = LanguageModel(config)
    cut = 0.88 if init == "truncated_normal" else 1.0  # the deviation that is left
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.in_features >= 128:
            x = torch.randn(100, module.in_features)
            assert abs((x @ module.weight.detach().T).std() - cut) < 0.06
    assert model.embedding.weight.std() < 0.021  # it has a deviation of its own
    wide = LanguageModel(ModelConfig(weight_std=0.1, init=init)).blocks[0].ffn.up.weight
    assert abs(wide.std() - 0.1 * cut) < 0.002


# -------------------------------------------------------------------------------------------- exact decoding


@pytest.mark.parametrize("sizes", CHUNKS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_give_the_logits_of_the_full_pass(variant, sizes):
    model, x = make(**VARIANTS[variant]), ids()
    full, _ = model(x)
    assert full.abs().max() > 1  # else the tolerance would mean little
    assert (in_chunks(model, x, sizes) - full).abs().max() < 1e-10


def test_chunks_in_float32():
    model, x = make().float(), ids()
    assert (in_chunks(model, x, [1, 7, 32]) - model(x)[0]).abs().max() < 1e-4


def test_rows_of_a_batch_do_not_meet():
    model, x = make(), ids(B=3)
    alone = torch.cat([model(row[None])[0] for row in x])
    assert (model(x)[0] - alone).abs().max() < 1e-10


def test_a_pass_that_fails_halfway_leaves_the_cache_as_it_was():
    """Guards against sums that count a chunk twice when it is read again after an interruption."""
    model, x, cache = make(), ids(), Cache(48)
    model(x[:, :10], cache=cache)
    broken = model.blocks[-1].ffn.forward
    model.blocks[-1].ffn.forward = None
    with pytest.raises(TypeError):
        model(x[:, 10:20], cache=cache)
    model.blocks[-1].ffn.forward = broken
    again = model(x[:, 10:20], cache=cache)[0]
    assert (again - model(x[:, :20])[0][:, 10:]).abs().max() < 1e-10


def test_context_is_a_limit_never_a_silent_crop():
    model = make()
    for T in (0, 49):
        with pytest.raises(ValueError, match="context of 48"):
            model(ids(T=T))
    cache = Cache(48)
    model(ids(T=48), cache=cache)
    with pytest.raises(ValueError, match="1 tokens after 48"):
        model(ids(T=1), cache=cache)


def test_last_only_is_the_last_row_of_logits():
    model, x = make(), ids()
    assert torch.allclose(model(x, last_only=True)[0], model(x)[0][:, -1:], atol=1e-12)


def check_600_tokens_in_bfloat16(**changes):
    """Decoded one at a time, the last are as near the exact logits as a full pass is in the beginning."""
    model, tokens = make(context=600, **changes).bfloat16(), ids(1, 600)
    stepped, full = in_chunks(model, tokens, [1] * 600).float(), model(tokens)[0].float()
    exact = make(context=600, **changes)(tokens)[0].float()
    noise = (full - exact).abs()[:, :256].mean()  # what bfloat16 costs anyway
    assert (stepped - exact).abs()[:, 512:].mean() < 2 * noise


def test_half_precision_sums_stay_in_float32():
    """A running sum kept in bfloat16 stops growing at 256; here 600 tokens stay close to the full pass."""
    x = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    cache = Cache(600)
    for _ in range(600):
        mean = running_mean(cache, "x", x)
        cache.advance(torch.zeros(1, 1))
    assert cache.sums["x"].dtype == torch.float32 and cache.sums["x"].flatten().tolist() == [600, 600]
    assert mean.flatten().tolist() == [1, 1]
    check_600_tokens_in_bfloat16()


# ------------------------------------------------------------------------------------------------- causality


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_token_sees_a_later_one(variant, mode):
    model, x = make(**VARIANTS[variant]).train(mode == "train"), ids(1)
    before = model(x)[0]
    for t in (0, 1, 17, 38, 39):
        changed = x.clone()
        changed[0, t] = (x[0, t] + 1) % 61
        after = model(changed)[0]
        assert torch.equal(before[:, :t], after[:, :t])
        assert (before[:, t] - after[:, t]).abs().max() > 1e-3


# ------------------------------------------------------------------------------------------------ slow twins


def twin(model, tokens):
    """Logits of Wiola Nano, written from the paper as loops over layers, heads and tokens.

    Rotations are products of complex numbers, the gate multiplies scores (it is not folded into the query),
    and the mean is taken anew for each token.
    """
    c, E, logits = model.config, model.embedding.weight, []
    D, H, half = c.d_head, c.n_head, c.d_head // 2
    norm = lambda gain, v: gain * v / torch.sqrt((v * v).mean() + c.norm_eps)

    def rotate(v, m):
        out = torch.empty_like(v)
        for i in range(half):
            theta = c.rope_base ** (-2 * i / D) * (1 + c.alpha * math.sqrt((i + 1) / half))
            z = complex(v[i], v[i + half]) * cmath.exp(1j * m * theta)
            out[i], out[i + half] = z.real, z.imag
        return out

    stream = [E[t] for t in tokens]
    for block in model.blocks:
        W_q, W_k, W_v = block.mixer.qkv.weight.split(block.mixer.sizes)
        W_1, W_2, b_2 = block.mixer.gate[0].weight, block.mixer.gate[2].weight, block.mixer.gate[2].bias
        normed = [norm(block.norm_1.weight, x) for x in stream]
        heads = lambda W: [(W @ x).view(-1, D) for x in normed]  # a list over tokens of (heads, D)
        q, k, v = heads(W_q), heads(W_k), heads(W_v)
        for t in range(len(tokens)):
            c_t = sum(q[s].mean(dim=0) for s in range(t + 1)) / (t + 1)
            g = torch.sigmoid(W_2 @ F.silu(W_1 @ c_t) + b_2)
            out = []
            for h in range(H):
                kv = h // (H // c.n_kv_head)
                turned = rotate(q[t][h], t)
                scores = [g[h] * (turned @ rotate(k[s][kv], s)) / math.sqrt(D) for s in range(t + 1)]
                weights = torch.softmax(torch.stack(scores), dim=0)
                out.append(sum(w * v[s][kv] for s, w in enumerate(weights)))
            stream[t] = stream[t] + block.mixer.out.weight @ torch.cat(out)
        W_a, W_b, W_c = block.ffn.up.weight.chunk(3)
        for t, x in enumerate(stream):
            y = norm(block.norm_2.weight, x)
            stream[t] = x + block.ffn.down.weight @ (F.silu(W_a @ y) * (W_b @ y) + W_c @ y)
    return torch.stack([E @ norm(model.norm.weight, x) for x in stream])


@torch.no_grad()
@pytest.mark.parametrize("changes", [{}, {"n_kv_head": 2}, {"alpha": 0.3}], ids=str)
def test_agrees_with_a_loop_over_tokens(changes):
    model, x = make(n_layer=2, **changes), ids(1, 9)
    assert (model(x)[0][0] - twin(model, x[0].tolist())).abs().max() < 1e-9


@pytest.mark.parametrize("changes", [{"alpha": 0.0}, {"position": "rotary"}], ids=str)
def test_alpha_0_is_standard_rotary(changes):
    model = make(d_head=8, **changes)
    cos, sin = model.rotary(5, 3)
    for row, m in enumerate((5, 6, 7)):
        for i in range(4):
            angle = m * 10000 ** (-2 * i / 8)
            assert abs(cos[row, i] - math.cos(angle)) < 1e-12 and abs(sin[row, i] - math.sin(angle)) < 1e-12
    spiral, standard = make(d_head=8).rotary(0, 40)[0], make(alpha=0.0, d_head=8).rotary(0, 40)[0]
    assert (spiral - standard).abs().max() > 0.1


def test_the_spiral_speeds_up_the_slow_pairs_most():
    """The paper's words say the fast ones; its formula, and the published code, do this."""
    angle = [torch.atan2(*reversed(make(alpha=a, d_head=32).rotary(1, 1)))[0] for a in (0.05, 0.0)]
    boost = angle[0] / angle[1]  # of the pairs from fast to slow
    assert torch.equal(boost, boost.sort().values)
    assert abs(boost[0] - 1.0125) < 1e-9 and abs(boost[-1] - 1.05) < 1e-9


def test_rotary_keeps_length_and_depends_on_the_offset_alone():
    model, generator = make(d_head=8), torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64, generator=generator)
    at = lambda x, m: apply_rotary(x, *model.rotary(m, 1))
    assert torch.allclose(at(q, 17).norm(), q.norm(), atol=1e-12)
    assert torch.allclose((at(q, 9) * at(k, 4)).sum(), (at(q, 31) * at(k, 26)).sum(), atol=1e-10)


def test_rotary_tables_are_never_in_half_precision():
    """Guards against tables that are rounded with the weights: bfloat16 has 3 digits, positions have 4."""
    exact, half = make(), make().bfloat16()
    assert half.rotary(40, 3)[0].dtype == torch.float32
    assert (half.rotary(40, 3)[0] - exact.rotary(40, 3)[0]).abs().max() < 1e-7
    assert not [name for name in exact.state_dict() if "cos" in name or "rotary" in name]


@pytest.mark.parametrize("position", PARTS["position"])
def test_decoding_looks_the_rotary_tables_up(position):
    """Guards against angles that are computed in float64 anew for every token; the rows must be the same."""
    model, cache = make(position=position).float(), Cache(48)
    for start in (0, 5, 6, 47):
        cache.length = start
        for found, computed in zip(cache.rotary(model.rotary, 1), model.rotary(start, 1), strict=True):
            assert torch.equal(found, computed)
    model.rotary = None  # from now on
    model(ids(1, 1), cache=cache)


def test_a_token_of_nano_takes_few_operator_calls():
    """It took 597, and entered autocast in each layer; what is left are kernels and views that they need."""
    counted, cache = Calls(), Cache(1024)
    model = LanguageModel(ModelConfig(vocab_size=64, d_model=32, d_ff=32)).eval()  # narrow, but of six layers
    with torch.no_grad():
        model(ids(1, 9), cache=cache, last_only=True)
        with counted:
            model(ids(1, 1), cache=cache, last_only=True)
    assert counted.n <= 532


class Calls(TorchDispatchMode):
    """Counts the calls of operators."""

    n = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.n += 1
        return operator(*args, **kwargs or {})


def test_without_the_gate_gated_spiral_attention_is_plain_attention():
    gated, plain = make(gate=False), make(mixer="attention")
    plain.load_state_dict(gated.state_dict())
    assert torch.equal(gated(ids())[0], plain(ids())[0])
    assert (make()(ids())[0] - plain(ids())[0]).abs().max() > 1e-2


def test_gates_are_near_a_half_at_first_which_halves_the_scores():
    """The paper calls that close to the ungated baseline."""
    torch.manual_seed(0)
    model, gates = LanguageModel(ModelConfig(vocab_size=100, n_layer=2)), []
    for block in model.blocks:
        block.mixer.gate.register_forward_hook(lambda module, args, out: gates.append(out))
    model(ids(V=100))
    assert (torch.stack(gates) - 0.5).abs().max() < 0.01


def test_a_gate_of_zero_returns_the_mean_of_the_values():
    """The paper says that a small gate silences its head; it flattens it."""
    model, x = make(n_layer=1), ids(1)
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.gate[2].weight.zero_()
        mixer.gate[2].bias.fill_(-1e4)
    h = model.blocks[0].norm_1(model.embedding(x))
    v = mixer.project(h)[2]
    mean = running_mean(NoCache(), "", v.transpose(1, 2).flatten(2))
    assert torch.allclose(mixer(h, model.rotary(0, 40), NoCache()), mixer.out(mean), atol=1e-10)


@pytest.mark.parametrize("T, S, K", [(5, 5, 4), (1, 9, 2), (3, 9, 4), (8, 9, 1)])
def test_attention_against_an_explicit_mask(T, S, K):
    """Guards against a triangle aligned at the upper left, and against grouping heads as h mod K."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, T, 6, dtype=torch.float64, generator=g)
    k, v = torch.randn(2, 2, K, S, 6, dtype=torch.float64, generator=g)
    out = causal_attention(q, k, v)
    assert torch.allclose(out, attention_by_hand(q, k, v), atol=1e-12)  # the six lines say what it computes
    for h in range(4):
        scores = q[:, h] @ k[:, h // (4 // K)].mT / math.sqrt(6)
        for t in range(T):
            scores[:, t, S - T + t + 1:] = -math.inf
        assert torch.allclose(out[:, h], scores.softmax(-1) @ v[:, h // (4 // K)], atol=1e-12)


# -------------------------------------------------------------------------------------------------- training


def test_loss_ignores_minus_100_and_does_not_shift():
    model, x, y = make(), ids(), ids(seed=2)
    y[:, :10] = -100
    logits, loss = model(x, y)
    expected = -logits.log_softmax(-1)[:, 10:].gather(-1, y[:, 10:, None]).mean()
    assert torch.allclose(loss, expected, atol=1e-12)


def test_gradient_checkpointing_gives_the_same_gradients():
    grads = []
    for flag in (False, True):
        model = make()
        model.gradient_checkpointing = flag
        model(ids(), ids(seed=2))[1].backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.allclose(*grads, atol=1e-12) and grads[0].norm() > 0.1


def test_rows_may_be_kept_in_float32():
    """That a bfloat16 model's memory is float32 saves a CPU conversions and changes nothing."""
    model, x, results = make().bfloat16(), ids(1, 20), []
    for dtype in (None, torch.float32):
        cache = Cache(48, dtype)
        results.append(torch.cat([model(chunk, cache=cache)[0] for chunk in x.split(3, dim=1)], dim=1))
        assert {rows.dtype for rows in cache.rows.values()} == {dtype or torch.bfloat16}
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_loss_is_the_loss_and_holds_no_logits(dtype):
    """Equal loss and gradients; and no tensor as large as the logits, which the plain loss has."""
    results, V = [], 4000
    x, y = ids(4, 64, V), ids(4, 64, V, seed=2)
    y[:, :10] = -100
    for chunked in (False, True):
        model, largest = make(vocab_size=V, context=64).float(), [0]
        model.chunked_loss = chunked
        with watch_sizes(largest), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            logits, loss = model(x, y)
            loss.backward()
        assert (logits is None) == chunked
        results.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()]), largest[0]))
    (loss, grad, size), (chunked_loss, chunked_grad, chunked_size) = results
    close = 1e-5 if dtype == torch.float32 else 1e-2
    assert abs(loss - chunked_loss) < close * loss and (grad - chunked_grad).norm() < close * grad.norm()
    assert size == 4 * 64 * V and chunked_size < size / 2


def check_bfloat16_autocast_trains(**changes):
    """30 steps on one batch, in bfloat16 where autocast says so, halve the loss, which is float32."""
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=61, context=32, d_model=32, d_ff=64, **changes))
    optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), ids(4, 33)
    for step in range(30):
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(x[:, :-1], x[:, 1:])
        first = loss.item() if step == 0 else first
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.dtype == torch.float32 and loss.item() < first / 2


def test_bfloat16_autocast_trains_on_cpu():
    check_bfloat16_autocast_trains(n_layer=2, n_head=4)


@pytest.mark.parametrize("variant", ["nano", "baseline", "gelu"])
def test_overfits_a_paragraph(variant):
    text = ("Once upon a time there was a frog who could not swim. Every day it sat by the pond and watched "
            "the others. One day a duck came by and said: come, I will hold you. And the frog jumped in.")
    x = torch.tensor([list(text.encode())])
    torch.manual_seed(0)
    small = {"vocab_size": 256, "context": 256, "n_layer": 2, "d_model": 64, "n_head": 4, "d_ff": 128}
    model = LanguageModel(ModelConfig(**(small | VARIANTS[variant])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(200):
        _, loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    out = torch.cat(list(model.generate(x[:, :20], x.size(1) - 20, temperature=0)), dim=1)
    assert bytes(out[0].tolist()).decode() == text[20:]


# -------------------------------------------------------------------------------------------------- sampling


def test_generate_is_a_stream_and_equals_full_passes():
    model, x = make(), ids(2, 5)
    for token in model.generate(x, 20, temperature=0):
        assert token.shape == (2, 1)
        assert torch.equal(token, model(x)[0][:, -1].argmax(-1, keepdim=True))
        x = torch.cat([x, token], dim=1)


def test_generate_refills_a_full_context_from_its_last_half():
    model, x = make(context=16), ids(1, 5)
    window = x
    for token in model.generate(x, 60, temperature=0):
        assert torch.equal(token, model(window)[0][:, -1].argmax(-1, keepdim=True))
        window = torch.cat([window, token], dim=1)
        window = window if window.size(1) <= 16 else window[:, -8:]
    long, token = ids(1, 100), None
    (token,) = model.generate(long, 1, temperature=0)
    assert torch.equal(token, model(long[:, -8:])[0][:, -1].argmax(-1, keepdim=True))


def test_generate_goes_on_with_a_cache_over_several_calls():
    model, x, cache = make(context=16), ids(1, 5), Cache(16)
    whole = list(model.generate(x, 30, temperature=0))
    first = list(model.generate(x, 10, temperature=0, cache=cache))
    second = list(model.generate(first[-1], 20, temperature=0, cache=cache))
    assert torch.equal(torch.cat(whole, 1), torch.cat(first + second, 1))


def draws(logits, n=2000, seed=0, **options):
    """How often each id comes out of n draws."""
    generator = torch.Generator().manual_seed(seed)
    out = sample_token(torch.tensor([logits]).expand(n, -1), generator=generator, **options)
    return torch.bincount(out.flatten(), minlength=len(logits)).tolist()


def test_sampling_options_mean_what_they_say():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert draws(logits, temperature=0) == [2000, 0, 0, 0]
    assert draws(logits, top_k=1) == [2000, 0, 0, 0]
    assert [n > 0 for n in draws(logits, top_k=2)] == [True, True, False, False]
    assert all(draws(logits, top_k=99)) and all(draws(logits, top_k=0))
    assert [n > 0 for n in draws(logits, top_p=0.6)] == [True, True, False, False]  # 0.3 crosses it
    assert [n > 0 for n in draws(logits, top_p=0.4)] == [True, False, False, False]
    assert draws(logits, top_p=1e-9) == draws(logits, temperature=1e-50) == [2000, 0, 0, 0]
    assert draws(logits, temperature=1e-5) == [2000, 0, 0, 0]
    share = [n / 2000 for n in draws(logits)]
    assert all(abs(a - b) < 0.04 for a, b in zip(share, (0.5, 0.3, 0.15, 0.05)))
    cold = draws(logits, temperature=0.5)  # probabilities squared
    assert abs(cold[0] / cold[1] - 25 / 9) < 0.5


@pytest.mark.parametrize("uniform, ids", [(0.0, [1, 0]), (0.4999, [1, 1]), (0.5, [3, 2]), (1 - 2**-53, [3, 3])])
def test_a_uniform_number_picks_its_place_in_the_running_sum(monkeypatch, uniform, ids):
    """The first number that is reached, never one of probability 0; the sum of a row may be any."""
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, uniform, dtype=torch.float64))
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0], [0.75, 0.75, 0.75, 0.75, 0.0]])
    assert draw(probs).tolist() == [[ids[0]], [ids[1]]]


def test_draws_among_many_have_their_probabilities():
    """A third of the mass on one of 32,000, the rest spread evenly."""
    probs = torch.full((1, 32000), 2 / 3 / 31999)
    probs[0, 31000] = 1 / 3
    out = draw(probs.expand(3000, -1), torch.Generator().manual_seed(0)).flatten()
    assert abs((out == 31000).sum().item() / 3000 - 1 / 3) < 0.03
    rest = out[out != 31000]
    assert abs((rest < 16000).sum().item() / len(rest) - 0.5) < 0.05 and len(rest.unique()) > 1900


def test_ties_keep_exactly_k():
    assert sum(n > 0 for n in draws([1.0] * 10, top_k=3)) == 3


def test_rows_draw_independently_and_seeds_repeat():
    model, x = make(), ids(1, 5).expand(4, -1)
    seeded = lambda seed: torch.Generator().manual_seed(seed)
    run = lambda seed: torch.cat(list(model.generate(x, 20, generator=seeded(seed))), dim=1)
    first = run(1)
    assert torch.equal(first, run(1)) and not torch.equal(first, run(2))
    assert len({tuple(row.tolist()) for row in first}) == 4


def test_ids_past_the_tokenizer_are_never_drawn():
    model = make()
    with torch.no_grad():
        model.embedding.weight[50:] *= 20  # make them tempting
    out = torch.cat(list(model.generate(ids(8, 5, 50), 30, temperature=2.0, n_ids=50)), dim=1)
    assert out.max() < 50


# ---------------------------------------------------------------------------------------------------- memory


def watch_sizes(largest):
    """A context in which largest[0] becomes the size of the largest tensor that any operation returns."""
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                largest[0] = max(largest[0], x.numel()) if isinstance(x, torch.Tensor) else largest[0]
            return out

    return Watch()


def test_no_square_matrix_in_training():
    """The largest tensor of a forward and backward pass grows with T, not with T^2."""
    sizes = {}
    for T in (256, 512):
        model, largest = make(context=T, n_layer=1).float(), [0]
        with watch_sizes(largest):
            model(ids(1, T), ids(1, T, seed=2))[1].backward()
        sizes[T] = largest[0]
    assert sizes[512] == 2 * sizes[256]
