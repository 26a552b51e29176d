"""The promises of the helix family: sizes, slow twins, token merging and its leak, what the paper says."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from support import settings
import model as model_file
from model import (Cache, LanguageModel, ModelConfig, OffsetRMSNorm, greedy_pairs, helix_rotary,
                   mix_merged)
from test_model import (HELIX, check_600_tokens_in_bfloat16, check_bfloat16_autocast_trains, ids, in_chunks,
                        make)
from support.report import budget, merging_line
from train import TrainConfig

MERGING = HELIX | {"n_layer": 6, "token_merging": "paper", "merge_threshold": 0.85}


def published(size):
    path = Path(__file__).resolve().parent.parent / "config" / f"helix_{size}.py"
    return settings.read_settings([str(path)], TrainConfig, ModelConfig)[1][1]


def on_meta(config):
    with torch.device("meta"):
        return LanguageModel(config)


# --------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize("size, count", [
    ("120m", 147_297_804), ("360m", 318_048_272), ("700m", 1_068_518_424), ("1_5b", 2_179_698_716),
])
def test_parameter_counts_are_those_of_the_published_code(size, count):
    assert sum(p.numel() for p in on_meta(published(size)).parameters()) == count


def test_the_cache_of_360m_is_half_of_what_the_paper_writes():
    costs = budget(on_meta(published("360m")), 2048, torch.bfloat16)
    assert costs["cache_bytes"] == 33_554_432  # 2 L H_kv d_h t 2 bytes; 67.1 MB would be float32
    assert costs["state_bytes"] == 15 * 1024 * 4  # a running mean for each layer but the last, in float32


def test_the_360m_has_33_norms_with_an_offset_each_and_a_cache_four_times_smaller():
    """The paper counts 2 L norms, 32,768 offsets, and a cache "4-6 times" smaller."""
    model = on_meta(published("360m"))
    assert sum(p.numel() for name, p in model.named_parameters() if name.endswith("offset")) == 33 * 1024 == 33_792
    assert published("360m").n_head == 4 * published("360m").n_kv_head


def test_grouped_heads_save_projections_but_no_scores():
    """Equation 40 says that the scores of H queries and K keys cost (H + K) / 2H of those of H and H."""
    def flops(n_kv_head, length):
        return budget(make(mixer="attention", n_kv_head=n_kv_head), length)["flops_per_token"]

    assert flops(4, 48) - flops(4, 1) == flops(1, 48) - flops(1, 1) == 2 * 2 * 3 * 24 * 47  # scores and sums
    assert flops(4, 1) - flops(1, 1) == 2 * 3 * 24 * 2 * (4 - 1) * 6  # projections


def test_initial_weights_are_as_published():
    torch.manual_seed(0)
    model = LanguageModel(ModelConfig(vocab_size=500, n_layer=2, **HELIX))
    matrices = torch.cat([p.detach().flatten() for p in model.parameters() if p.dim() == 2])
    assert abs(matrices.std() - 0.02) < 1e-4 and matrices.abs().max() > 0.06  # not cut
    for name, p in model.named_parameters():
        assert p.dim() == 2 or (p == {"weight": 1, "offset": 0, "phi": -3}[name.split(".")[-1]]).all()
    assert abs(model.blocks[1].mixer.phi.sigmoid().item() - 0.0474) < 1e-4
    assert abs(model(ids(4, 100, 500), ids(4, 100, 500, seed=2))[1].item() - math.log(500)) < 0.15


# --------------------------------------------------------------------------------------------------- twins


def greedy_loop(x, threshold):
    """Algorithm 4 for one sequence, x a list of vectors: the groups, lists of one or two positions."""
    groups, t = [], 0
    while t < len(x):
        pair = t + 1 < len(x) and F.cosine_similarity(x[t], x[t + 1], dim=0).item() > threshold
        groups.append([t, t + 1] if pair else [t])
        t += len(groups[-1])
    return groups


def twin(model, tokens):
    """Logits of the helix family for one sequence, written from the paper as loops over layers and tokens.

    In training mode with token merging. Summaries are running means, each taken anew.
    """
    c, E = model.config, model.embedding.weight
    D, H, half = c.d_head, c.n_head, c.d_head // 2
    sigmoid = torch.sigmoid

    def norm(module, x):
        z = x + module.offset
        return module.weight * z / torch.sqrt((z * z).mean() + c.norm_eps)

    def rotate(v, p):
        out = [None] * D
        for j in range(half):
            w = c.rope_base ** (-2 * j / D)
            theta, r = p * w + p * w / c.winding, 1 + c.radial_amplitude * math.sin(
                p * c.radial_frequency * w)
            cos, sin = r * math.cos(theta), r * math.sin(theta)
            out[j], out[j + half] = v[j] * cos - v[j + half] * sin, v[j] * sin + v[j + half] * cos
        return torch.stack(out)

    def attend(q, rows, values):
        weights = torch.softmax(torch.stack([q @ k / math.sqrt(D) for k in rows]), dim=0)
        return sum(w * v for w, v in zip(weights, values))

    def mixer(m, x, contexts):
        W_q, W_k, W_v = m.qkv.weight.split(m.sizes)
        W_kc, W_vc = m.kv_summary.weight.chunk(2)
        heads = lambda W, v: (W @ v).view(-1, D)
        out = []
        for t, x_t in enumerate(x):
            read = []
            for h in range(H):
                g = h // (H // c.n_kv_head)
                q = rotate(heads(W_q, x_t)[h], t)
                o = attend(q, [rotate(heads(W_k, x[s])[g], s) for s in range(t + 1)],
                           [heads(W_v, x[s])[g] for s in range(t + 1)])
                if contexts[t]:
                    below = attend(q, [heads(W_kc, s)[g] for s in contexts[t]],
                                   [heads(W_vc, s)[g] for s in contexts[t]])
                    o = (1 - sigmoid(m.phi)) * o + sigmoid(m.phi) * below
                read.append(o)
            out.append(m.out.weight @ (sigmoid(m.gate.weight @ x_t) * torch.cat(read)))
        return out

    def feed_forward(f, x):
        gate, up = f.narrow.up.weight.chunk(2)
        a = f.narrow.down.weight @ (F.silu(gate @ x) * (up @ x))
        b = f.wide.down.weight @ F.gelu(f.wide.up.weight @ x)
        alpha = sigmoid(f.fuse.weight @ torch.cat([a, b]))
        return alpha * a + (1 - alpha) * b

    stream, outputs = [E[t] for t in tokens], []
    for layer, block in enumerate(model.blocks):
        normed = [norm(block.norm_1, x) for x in stream]
        groups = [[t] for t in range(len(stream))]
        if model.training and c.token_merging == "paper" and c.n_layer // 3 <= layer < 2 * c.n_layer // 3:
            groups = greedy_loop(normed, c.merge_threshold)
        merged = [sum(normed[t] for t in group) / len(group) for group in groups]
        below = outputs[-c.lookback:] if c.lookback else []
        contexts = [[sum(y[: group[-1] + 1]) / (group[-1] + 1) for y in below] for group in groups]
        for group, y in zip(groups, mixer(block.mixer, merged, contexts)):
            for t in group:
                stream[t] = stream[t] + y
        stream = [x + feed_forward(block.ffn, norm(block.norm_2, x)) for x in stream]
        outputs.append(list(stream))
    return torch.stack([E @ norm(model.norm, x) for x in stream])


@pytest.mark.parametrize("lookback", [0, 1, 2, 3])
def test_agrees_with_a_loop_over_tokens(lookback):
    model, x = make(**HELIX | {"n_layer": 5, "lookback": lookback}), ids(1, 7)
    with torch.no_grad():
        assert (model(x)[0][0] - twin(model, x[0].tolist())).abs().max() < 1e-9


def test_token_merging_agrees_with_a_loop_logits_and_gradients():
    """Two sequences that merge differently, so that one of them is padded."""
    model, x, y = make(**MERGING).train(), ids(2, 12), ids(2, 12, seed=2)
    logits, loss = model(x, y)
    ratios = [getattr(block, "merge_ratio", 0) for block in model.blocks]
    assert [r > 0 for r in ratios] == [False, False, True, True, False, False]  # the middle third
    assert 0 < model.merge_ratio() < 0.5
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    slow = torch.stack([twin(model, row.tolist()) for row in x])
    assert (logits - slow).abs().max() < 1e-9
    expected = torch.autograd.grad(F.cross_entropy(slow.flatten(0, 1), y.flatten()), list(model.parameters()),
                                   allow_unused=True)
    for (name, _), ours, theirs in zip(model.named_parameters(), gradients, expected):
        if name in ("blocks.0.mixer.phi", "blocks.0.mixer.kv_summary.weight"):
            assert ours is None and theirs is None  # idle: nothing is below the first layer
        else:
            assert (ours - theirs).abs().max() < 1e-9


def test_parts_reduce_to_what_is_known():
    model, x = make(norm="offset_rms"), ids()
    plain = make(norm="rms")
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "offset" not in k})
    assert (model(x)[0] - plain(x)[0]).abs().max() > 1e-2
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "offset" in name:
                p.zero_()
    assert torch.allclose(model(x)[0], plain(x)[0], atol=1e-10)  # offset 0 is RMSNorm

    f, x = make(ffn="dual_stream").blocks[0].ffn, torch.randn(3, 24, dtype=torch.float64)
    f.fuse.weight.data.zero_()
    assert torch.allclose(f(x), (f.narrow(x) + f.wide(x)) / 2, atol=1e-12)  # W_f = 0 is the mean


def test_two_winding_angles_are_one_and_the_radius_is_small():
    """The helix without its radius is standard rotary at 1 + 1/k_s times the position."""
    p = torch.arange(2048, dtype=torch.float64)
    config = lambda **k: ModelConfig(**HELIX | {"d_model": 64, "n_head": 1, "n_kv_head": 1, "alpha": 0.0} | k)
    flat = helix_rotary(config(radial_amplitude=0.0), p)
    standard = model_file.spiral_rotary(config(), p * 1.125)
    assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(flat, standard))
    c, s = helix_rotary(config(), p)
    swing = ((c * c + s * s).sqrt() - 1).abs().max(dim=0).values  # of each pair, within the context
    assert abs(swing[0] - 0.1) < 1e-4
    assert swing[16] < 0.021 and swing[24] < 0.0021 and swing[31] < 0.0003


def test_a_lookback_beyond_the_first_layer_ends_there():
    far, all_layers = make(**HELIX | {"lookback": 10**9}), make(**HELIX | {"lookback": 2})
    assert far.lookback == 2 and torch.equal(far(ids())[0], all_layers(ids())[0])
    assert make(lookback=3).lookback == 0  # gated spiral attention reads no summaries


@pytest.mark.parametrize("changes, word", [
    ({"merge_threshold": 92.0}, "merge_threshold=92.0"), ({"lookback": -1}, "lookback=-1"),
    ({"d_ff": 3, "d_narrow": 0}, "d_narrow=0"), ({"winding": 0.0}, "winding"),
    ({"mixer": "hydra", "block": "silia", "n_kv_head": 0}, "token_merging='paper'"),
])
def test_bad_settings_are_refused_by_name(changes, word):
    with pytest.raises(ValueError, match=word):
        ModelConfig(**MERGING | changes)


def test_no_share_for_the_layers_below_is_no_lookback():
    with_below, without = make(**HELIX), make(**HELIX | {"lookback": 0})
    assert (with_below(ids())[0] - without(ids())[0]).abs().max() > 1e-2
    with torch.no_grad():
        for block in with_below.blocks:
            block.mixer.phi.fill_(-1e4)
    assert torch.allclose(with_below(ids())[0], without(ids())[0], atol=1e-10)


# ----------------------------------------------------------------------------------------- token merging


def similar_rows(B, T, share, seed=0, C=16):
    """Random rows (B, T, C), a share of them near copies of the one before."""
    g = torch.Generator().manual_seed(seed)
    x, copy = torch.randn(B, T, C, generator=g), torch.rand(B, T, generator=g) < share
    for t in range(1, T):
        x[copy[:, t], t] = x[copy[:, t], t - 1] + 0.02 * torch.randn(C, generator=g)
    return x


@pytest.mark.parametrize("T", [1, 2, 3, 4, 17, 64])
@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_pairs_are_those_of_the_greedy_loop(B, T, share):
    x = similar_rows(B, T, share)
    second, lengths = greedy_pairs(x, 0.92), set()
    for row, vectors in zip(second.tolist(), x):
        groups = greedy_loop(list(vectors), 0.92)
        assert row == [i == 1 for group in groups for i in range(len(group))]
        lengths.add(len(groups))
    assert T < 17 or B == 1 or share in (0, 1) or len(lengths) > 1  # ragged, where it can be
    if share == 1:
        assert second.sum() == B * (T // 2)
    if share == 0:
        assert not second.any()


def test_merging_averages_pairs_numbers_them_anew_and_copies_back():
    x = similar_rows(3, 20, 0.4).double().requires_grad_()
    second, seen = greedy_pairs(x, 0.92), {}

    def mixer(merged, rotary, past, summaries):
        seen.update(merged=merged, rotary=rotary, summaries=summaries)
        return merged * 2

    tables = (torch.arange(20.0)[:, None],) * 2
    out = mix_merged(mixer, second, x, tables, None, [x * 10])
    length = seen["merged"].size(1)
    assert seen["rotary"][0].flatten().tolist() == list(range(length))
    for b in range(3):
        groups = greedy_loop(list(x[b].float()), 0.92)
        assert len(groups) <= length < 20
        for k, group in enumerate(groups):
            mean = x[b, group].mean(dim=0)
            assert torch.allclose(seen["merged"][b, k], mean, atol=1e-12)
            assert torch.equal(seen["summaries"][0][b, k], x[b, group[-1]] * 10)
            assert all(torch.allclose(out[b, t], 2 * mean, atol=1e-12) for t in group)
    out.sum().backward()
    assert torch.allclose(x.grad, torch.full_like(x, 2.0))  # nothing flows from padding, nothing gets lost


def test_merging_is_off_in_eval_mode_with_a_cache_and_by_default():
    merging, plain, x = make(**MERGING), make(**MERGING | {"token_merging": "off"}), ids()
    off = plain.train()(x)[0]
    assert (merging.train()(x)[0] - off).abs().max() > 0.1
    assert torch.equal(merging(x, cache=Cache(48))[0], off)
    assert torch.equal(merging.eval()(x)[0], off)
    assert ModelConfig().token_merging == "off"


def test_merging_runs_no_loop_over_tokens():
    """The number of operations does not depend on how many tokens there are, nor on how many merge."""
    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Count.n += 1
            return function(*args, **(kwargs or {}))

    counts = set()
    for B, T, share in ((1, 8, 0.5), (4, 100, 0.1), (8, 300, 0.6)):
        x, Count.n = similar_rows(B, T, share).requires_grad_(), 0
        with Count():
            second = greedy_pairs(x.detach(), 0.92)
            mix_merged(lambda m, *_: m, second, x, (torch.zeros(T, 1),) * 2, None, []).sum().backward()
        counts.add(Count.n)
    assert len(counts) == 1 and counts.pop() < 100


def test_merging_leaks_the_next_token_in_training_and_never_in_eval():
    """Both members of a pair get the pair's result, so the first sees the second: the token to predict."""
    model, x = make(**MERGING), ids(1)
    leaks = {}
    for mode in (True, False):
        model.train(mode)
        before, leaks[mode] = model(x)[0], []
        for t in range(1, 40):
            changed = x.clone()
            changed[0, t] = (x[0, t] + 1) % 61
            difference = (model(changed)[0] - before)[0, :t].abs().amax(dim=1)  # of each earlier position
            leaks[mode].append(difference.max().item())
    assert max(leaks[False]) == 0
    assert max(leaks[True]) > 0.5 and 5 < sum(leak > 0 for leak in leaks[True]) < 39


