"""
Small language models in one file, to be read from the top.

Three decoder-only transformers, whose parts can be mixed. What is new, compared with Llama, in Wiola Nano
(12,915,888 parameters; Chowdhury, Oosa, Reddy, arXiv:2608.14604; "Nano paper" below):

- Rotary positions turn a little faster than usual, the slow pairs most: the "spiral" (III.B).
- Attention scores are multiplied by one number per head and token, a gate that reads the running mean of
  all queries so far (III.C).
- A feed-forward with a product *and* a linear bypass inside, the "butterfly" (III.D).

And in the Wiola helix family (called 120M to 1.5B, really 147 million to 2.2 billion parameters; PyPI
`wiola`; "helix paper" below, its sections in brackets):

- Rotary positions whose radius swings as well: the "helix" (6).
- Attention that looks at the text and at the layers below, through running means of their outputs (7).
- Neighbours that are nearly the same are merged for attention in the middle layers, in training only (8).
- A feed-forward of two streams (9), and a norm that shifts its input before it scales (5).

And in Silia v2 (524,672 parameters; S. Srivastava; after the model card of its port, silia-v2-hf):

- Attention inside the feed-forward: both products of a SwiGLU are units with heads, and nothing else attends.
- Half of the heads attend; the others keep two running sums and no rows.

What is unusual about the file: one memory, with two verbs, serves training and decoding. Everything that
looks at the past is a list of rows (keys, values) or a running sum (of queries, layer outputs, values), so
every layer is written once:

    past.append(name, x)         all rows so far, this chunk's included
    past.running_sum(name, x)    sums over all tokens so far, this chunk's included

`NoCache` answers as if nothing came before (training); `Cache` remembers (decoding). A text may be fed in
chunks of any lengths and gives the same logits: to 1e-10 in float64, to rounding in float32.

Map:  ModelConfig | rotary tables | memory | causal attention | norms | mixers | feed-forwards |
      token merging | blocks | the table of parts | sampling a token | LanguageModel

Letters in the shape comments (in brackets the papers' letter, where it is another one):
  B  sequences in the batch            T  tokens in this chunk
  S  tokens so far, S = past + T       V  vocabulary
  C  width of the residual stream [d]  H  query heads
  K  key/value heads (K = H, or fewer, each shared by a group of H/K query heads)
  D  width of a head [d_h]             F  inner width of the feed-forward [d_ff]
  L  layers below that are looked at [Lambda; the papers' L is the number of layers]
  M  tokens that are left after merging [T']
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

# ----------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class ModelConfig:
    """One field for each choice. The defaults are Wiola Nano; each ablation is one field."""

    vocab_size: int = 32000  # token ids the model knows (V)
    context: int = 1024  # longest window in tokens
    n_layer: int = 6  # blocks
    d_model: int = 256  # width of the residual stream (C)
    n_head: int = 8  # query heads (H)
    n_kv_head: int = 0  # key/value heads (K), each serving n_head / n_kv_head query heads; 0: n_head
    d_head: int = 0  # width of a head (D), even; 0: d_model / n_head
    d_ff: int = 512  # inner width of the feed-forward (F)
    d_narrow: int = 0  # dual_stream: inner width of its narrow stream (d_ff is the wide one's); 0: d_ff / 4
    position: str = "spiral"  # rotary tables: spiral, mirrored (the other way), helix
    rope_base: float = 10000.0  # how slowly the slowest pair of coordinates turns
    alpha: float = 0.05  # spiral: by what share the slowest pair is sped up; 0 is standard rotary
    winding: float = 8.0  # helix: for every so many turns, one extra (k_s)
    radial_amplitude: float = 0.1  # helix: how far the radius swings from 1 (a_s)
    radial_frequency: float = 0.01  # helix: swings of the radius per turn of standard rotary (f_s)
    mixer: str = "gated_spiral"  # what mixes tokens: gated_spiral, cross_layer, hydra, attention
    gate: bool = True  # gated_spiral: multiply scores by the gate
    gate_after_rotary: bool = False  # gated_spiral: the gate reads the queries after rotation, not before
    lookback: int = 2  # cross_layer: how many layers below its own (not tokens back) a token looks at
    phi: float = -3.0  # cross_layer: sigmoid(phi) is the share that the layers below get at first
    ffn: str = "butterfly"  # feed-forward: butterfly, dual_stream, swiglu, gelu
    norm: str = "rms"  # normalisation: rms, offset_rms, bare_rms
    norm_eps: float = 1e-6  # added to the mean square before its root (bare_rms has its own)
    embedding_norm: bool = False  # normalise the embedding as well, without gain
    block: str = "prenorm"  # how a layer is put together: prenorm, silia (of mixer hydra; has no ffn)
    token_merging: str = "off"  # merge similar neighbours in training, in the middle layers: off, paper
    merge_threshold: float = 0.92  # cosine above which neighbours merge
    sink_token: str = ""  # special token put in front of every window and prompt; empty: none
    init: str = "truncated_normal"  # initial weights: truncated_normal, normal, pytorch (what PyTorch does)
    embedding_std: float = 0.02  # deviation of the initial embedding; the other matrices have 0.02

    def __post_init__(self):
        check(self)  # below, where the table of parts is

    @property
    def kv_heads(self):  # K
        return self.n_kv_head or self.n_head

    @property
    def head_width(self):  # D
        return self.d_head or self.d_model // self.n_head

    @property
    def narrow_width(self):
        return self.d_narrow or self.d_ff // 4

    @property
    def layers_below(self):  # L: lookback, as far as there are layers; 0 unless the mixer (below) looks_below
        looks = getattr(PARTS["mixer"][self.mixer], "looks_below", False)
        return min(self.lookback, self.n_layer - 1) if looks else 0


# ----------------------------------------------------------------------------------------------------------
# Positions: a pair of coordinates (i, i + D/2) is a point in the plane, turned by an angle that grows with
# the token's position. Models differ in the two tables of cosines and sines only.


def spiral_rotary(config, position):
    """Spiral rotary encoding (Nano paper III.B). For position m and pair i = 0 .. D/2 - 1:

        angle_i(m) = m * base^(-2i/D) * (1 + alpha * sqrt((i + 1) / (D/2)))

    position (T,) -> cos, sin (T, D/2). alpha = 0 is standard rotary. The paper says that the fast pairs
    (small i) get the larger boost; its formula gives it to the slow ones.
    """
    half = config.head_width // 2
    i = torch.arange(half, dtype=position.dtype, device=position.device)
    theta = config.rope_base ** (-i / half) * (1 + config.alpha * ((i + 1) / half).sqrt())
    angle = position[:, None] * theta  # (T, 1), (D/2,) -> (T, D/2)
    return angle.cos(), angle.sin()


def mirrored_rotary(config, position):
    """The spiral turned the other way; with alpha = 0, Silia's rotary. That is the same as swapping the two
    halves of every query and key, so only trained weights can tell which way is meant."""
    cos, sin = spiral_rotary(config, position)
    return cos, -sin


def helix_rotary(config, position):
    """Helical rotary encoding, "SRPE" (helix paper 6.2, equations 11-16). For position p and pair j:

        w     = base^(-2j/D)               angle per token in standard rotary encoding
        Theta = p w (1 + 1/k_s)            k_s = winding
        r     = 1 + a_s sin(f_s p w)       a_s = radial_amplitude, f_s = radial_frequency

    position (T,) -> r cos Theta, r sin Theta (T, D/2). The paper speaks of two angles, p w and p w / k_s, but
    only their sum is used: standard rotary, turning 1 + 1/k_s times as fast. New is the radius. It stretches
    queries and keys, so scores depend on where both tokens stand, not only on their distance.
    """
    half = config.head_width // 2
    j = torch.arange(half, dtype=position.dtype, device=position.device)
    turn = position[:, None] * config.rope_base ** (-j / half)  # (T, 1), (D/2,) -> (T, D/2)
    angle = turn * (1 + 1 / config.winding)
    radius = 1 + config.radial_amplitude * (turn * config.radial_frequency).sin()
    return radius * angle.cos(), radius * angle.sin()


def apply_rotary(x, cos, sin):
    """Turn (with the helix, also stretch) the pairs of x (B, H, T, D), queries or keys; cos, sin (T, D/2)."""
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D) -> 2 x (B, H, T, D/2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


# ----------------------------------------------------------------------------------------------------------
# Memory


def at_least_float32(x):
    """x in float32, or as it is if that is wider: sums, norms and losses are never kept in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class NoCache:
    """The memory of a pass over whole sequences: nothing came before, and nothing is kept."""

    length, capacity = 0, float("inf")

    def append(self, name, x):
        """x (B, K, T, D) -> x: the rows of this chunk are all rows."""
        return x

    def running_sum(self, name, x):
        """x (B, T, ...) -> inclusive prefix sums over T, same shape, float32 or wider."""
        return at_least_float32(x).cumsum(dim=1)

    def advance(self, idx):
        pass