def test_merging_saves_what_the_report_says():
    """Fewer tokens in the mixer of the middle layers: counted on the run itself, and by the report."""
    config = ModelConfig(vocab_size=61, context=64, d_model=24, d_ff=40,
                         **MERGING | {"n_head": 4, "n_kv_head": 2, "merge_threshold": -1.0})  # all pairs
    torch.manual_seed(0)
    model, x = LanguageModel(config).train(), ids(2, 64)
    counted = {}
    for mode in (True, False):
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the one it counts
            model.train(mode)(x)
        counted[mode] = counter.get_total_flops()
    assert model.merge_ratio() == 0.5
    C, D, H, K, T = 24, 6, 4, 2, 64
    linear = 2 * C * (2 * H * D + 2 * K * D + 2 * K * D * 2 + H * D) + 2 * 2 * 2 * H * D  # 2 layers below
    scores = 2 * 2 * H * D
    per_layer = linear * (T - T // 2) + scores * (T * T - (T // 2) ** 2)
    assert counted[False] - counted[True] == 2 * 2 * per_layer  # sequences, layers
    line = merging_line(model, 0.5, batch_size=2)
    assert f"{3 * 2 * 2 * per_layer / 1e9:.3g} GFLOP," in line and "75.0%" in line and "2 of 6 layers" in line
    assert f"{2 * 2 * per_layer / counted[False]:.1%} of a step" in line


# ---------------------------------------------------------------------------------- what the paper says


def test_a_mean_over_the_whole_sequence_shows_the_future(monkeypatch):
    """Equation 20. At the initial weights its leak is below 1e-4, so a careless test would not see it."""
    def pooled(past, name, x):
        return x.mean(dim=1, keepdim=True).expand_as(x)

    x = ids(1)
    changed = x.clone()
    changed[0, -1] = (x[0, -1] + 1) % 61
    torch.manual_seed(0)
    initial = LanguageModel(make(**HELIX).config).double()
    leak = lambda model: (model(changed)[0] - model(x)[0])[:, :-1].abs().amax(dim=(0, 2))
    assert leak(make(**HELIX)).max() == leak(initial).max() == 0
    monkeypatch.setattr(model_file, "running_mean", pooled)
    model = make(**HELIX)
    assert leak(model).min() > 1e-3 and leak(model).max() > 0.1  # at any distance
    assert 0 < leak(initial).max() < 1e-4
    assert (in_chunks(model, x, [1] * 40) - model(x)[0]).abs().max() > 0.5  # nor can it be decoded


def test_equation_10_has_a_gain_too_many():
    """dL/d offset_i: the gain must not multiply the second term."""
    g = torch.Generator().manual_seed(0)
    norm = OffsetRMSNorm(ModelConfig(**HELIX | {"d_model": 16, "n_head": 4})).double()
    x, upstream = torch.randn(2, 16, dtype=torch.float64, generator=g)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(16, generator=g) + 0.5)
        norm.offset.copy_(torch.randn(16, generator=g))
    (norm(x) * upstream).sum().backward()
    gain, z, d = norm.weight, x + norm.offset, 16
    r = ((z * z).mean() + norm.eps).sqrt()
    second = z / (d * r**2) * (gain * upstream * z).sum()
    stated, right = gain / r * (upstream - second), (gain * upstream - second) / r
    assert (norm.offset.grad - right).abs().max() < 1e-12
    assert (norm.offset.grad - stated).abs().max() > 0.1


def test_group_h_mod_K_would_be_another_model(monkeypatch):
    """The paper groups query heads as h mod K, the published code as h // (H/K)."""
    model, x = make(**HELIX | {"lookback": 0}), ids()
    ours, attention = model(x)[0], model_file.causal_attention

    def modulo(q, k, v):
        repeats = q.size(1) // k.size(1)
        return attention(q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1))

    monkeypatch.setattr(model_file, "causal_attention", modulo)
    assert (model(x)[0] - ours).abs().max() > 1


# ------------------------------------------------------------------------------------- training, precision


@pytest.mark.parametrize("changes", [HELIX | {"n_layer": 5, "lookback": 3}, MERGING], ids=["off", "merging"])
def test_gradient_checkpointing_gives_the_same_gradients(changes):
    grads = []
    for flag in (False, True):
        model = make(**changes).train()
        model.gradient_checkpointing = flag
        model(ids(), ids(seed=2))[1].backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.allclose(*grads, atol=1e-12) and grads[0].norm() > 0.1


def test_bfloat16_autocast_trains_with_sums_and_norms_in_float32(monkeypatch):
    kinds = set()
    mean, norm = model_file.running_mean, F.rms_norm
    monkeypatch.setattr(model_file, "running_mean", lambda *a: kinds.add(mean(*a).dtype) or mean(*a))
    monkeypatch.setattr(F, "rms_norm", lambda *a, **k: kinds.add(norm(*a, **k).dtype) or norm(*a, **k))
    check_bfloat16_autocast_trains(**MERGING | {"merge_threshold": 0.8})
    assert kinds == {torch.float32}


def test_the_offset_norm_of_half_precision_rounds_once_at_the_end():
    """Guards against adding the offset in bfloat16, in which 256 + 1 = 256."""
    norm, g = OffsetRMSNorm(ModelConfig(**HELIX | {"d_model": 64})), torch.Generator().manual_seed(0)
    x = (torch.randn(9, 64, generator=g) * 256).bfloat16()
    norm.offset.data.fill_(1.0)
    exact = norm(x.float())
    assert norm.bfloat16()(x).dtype == torch.bfloat16 and torch.equal(norm(x), exact.bfloat16())


def test_600_tokens_in_bfloat16_stay_close_to_the_full_pass():
    """The published cache counts in bfloat16, where 256 + 1 = 256; from there on its means are wrong."""
    check_600_tokens_in_bfloat16(**HELIX)