class Cache:
    """The memory of decoding: each verb answers as if all chunks so far had come as one.

    Rows are written in place into buffers of `capacity` tokens, made when a name is first used; sums are
    carried over. All layers write at the same place, so `length` moves once, by `advance`, at the end of a
    pass; new sums count from then on, too. A pass that fails halfway can therefore be repeated.
    Made for decoding: no gradient flows through it. `dtype` is that of the rows, by default what comes.
    """

    def __init__(self, capacity, dtype=None):
        self.capacity, self.dtype = capacity, dtype
        self.reset()

    def reset(self):
        self.length = 0  # tokens so far
        self.tokens = None  # (B, length): their ids, so that a full cache can be refilled
        self.rows = {}  # name -> (B, K, capacity, D)
        self.sums, self.new_sums = {}, {}  # name -> (B, 1, ...)

    def append(self, name, x):
        """Keep the rows x (B, K, T, D); return all rows so far, (B, K, length + T, D)."""
        B, K, T, D = x.shape
        if name not in self.rows:
            self.rows[name] = x.new_empty(B, K, self.capacity, D, dtype=self.dtype)
        end = self.length + T
        self.rows[name][:, :, self.length : end] = x.detach()
        return self.rows[name][:, :, :end]

    def running_sum(self, name, x):
        """x (B, T, ...) -> prefix sums that go on from the tokens before, same shape, float32 or wider."""
        total = at_least_float32(x).cumsum(dim=1) + self.sums.get(name, 0)
        self.new_sums[name] = torch.stack([total[:, -1].detach()], dim=1)  # a copy, whatever the layout of x
        return total

    def advance(self, idx):
        """All layers have seen the tokens idx (B, T): count them."""
        self.tokens = torch.cat([idx] if self.tokens is None else [self.tokens, idx], dim=1)
        self.length += idx.size(1)
        self.sums.update(self.new_sums)


def running_mean(past, name, x):
    """Mean over all tokens up to and including each one. (B, T, n) -> the same shape, float32 or wider."""
    count = torch.arange(past.length + 1, past.length + x.size(1) + 1, device=x.device)
    return past.running_sum(name, x) / count[:, None]  # (B, T, n) / (T, 1)


# ----------------------------------------------------------------------------------------------------------
# Attention


def causal_attention(q, k, v):
    """Softmax attention of the last T of S tokens, each over itself and those before.

    q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D). Query head h reads key/value head h // (H/K).
    The fused kernels build no (T, S) matrix in training. (On CUDA, with K < H, this takes half precision and
    a recent GPU.) A chunk that continues a text (1 < T < S) needs the causal triangle at the lower right;
    `is_causal` would put it at the upper left. One token sees all.
    """
    T, S = q.size(2), k.size(2)
    options = dict(attn_mask=(causal_lower_right(T, S) if 1 < T < S else None), is_causal=(1 < T == S),
                   enable_gqa=(q.size(1) != k.size(1)))
    if not q.is_cpu:
        return F.scaled_dot_product_attention(q, k, v, **options)
    with torch.autocast("cpu", enabled=False):  # a CPU's fused kernel is faster in float32 than in bfloat16
        heads = F.scaled_dot_product_attention(*map(at_least_float32, (q, k, v)), **options)
    return heads.type_as(q)


def split_heads(x, d_head):
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.unflatten(-1, (-1, d_head)).transpose(1, 2)


def join_heads(x):
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


# ----------------------------------------------------------------------------------------------------------
# Norms


def rms_norm(config):
    """y = gain * x / sqrt(mean(x^2) + eps), the mean over the last dimension (Nano paper III.A)."""
    return nn.RMSNorm(config.d_model, config.norm_eps)


def unit_rms(x):
    """x / sqrt(mean(x^2) + eps), no gain, in float32 or wider; eps is that type's machine epsilon (Silia)."""
    return F.rms_norm(at_least_float32(x), x.shape[-1:]).type_as(x)


def bare_rms_norm(config):
    """No gain, so nothing to build: `unit_rms`, for the table of parts."""
    return unit_rms


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm of x + offset, where offset is a learned vector: "WiolaRMSNorm" (helix paper 5, equation 9).

    Computed in float32: in bfloat16, 256 + 1 = 256.
    """

    def __init__(self, config):
        super().__init__(config.d_model, config.norm_eps)
        self.offset = nn.Parameter(torch.zeros(config.d_model))

    def forward(self, x):
        z = at_least_float32(x) + self.offset
        return (self.weight * F.rms_norm(z, self.normalized_shape, eps=self.eps)).type_as(x)


# ----------------------------------------------------------------------------------------------------------
# Mixers: x (B, T, C), rotary tables, past, below -> (B, T, C); the only parts that look at other tokens.
# `name` tells the memories of the layers apart; `below` are summaries of lower layers, if looks_below is set.


class Attention(nn.Module):
    """Plain causal attention with rotary positions, the baseline. Head h of token t:

        sum over s <= t of softmax_s(q_t . k_s / sqrt(D)) v_s,    and W_out joins the heads
    """

    looks_below = False

    def __init__(self, config, name):
        super().__init__()
        self.name, self.d_head = name, config.head_width
        self.sizes = [n * self.d_head for n in (config.n_head, config.kv_heads, config.kv_heads)]
        self.qkv = nn.Linear(config.d_model, sum(self.sizes), bias=False)  # W_q, W_k, W_v in one product
        self.out = nn.Linear(self.sizes[0], config.d_model, bias=False)

    def project(self, x):
        """(B, T, C) -> queries (B, H, T, D), keys and values (B, K, T, D)"""
        return [split_heads(y, self.d_head) for y in self.qkv(x).split(self.sizes, dim=-1)]

    def attend(self, q, k, v, past):
        """Rotated queries and keys of this chunk, and its values -> what the heads read, (B, H, T, D)"""
        k = past.append(self.name + ".key", k)  # (B, K, T, D) -> (B, K, S, D)
        v = past.append(self.name + ".value", v)
        return causal_attention(q, k, v)

    def forward(self, x, rotary, past, below=()):
        q, k, v = self.project(x)
        heads = self.attend(apply_rotary(q, *rotary), apply_rotary(k, *rotary), v, past)
        return self.out(join_heads(heads))


class GatedSpiralAttention(Attention):
    """Gated Spiral Attention (Nano paper III.C): head h multiplies all scores of token t by one gate g_t^h.

        c_t = 1/(t+1) sum_{s<=t} 1/H sum_h q_s^h               running mean of the head-mean query
        g_t = sigmoid(W_2 SiLU(W_1 c_t) + b_2)                 in (0, 1), one for each head
        head h: sum over s <= t of softmax_s(g_t^h q_t^h . k_s^h / sqrt(D)) v_s^h

    A gate is an inverse temperature that the text so far decides: near 1 the head attends as usual, near 0 it
    returns the plain mean of the values so far. (The paper says that it falls silent. It does not.) A sum and
    a count are enough to go on from, so decoding has the same gates as training. And since g scales a whole
    row of scores, g (q . k) = (g q) . k: folded into the query, it leaves the fused kernels usable.
    """

    def __init__(self, config, name):
        super().__init__(config, name)
        self.after_rotary = config.gate_after_rotary
        self.gate = nn.Sequential(
            nn.Linear(self.d_head, config.n_head, bias=False),  # W_1
            nn.SiLU(),
            nn.Linear(config.n_head, config.n_head),  # W_2, b_2
            nn.Sigmoid(),
        ) if config.gate else None

    def forward(self, x, rotary, past, below=()):
        q, k, v = self.project(x)
        turned, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if self.gate is not None:
            source = turned if self.after_rotary else q  # q: what the tokens are, not where they stand
            c = running_mean(past, self.name + ".query", source.mean(dim=1))  # (B, H, T, D) -> (B, T, D)
            g = self.gate(c.type_as(x))  # (B, T, D) -> (B, T, H)
            turned = turned * g.transpose(1, 2)[..., None]  # g as (B, H, T, 1)
        return self.out(join_heads(self.attend(turned, k, v, past)))


class CrossLayerAttention(Attention):
    """Gated cross-layer attention, "GCLA" (helix paper 7). With beta = sigmoid(phi), head h and output are

        o_h = (1 - beta) softmax(q_h . K / sqrt(D)) V  +  beta softmax(q_h . K' / sqrt(D)) V'
        y   = W_out (sigmoid(W_gate x) * [o_1; ..; o_H])

    K and V come from the tokens so far; K' = W_K' s and V' = W_V' s from summaries s of the L layers below.
    Token t sees L vectors, the running means up to t of those layers' outputs, as in the published code. The
    paper's mean over the whole sequence (equation 20) would show each token the future, and could not be
    cached. The queries are rotated and K' is not (equation 26): these scores depend on the absolute position.
    The first layer has nothing below it: no blend, and W_K', W_V' and phi are idle in it.
    """

    looks_below = True

    def __init__(self, config, name):
        super().__init__(config, name)
        self.gate = nn.Linear(config.d_model, self.sizes[0], bias=False)
        self.kv_below = nn.Linear(config.d_model, 2 * self.sizes[1], bias=False)  # W_K', W_V' in one product
        self.phi = nn.Parameter(torch.tensor(float(config.phi)))

    def look_below(self, q, below):
        """q (B, H, T, D), rotated; L summaries (B, T, C) -> (B, H, T, D): a token reads its own L vectors."""
        summaries = torch.stack(below, dim=2).type_as(q)  # (B, T, L, C)
        k, v = self.kv_below(summaries).unflatten(-1, (2, -1, self.d_head)).unbind(3)  # 2 x (B, T, L, K, D)
        q = q.unflatten(1, (k.size(3), -1))  # (B, H, T, D) -> (B, K, G, T, D), G = H/K
        scores = torch.einsum("bkgtd,btlkd->bkgtl", q, k) / self.d_head**0.5
        weights = at_least_float32(scores).softmax(dim=-1).type_as(v)
        return torch.einsum("bkgtl,btlkd->bkgtd", weights, v).flatten(1, 2)

    def forward(self, x, rotary, past, below=()):
        q, k, v = self.project(x)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        heads = self.attend(q, k, v, past)
        if below:
            beta = self.phi.sigmoid()
            heads = (1 - beta) * heads + beta * self.look_below(q, below)
        return self.out(self.gate(x).sigmoid() * join_heads(heads))


class HydraAttention(nn.Module):
    """Hydra latent attention (Silia v2): even heads attend ("XLA"), odd heads sum ("AFT", arXiv:2105.14103).
    n is the norm without gain, R the rotary; q, k, v of all heads come from one latent vector of width C,
    W_qkv W_latent n(x), and W_out joins the heads.

        even  a_t = sigmoid(W_gate n(x) + b) * sum over s <= t of softmax_s(n(R q_t) . n(R k_s) / sqrt(D)) v_s
              y_t = a_t without its part along v_t: what the token's own value does not say
        odd   y_t = sigmoid(n(q_t)) * sum_{s<=t} exp(n(k_s)) v_s / (sum_{s<=t} exp(n(k_s)) + 1e-6)

    The odd heads remember two sums, however long the text is. No coordinate of n(k) is above sqrt(D), so exp
    cannot overflow. Unlike other mixers this one norms its input itself, and it can change the width, from
    d_in to d_out.
    """

    def __init__(self, config, name, d_in=0, d_out=0):
        super().__init__()
        self.name, self.d_head = name, config.head_width
        d_in, inner = d_in or config.d_model, config.n_head * config.head_width
        self.latent = nn.Linear(d_in, config.d_model, bias=False)
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)  # rows: head by head its q, k, v
        self.gate = nn.Linear(d_in, inner // 2)
        self.out = nn.Linear(inner, d_out or config.d_model, bias=False)

    def forward(self, x, rotary, past, below=()):
        h = unit_rms(x)
        # (B, T, 3*H*D) -> (B, T, H/2, 2, 3, D): pairs of heads; even, odd (B, T, H/2, 3, D): their q, k, v
        even, odd = self.qkv(self.latent(h)).unflatten(-1, (-1, 2, 3, self.d_head)).unbind(3)
        gate = self.gate(h).sigmoid().unflatten(-1, (-1, self.d_head))  # (B, T, H/2, D), as are q, k, v below
        heads = [self.attend(*even.unbind(3), gate, rotary, past), self.sum(*odd.unbind(3), past)]
        return self.out(torch.stack(heads, dim=3).flatten(2))  # interleaved again: (B, T, H*D)

    def attend(self, q, k, v, gate, rotary, past):
        """Even heads: q, k, v, gate (B, T, H/2, D) -> y, the same shape"""
        q, k, values = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H/2, T, D)
        q, k = unit_rms(apply_rotary(q, *rotary)), unit_rms(apply_rotary(k, *rotary))
        k, values = past.append(self.name + ".key", k), past.append(self.name + ".value", values)
        a = gate * causal_attention(q, k, values).transpose(1, 2)
        own = F.normalize(at_least_float32(v), dim=-1).type_as(v)
        return a - (a * own).sum(dim=-1, keepdim=True) * own

    def sum(self, q, k, v, past):
        """Odd heads: q, k, v (B, T, H/2, D) -> y, the same shape"""
        weight = at_least_float32(unit_rms(k)).exp()
        total = past.running_sum(self.name + ".weight", weight)
        mean = past.running_sum(self.name + ".weighted", weight * v) / (total + 1e-6)
        return unit_rms(q).sigmoid() * mean.type_as(q)


# ----------------------------------------------------------------------------------------------------------
# Feed-forwards: (B, T, C) -> (B, T, C), each token by itself.


class FeedForward(nn.Module):
    """y = W_down inner(a, b, ...), where a, b, ... = W_a x, W_b x, ..., each F wide, in one product."""

    def __init__(self, config, width=0):
        super().__init__()
        width = width or config.d_ff
        self.up = nn.Linear(config.d_model, self.inputs * width, bias=False)
        self.down = nn.Linear(width, config.d_model, bias=False)

    def forward(self, x):
        return self.down(self.inner(*self.up(x).chunk(self.inputs, dim=-1)))


class Butterfly(FeedForward):
    """W_down (SiLU(a) * b + bypass) (Nano paper III.D): a product and a linear path. 4 C F parameters."""

    inputs = 3

    def inner(self, a, b, bypass):
        return F.silu(a) * b + bypass


class SwiGLU(FeedForward):
    """W_down (SiLU(a) * b) (Shazeer, arXiv:2002.05202). 3 C F parameters: a butterfly's, at 4/3 of its F."""

    inputs = 2

    def inner(self, a, b):
        return F.silu(a) * b


class GELU(FeedForward):
    """W_down GELU(a), the feed-forward of GPT-2 without biases. 2 C F parameters."""

    inputs = 1

    def inner(self, a):
        return F.gelu(a)


class DualStream(nn.Module):
    """Two streams side by side, "DSFF" (helix paper 9): a = SwiGLU(x), narrow, and b = GELU(x), wide; of them
    alpha * a + (1 - alpha) * b, where alpha = sigmoid(W_f [a; b]) has one weight for each coordinate.
    3 C F_a + 2 C F_b + 2 C^2 parameters, F_a = d_narrow, F_b = d_ff."""

    def __init__(self, config):
        super().__init__()
        self.narrow, self.wide = SwiGLU(config, config.narrow_width), GELU(config)
        self.fuse = nn.Linear(2 * config.d_model, config.d_model, bias=False)

    def forward(self, x):
        a, b = self.narrow(x), self.wide(x)
        alpha = self.fuse(torch.cat([a, b], dim=-1)).sigmoid()
        return alpha * a + (1 - alpha) * b


# ----------------------------------------------------------------------------------------------------------
# Token merging, "ATM" (helix paper 8). In training, two neighbours that are nearly the same go through the
# mixer of a middle layer as one vector, their average, and both get its output: fewer tokens, less work. (The
# feed-forward still sees them all.) But so the first of a pair sees the second, the very token that it is to
# predict. The published method has this leak; here it is off unless a config asks for it.


def greedy_pairs(x, threshold):
    """x (B, T, C) -> (B, T): True where a token merges with the one before it.

    The greedy scan of Algorithm 4 goes from left to right and pairs similar tokens not yet paired. In a run
    of similar neighbours these are the first two, the next two, ...: a token's offset from the start of its
    run decides, and the start is a running maximum. No loop over tokens.
    """
    x = at_least_float32(x)
    dot, norm = torch.linalg.vecdot(x[:, 1:], x[:, :-1]), torch.linalg.vecdot(x, x).sqrt()
    similar = dot > threshold * norm[:, 1:] * norm[:, :-1]  # (B, T - 1): the cosine, without dividing
    similar = F.pad(similar, (1, 0))  # (B, T): like the token before? The first has none
    t = torch.arange(x.size(1), device=x.device)
    start = torch.where(similar, 0, t).cummax(dim=1).values  # (B, T): where its run starts
    return (t - start) % 2 == 1


def mix_merged(mixer, second, x, rotary, past, below):
    """The mixer on pairs merged into one; second (B, T) is True for a token that joins the one before it.

    Merged tokens are numbered anew from 0, so they turn by smaller angles than at inference. A pair sees the
    layers below as its last token does. Sequences that merge more are padded at the end, with zeros that no
    token sees (attention is causal) and that are not copied back. With B = 1, for example,

        second = [0 1 0 0 1]  ->  group = [0 0 1 2 2], M = 3, share = [½ ½ 1 ½ ½], last = [1 2 4]
    """
    B, T, C = x.shape
    group = (~second).cumsum(dim=1) - 1  # (B, T): the number of each token's pair, or of itself if alone
    M = int(group.max()) + 1
    place = (group + M * torch.arange(B, device=x.device)[:, None]).flatten()  # (B*T): its row in (B*M, C)
    share = 1 / place.bincount()[place].type_as(x)  # (B*T): 1, or 1/2 in a pair
    merged = x.new_zeros(B * M, C).index_add(0, place, share[:, None] * x.flatten(0, 1))  # averages
    token = torch.arange(B * T, device=x.device)
    last = place.new_zeros(B * M).scatter_reduce(0, place, token, "amax")  # of each, its last token
    below = [summary.flatten(0, 1).index_select(0, last).view(B, M, C) for summary in below]
    mixed = mixer(merged.view(B, M, C), [table[:M] for table in rotary], past, below)
    return mixed.flatten(0, 1).index_select(0, place).view(B, T, C)


# ----------------------------------------------------------------------------------------------------------
# Blocks


class PreNormBlock(nn.Module):
    """x = x + Mixer(Norm(x)), then x = x + FFN(Norm(x)) (both papers).

    With token merging, layers n/3 .. 2n/3 - 1 of n merge, in training and never with a cache; `merge_ratio`
    is then the share of tokens that the last pass merged away, the paper's mu.
    """

    def __init__(self, config, layer):
        super().__init__()
        middle = config.n_layer // 3 <= layer < 2 * config.n_layer // 3
        self.find_pairs = PARTS["token_merging"][config.token_merging] if middle else None
        self.merge_threshold, self.merge_ratio = config.merge_threshold, 0.0
        self.norm_1 = PARTS["norm"][config.norm](config)
        self.mixer = PARTS["mixer"][config.mixer](config, str(layer))
        self.norm_2 = PARTS["norm"][config.norm](config)
        self.ffn = PARTS["ffn"][config.ffn](config)

    def forward(self, x, rotary, past, below=()):
        h = self.norm_1(x)
        if self.find_pairs and self.training and isinstance(past, NoCache):
            second = self.find_pairs(h.detach(), self.merge_threshold)
            self.merge_ratio = second.float().mean()
            x = x + mix_merged(self.mixer, second, h, rotary, past, below)
        else:
            x = x + self.mixer(h, rotary, past, below)
        return x + self.ffn(self.norm_2(x))


class SiliaBlock(nn.Module):
    """x = x + Unit_2(u * SiLU(v)), with [u; v] = Unit_1(x): attention inside the SwiGLU (Silia v2)."""

    def __init__(self, config, layer):
        super().__init__()
        self.unit_1 = HydraAttention(config, f"{layer}.1", config.d_model, 2 * config.d_ff)
        self.unit_2 = HydraAttention(config, f"{layer}.2", config.d_ff, config.d_model)

    def forward(self, x, rotary, past, below=()):
        u, v = self.unit_1(x, rotary, past).chunk(2, dim=-1)  # 2 x (B, T, F)
        return x + self.unit_2(u * F.silu(v), rotary, past)


def truncated_normal(weight, std):
    """Fill with a normal of deviation std, cut at two deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


# The choices for each field of ModelConfig that names a part. A new part is one class (or function) and one
# line here. They are called as
#   position(config, position)    norm, ffn(config)    mixer(config, name)    block(config, layer)
#   token_merging(x, threshold)   init(weight, std=std)
PARTS = {
    "position": {"spiral": spiral_rotary, "mirrored": mirrored_rotary, "helix": helix_rotary},
    "norm": {"rms": rms_norm, "offset_rms": OffsetRMSNorm, "bare_rms": bare_rms_norm},
    "mixer": {"gated_spiral": GatedSpiralAttention, "cross_layer": CrossLayerAttention,
              "hydra": HydraAttention, "attention": Attention},
    "ffn": {"butterfly": Butterfly, "dual_stream": DualStream, "swiglu": SwiGLU, "gelu": GELU},
    "block": {"prenorm": PreNormBlock, "silia": SiliaBlock},
    "token_merging": {"off": None, "paper": greedy_pairs},
    "init": {"truncated_normal": truncated_normal, "normal": nn.init.normal_, "pytorch": None},
}


def check(config):
    """ValueError, in a sentence, if the fields of a ModelConfig do not go together."""
    for name, parts in PARTS.items():
        if getattr(config, name) not in parts:
            raise ValueError(f"{name}={getattr(config, name)!r} is unknown; choices: {', '.join(parts)}.")
    positive = ("vocab_size", "context", "n_layer", "d_model", "n_head", "d_ff", "rope_base", "winding",
                "norm_eps", "embedding_std")
    for name in positive:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(config, name)}.")
    wrong = {
        f"n_kv_head={config.n_kv_head} does not divide n_head={config.n_head}":
            config.kv_heads < 1 or config.n_head % config.kv_heads,
        f"n_head={config.n_head} does not divide d_model={config.d_model}; set d_head":
            config.d_head == 0 and config.d_model % config.n_head,
        f"d_head={config.head_width} must be even: positions turn pairs of coordinates":
            config.head_width < 2 or config.head_width % 2,
        f"d_narrow={config.d_narrow} with d_ff={config.d_ff} leaves no narrow stream":
            config.ffn == "dual_stream" and config.narrow_width < 1,
        f"n_kv_head={config.n_kv_head} is not for mixer='hydra': each head has its own":
            config.mixer == "hydra" and config.kv_heads != config.n_head,
        f"n_head={config.n_head} must be even with mixer='hydra': half attend, half sum":
            config.mixer == "hydra" and config.n_head % 2,
        f"block='silia' is made of mixer='hydra', not {config.mixer!r}":
            config.block == "silia" and config.mixer != "hydra",
        f"token_merging={config.token_merging!r} is not for block='silia'":
            config.token_merging != "off" and config.block == "silia",
        f"merge_threshold={config.merge_threshold} is a cosine, between -1 and 1":
            not -1 <= config.merge_threshold <= 1,
        f"lookback={config.lookback} must not be negative": config.lookback < 0,
    }
    for sentence, is_so in wrong.items():
        if is_so:
            raise ValueError(sentence + ".")


# ----------------------------------------------------------------------------------------------------------
# The language model


def sample_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token id for each row of logits (B, V) -> (B, 1).

    temperature 0 takes the likeliest. top_k keeps exactly k tokens, ties or not (0 or None: all). top_p, in
    (0, 1], keeps the likeliest tokens up to and including the one at which their probabilities add up to p.
    """
    if temperature < 1e-6:
        return logits.argmax(dim=-1, keepdim=True)
    logits = at_least_float32(logits) / temperature
    if not top_k and top_p >= 1:
        return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)  # sorting would cost more
    V = logits.size(-1)
    logits, ids = logits.topk(min(top_k or V, V))  # (B, V) -> (B, k), likeliest first
    probs = logits.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    mass_before[:, 0] = 0  # exactly, so that one token always stays
    probs = probs.masked_fill(mass_before >= top_p, 0)
    return ids.gather(-1, torch.multinomial(probs, 1, generator=generator))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding: logits = Norm(x) E^T (Nano paper III.E)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # in training, recompute each block in backward: less memory
        self.chunked_loss = False  # compute the loss piece by piece and no logits: much less memory
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        block = PARTS["block"][config.block]
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.n_layer))
        self.norm = PARTS["norm"][config.norm](config)
        self.apply(self.init_weights)

    def init_weights(self, module):
        """As published: a normal of deviation 0.02, for Nano cut at two deviations; biases 0. Not Silia."""
        if PARTS["init"][self.config.init] is None:
            return
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = self.config.embedding_std if isinstance(module, nn.Embedding) else 0.02
            PARTS["init"][self.config.init](module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def rotary(self, start, T):
        """Tables (T, D/2) for positions start .. start + T - 1, in float32, or float64 in a float64 model.

        Angles are large and must not be rounded: they are computed in float64, where the device has it.
        """
        weight = self.embedding.weight
        exact = torch.float32 if weight.device.type == "mps" else torch.float64
        position = torch.arange(start, start + T, device=weight.device, dtype=exact)
        cos, sin = PARTS["position"][self.config.position](self.config, position)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return cos.to(dtype), sin.to(dtype)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """Token ids idx (B, T) -> logits (B, T, V), or (B, 1, V) with last_only; and the mean loss, or None.

        targets (B, T): the token after each; -100 is ignored; nothing is shifted here. With chunked_loss and
        targets, logits are None. With a cache, idx goes on where the last call stopped. ValueError when the
        context is exceeded.
        """
        T, past = idx.size(1), cache or NoCache()
        limit = min(self.config.context, past.capacity)
        if not 1 <= T <= limit - past.length:
            raise ValueError(f"{T} tokens after {past.length} do not fit a context of {limit}.")
        rotary = self.rotary(past.length, T)
        x = self.embedding(idx)  # (B, T) -> (B, T, C)
        if self.config.embedding_norm:
            x = unit_rms(x)
        below = []  # summaries of the layers just beneath: running means of their outputs, (B, T, C) each
        for layer, block in enumerate(self.blocks):
            if layer and self.config.layers_below:
                summary = running_mean(past, f"{layer - 1}.output", x)  # x is still the output of that layer
                below = [*below, summary][-self.config.layers_below:]
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, rotary, past, below, use_reentrant=False)
            else:
                x = block(x, rotary, past, below)
        x = self.norm(x[:, -1:] if last_only else x)
        past.advance(idx)
        if targets is not None and self.chunked_loss:
            device, weight = x.device.type, self.embedding.weight
            if torch.is_autocast_enabled(device):  # it has no rule of its own for this function
                x, weight = (y.to(torch.get_autocast_dtype(device)) for y in (x, weight))
            options = nn.LinearCrossEntropyOptions(acc_policy="accurate", chunking_method=None,
                                                   batch_chunk_size=1024)  # tokens at a time; by default 16
            return None, F.linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), options=options)
        logits = F.linear(x, self.embedding.weight)  # (B, T, C) -> (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten())

    def merge_ratio(self):
        """The share of tokens that the last training pass merged away, a mean over the layers that merge."""
        ratios = [block.merge_ratio for block in self.blocks if block.find_pairs]
        return float(sum(ratios) / max(1, len(ratios)))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, n_ids=None,
                 cache=None):
        """Continue idx (B, T): a generator that yields one column of new ids (B, 1) at a time.

        Only ids below n_ids are drawn (None: all): a model may have more rows than its tokenizer has tokens.
        Pass a cache to go on from an earlier call; idx is then what the cache has not seen, beginning with
        the last id that was drawn. What does not fit the context, be it a long prompt or a long story, is cut
        to its last half window, which is read anew: a full window at each step would be slow. With a
        sink_token, idx must begin with it; it stays in front.
        """
        cache = cache or Cache(self.config.context)
        for _ in range(max_new_tokens):
            if cache.length + idx.size(1) > self.config.context:
                seen = idx if cache.tokens is None else torch.cat([cache.tokens, idx], dim=1)
                idx = seen[:, -max(1, self.config.context // 2):]
                if self.config.sink_token:
                    idx = torch.cat([seen[:, :1], idx[:, 1:]], dim=1)
                cache.reset()
            logits, _ = self(idx, cache=cache, last_only=True)
            idx = sample_token(logits[:, -1, :n_ids], temperature, top_k, top_p, generator)
            yield idx
