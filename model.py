"""
Small language models in one file, to be read from the top.

Three decoder-only transformers whose parts can be mixed. Each is a Llama (pre-norm blocks, rotary
positions, gated feed-forwards) with some parts changed. New in Wiola Nano (12,915,888 parameters; Chowdhury,
Oosa, Reddy, arXiv:2608.14604; "Nano paper" below):

- Rotary positions turn a little faster than usual, the slow pairs most: the "spiral" (III.B).
- Attention scores are multiplied by a gate, one number per head and token, computed from the running mean of
  all queries so far (III.C).
- A feed-forward with a product *and* a linear bypass inside, the "butterfly" (III.D).

New in the Wiola helix family (called 120M to 1.5B, really 147 million to 2.2 billion parameters; Chowdhury
and others, arXiv:2607.01394; "helix paper" below, its sections in brackets):

- Rotary positions whose radius varies as well: the "helix" (6).
- Attention to the tokens so far and to the layers below, through running means of their outputs (7).
- Neighbouring tokens that are nearly the same share one place in attention, in training only (8).
- A feed-forward of two streams (9), and a norm that shifts its input before it scales (5).

New in Silia v2 (524,672 parameters; S. Srivastava; after the model card of its port, silia-v2-hf):

- Attention inside the feed-forward: both matrices of a SwiGLU become units with heads; nothing else attends.
- Half of the heads use softmax attention; the other half keep two running sums and no keys or values.

Cached decoding gives the same logits as a full pass for all of them, by one idea: whatever a layer needs from
earlier tokens is either a list of rows (keys, values) or a running sum (of queries, layer outputs, values).
So a layer asks its `past` for one of two things, and is written once, for training and for decoding:

    past.append(name, x)         all rows so far, those of this chunk included
    past.running_sum(name, x)    sums over all tokens so far, this chunk's included

`NoCache` answers as if nothing came before (training); `Cache` remembers (decoding). A sequence may be fed in
chunks of any lengths and gives the same logits: to 1e-10 in float64, to rounding in float32.

"Why" in a docstring is what the authors expected; "in our ablation" is what we measured at small size, with
three seeds (docs/ablations.md, extras/ablate.py).

Map:  ModelConfig | rotary positions: plain, spiral, helix | attention | the cache | norms |
      mixers: plain, Nano's, helix's, Silia's | feed-forwards | blocks | token merging |
      the table of parts | LanguageModel | generation

Letters in the shape comments (in brackets the papers' letter, where it is another one):
  B  sequences in the batch            T  tokens in this chunk
  S  tokens so far, S = past + T       V  vocabulary
  C  width of the residual stream [d]  H  query heads
  K  key/value heads (K = H, or fewer, each shared by a group of G = H/K query heads)
  D  width of a head [d_h]             N  inner width of the feed-forward [d_ff]
  L  layers looked back at [Lambda; the papers' L is the number of layers]
  M  tokens that are left after merging [T']
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from support import need  # need(condition, sentence): a ValueError with this sentence unless it holds

# ----------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class ModelConfig:
    """One field for each choice. The defaults are Wiola Nano; each ablation is a field or two."""

    # Sizes, and which parts (the table of parts below lists the choices)
    vocab_size: int = 32000  # token ids the model knows (V)
    context: int = 1024  # longest window in tokens
    n_layer: int = 6  # blocks
    d_model: int = 256  # width of the residual stream (C)
    n_head: int = 8  # query heads (H)
    n_kv_head: int = 0  # key/value heads (K), each serving n_head / n_kv_head query heads; 0: n_head
    d_head: int = 0  # width of a head (D), even; 0: d_model / n_head
    d_ff: int = 512  # inner width of the feed-forward (N)
    position: str = "spiral"  # rotary tables: rotary (the standard), spiral, mirrored (the other way), helix
    rope_base: float = 10000.0  # how slowly the slowest pair of coordinates turns
    mixer: str = "gated_spiral"  # what mixes tokens: attention, gated_spiral, cross_layer, hydra
    ffn: str = "butterfly"  # feed-forward: gelu, swiglu, butterfly, dual_stream
    norm: str = "rms"  # normalisation: rms, offset_rms, bare_rms
    norm_eps: float = 1e-6  # added to the mean square before its root (bare_rms has its own)
    block: str = "prenorm"  # how a layer is put together: prenorm, silia (of mixer hydra; has no ffn)
    tie_embeddings: bool = True  # the head's matrix is the embedding; false: it has its own
    init: str = "truncated_normal"  # initial weights: truncated_normal, normal, pytorch (what PyTorch does)
    embedding_std: float = 0.02  # deviation of the initial embedding
    weight_std: float = 0.02  # deviation of the other initial matrices; 0: 1/sqrt(n) for n inputs

    # Wiola Nano
    alpha: float = 0.05  # spiral: by what share the slowest pair is sped up; 0 is standard rotary
    gate: bool = True  # gated_spiral: multiply scores by the gate
    gate_after_rotary: bool = False  # gated_spiral: the gate reads the queries after rotation, not before

    # The Wiola helix family
    winding: float = 8.0  # helix: for every so many turns, one extra (k_s)
    radial_amplitude: float = 0.1  # helix: how far the radius swings from 1 (a_s)
    radial_frequency: float = 0.01  # helix: swings of the radius per turn of standard rotary (f_s)
    lookback: int = 2  # cross_layer: how many layers below its own (not tokens back) a token attends to
    phi: float = -3.0  # cross_layer: sigmoid(phi) is the share that those layers get at first
    d_narrow: int = 0  # dual_stream: inner width of its narrow stream (d_ff is the wide one's); 0: d_ff / 4
    token_merging: str = "off"  # merge similar neighbours in training, in the middle layers: off, paper
    merge_threshold: float = 0.92  # cosine above which neighbours merge

    # Silia
    embedding_norm: bool = False  # normalise the embedding as well, without a weight
    sink_token: str = ""  # attention sink: special token put in front of every window and prompt; empty: none

    def __post_init__(self):
        check_config(self)  # below, where the table of parts is
        self.n_kv_head = self.n_kv_head or self.n_head
        self.d_head = self.d_head or self.d_model // self.n_head
        self.d_narrow = self.d_narrow or self.d_ff // 4


# ----------------------------------------------------------------------------------------------------------
# Rotary positions (Su and others, arXiv:2104.09864): a pair of coordinates (i, i + D/2) is a point in the
# plane, rotated by an angle that grows with the token's position. The models differ in the angles only.


def apply_rotary(x, cos, sin):
    """Rotate (the helix also stretches) the pairs of x (B, H, T, D), queries or keys; cos, sin (T, D/2)."""
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D) -> 2 x (B, H, T, D/2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


def rotary_frequencies(config, position):
    """Radians per token of each pair i = 0 .. D/2 - 1: base^(-2i/D), from 1 down. -> (D/2,)

    position says in which dtype and on which device.
    """
    half = config.d_head // 2
    i = torch.arange(half, dtype=position.dtype, device=position.device)
    return config.rope_base ** (-i / half)


def plain_rotary(config, position):
    """Standard rotary positions: at position m, pair i has turned by m base^(-2i/D).

    position (T,) -> cos, sin (T, D/2). The dot product of a rotated query and key then depends on the
    distance of their tokens, not on where both stand.
    """
    angle = position[:, None] * rotary_frequencies(config, position)  # (T, 1), (D/2,) -> (T, D/2)
    return angle.cos(), angle.sin()


def spiral_rotary(config, position):
    """Spiral rotary encoding (Nano paper III.B): pair i turns 1 + alpha sqrt((i + 1) / (D/2)) times as fast.

    position (T,) -> cos, sin (T, D/2). Why: phases that "fan out" should tell distant positions apart more
    easily. The paper says that the fast pairs (small i) get the larger boost; its formula, and this one, give
    it to the slow ones. In our ablation it made no difference.
    """
    half = config.d_head // 2
    i = torch.arange(half, dtype=position.dtype, device=position.device)
    theta = rotary_frequencies(config, position) * (1 + config.alpha * ((i + 1) / half).sqrt())
    angle = position[:, None] * theta
    return angle.cos(), angle.sin()


def mirrored_rotary(config, position):
    """The spiral turned the other way (-sin for sin); with alpha = 0, Silia's rotary.

    A model trained from scratch does not care: swapping the halves of queries and keys has the same effect.
    """
    cos, sin = spiral_rotary(config, position)
    return cos, -sin


def helix_rotary(config, position):
    """Helical rotary encoding, "SRPE" (helix paper 6.2, equations 11-16). For position p and pair j:

        w     = base^(-2j/D)               angle per token in standard rotary positions
        Theta = p w (1 + 1/k_s)            k_s = winding
        r     = 1 + a_s sin(f_s p w)       a_s = radial_amplitude, f_s = radial_frequency

    position (T,) -> r cos Theta, r sin Theta (T, D/2). Why: plain rotary has one scale, language has several
    (parts of words, phrases, paragraphs). The paper speaks of two angles, p w and p w / k_s, but only their
    sum is used: standard rotary, turning 1 + 1/k_s times as fast. New is the radius. It stretches queries and
    keys, so scores depend on where both tokens stand. In our ablation it made no difference.
    """
    turn = position[:, None] * rotary_frequencies(config, position)  # (T, 1), (D/2,) -> (T, D/2)
    angle = turn * (1 + 1 / config.winding)
    radius = 1 + config.radial_amplitude * (turn * config.radial_frequency).sin()
    return radius * angle.cos(), radius * angle.sin()


# ----------------------------------------------------------------------------------------------------------
# Attention: first what it computes, then the fused kernel that computes it


def at_least_float32(x):
    """x in float32, or as it is if that is wider: sums, norms and losses are never kept in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def attention_by_hand(q, k, v):
    """Softmax attention of the last T of S tokens, each to itself and to those before: the definition.

    q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D). Query head h reads key/value head h // (H/K). The
    model uses `causal_attention`, which gives the same without a (T, S) matrix; a test compares the two.
    """
    T, S, group = q.size(2), k.size(2), q.size(1) // k.size(1)
    k = k.repeat_interleave(group, dim=1)  # (B, K, S, D) -> (B, H, S, D)
    v = v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5  # (B, H, T, D) @ (B, H, D, S) -> (B, H, T, S)
    future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)  # query t is token S - T + t
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return weights @ v  # (B, H, T, S) @ (B, H, S, D) -> (B, H, T, D)


def causal_attention(q, k, v):
    """The same as `attention_by_hand`, fused: no (T, S) matrix in training.

    A chunk that continues a sequence (1 < T < S) needs the causal triangle at the lower right; `is_causal`
    would put it at the upper left. One token sees all. (On CUDA, with K < H, the fused kernels take half
    precision and a recent GPU.)
    """
    if q.is_cpu and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):  # entered only where it is needed: it is slow to enter
            return causal_attention(q, k, v)
    T, S = q.size(2), k.size(2)
    mask = None
    if 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    options = {"attn_mask": mask, "is_causal": 1 < T == S, "enable_gqa": q.size(1) != k.size(1)}
    if not q.is_cpu:
        return F.scaled_dot_product_attention(q, k, v, **options)
    # A CPU's fused kernel is faster in float32 than in bfloat16.
    return F.scaled_dot_product_attention(*map(at_least_float32, (q, k, v)), **options).type_as(q)


def split_heads(x, d_head):
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.unflatten(-1, (-1, d_head)).transpose(1, 2)


def join_heads(x):
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


# ----------------------------------------------------------------------------------------------------------
# The cache, and its stand-in for training


class NoCache:
    """The past of a pass over whole sequences: nothing came before, and nothing is kept."""

    length, capacity = 0, float("inf")
    whole = True  # each pass is over a whole sequence (token merging, for training only, needs that)

    def append(self, name, x):
        """x (B, K, T, D) -> x: the rows of this chunk are all rows."""
        return x

    def running_sum(self, name, x):
        """x (B, T, ...) -> inclusive prefix sums over T, same shape, float32 or wider."""
        return at_least_float32(x).cumsum(dim=1)

    def rotary(self, make, T):
        """make(start, T) -> tables: those of a chunk that starts at position 0."""
        return make(0, T)

    def advance(self, idx):
        pass


class Cache:
    """The past in decoding: `append` and `running_sum` answer as if all chunks so far had come as one.

    Rows are written in place into buffers of `capacity` tokens, made when a name is first used; sums are
    carried over. All layers write at the same place, so `length` moves once, by `advance`, at the end of a
    pass. Made for decoding: no gradient flows through it. `dtype` is that of the rows, by default that of
    what is appended first.
    """

    whole = False

    def __init__(self, capacity, dtype=None):
        self.capacity, self.dtype = capacity, dtype
        self.tables = None  # rotary tables (capacity, D/2) of all positions
        self.reset()

    def reset(self):
        self.length = 0  # tokens so far
        self.tokens = None  # (B, length): their ids, so that a full cache can be refilled
        self.rows = {}  # name -> (B, K, capacity, D)
        self.sums = {}  # name -> (B, 1, ...)
        self.new_sums = {}  # of the pass under way: should it fail and be repeated, nothing is added twice

    def append(self, name, x):
        """Keep the rows x (B, K, T, D); return all rows so far, (B, K, length + T, D)."""
        B, K, T, D = x.shape
        if name not in self.rows:
            self.rows[name] = x.new_empty(B, K, self.capacity, D, dtype=self.dtype)
        end = self.length + T
        self.rows[name][:, :, self.length : end] = x.detach()
        return self.rows[name][:, :, :end]

    def running_sum(self, name, x):
        """x (B, T, ...) -> prefix sums that continue those of earlier tokens, float32 or wider."""
        total = at_least_float32(x).cumsum(dim=1) + self.sums.get(name, 0)
        self.new_sums[name] = total[:, -1:].detach().clone()
        return total

    def rotary(self, make, T):
        """make(start, T) -> tables: those of this chunk's positions. Made once for all, then looked up."""
        if self.tables is None:
            self.tables = make(0, self.capacity)
        return [table[self.length : self.length + T] for table in self.tables]

    def advance(self, idx):
        """Count the tokens idx (B, T), which all layers have seen."""
        self.tokens = torch.cat([idx] if self.tokens is None else [self.tokens, idx], dim=1)
        self.length += idx.size(1)
        self.sums.update(self.new_sums)


def running_mean(past, name, x):
    """Mean over all tokens up to and including each one. (B, T, n) -> the same shape, float32 or wider."""
    count = torch.arange(past.length + 1, past.length + x.size(1) + 1, device=x.device)
    return past.running_sum(name, x) / count[:, None]  # (B, T, n) / (T, 1)


# ----------------------------------------------------------------------------------------------------------
# Norms


def rms_norm(config):
    """y = weight * x / sqrt(mean(x^2) + eps), the mean over the last dimension (Nano paper III.A)."""
    return nn.RMSNorm(config.d_model, config.norm_eps)


def unit_rms(x):
    """x / sqrt(mean(x^2) + eps), no weight, in float32 or wider; eps: that type's machine epsilon (Silia)."""
    return F.rms_norm(at_least_float32(x), x.shape[-1:]).type_as(x)


def bare_rms_norm(config):
    """Return `unit_rms`, for the table of parts: without a weight there is nothing to build."""
    return unit_rms


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm of x + offset, where offset is a learned vector: "WiolaRMSNorm" (helix paper 5, equation 9).

    Why: rescaling alone cannot move a layer's zero point, which deep stacks may need against collapse of
    their states. Computed in float32: in bfloat16, 256 + 1 = 256.
    """

    def __init__(self, config):
        super().__init__(config.d_model, config.norm_eps)
        self.offset = nn.Parameter(torch.zeros(config.d_model))

    def forward(self, x):
        z = at_least_float32(x) + self.offset
        return (self.weight * F.rms_norm(z, self.normalized_shape, eps=self.eps)).type_as(x)


# ----------------------------------------------------------------------------------------------------------
# Mixers: x (B, T, C), rotary tables, past, summaries -> (B, T, C); the only parts that look at other tokens.
# `name` tells the layers apart in the cache. `summaries` are running means of the outputs of the layers
# below, (B, T, C) each; a model makes them only if its mixer says that it `reads_summaries`.


class Attention(nn.Module):
    """Plain causal attention with rotary positions, the baseline. Head h of token t:

        sum over s <= t of softmax_s(q_t . k_s / sqrt(D)) v_s,    and W_out joins the heads
    """

    reads_summaries = False

    def __init__(self, config, name):
        super().__init__()
        self.name, self.d_head = name, config.d_head
        self.heads = [config.n_head, config.n_kv_head, config.n_kv_head]  # of queries, keys, values
        self.sizes = [n * self.d_head for n in self.heads]
        self.qkv = nn.Linear(config.d_model, sum(self.sizes), bias=False)  # W_q, W_k, W_v in one product
        self.out = nn.Linear(self.sizes[0], config.d_model, bias=False)

    def project(self, x):
        """(B, T, C) -> queries (B, H, T, D), keys and values (B, K, T, D)"""
        return split_heads(self.qkv(x), self.d_head).split(self.heads, dim=1)

    def attend(self, q, k, v, past):
        """Rotated queries and keys of this chunk, and its values -> output of each head, (B, H, T, D)"""
        k = past.append(self.name + ".key", k)  # (B, K, T, D) -> (B, K, S, D)
        v = past.append(self.name + ".value", v)
        return causal_attention(q, k, v)

    def forward(self, x, rotary, past, summaries=()):
        q, k, v = self.project(x)
        heads = self.attend(apply_rotary(q, *rotary), apply_rotary(k, *rotary), v, past)
        return self.out(join_heads(heads))


class GatedSpiralAttention(Attention):
    """Gated Spiral Attention (Nano paper III.C): head h multiplies all scores of token t by one gate g_t^h.

        c_t = 1/(t+1) sum_{s<=t} 1/H sum_h q_s^h               running mean of the head-mean query
        g_t = sigmoid(W_2 SiLU(W_1 c_t) + b_2)                 in (0, 1), one for each head
        head h: sum over s <= t of softmax_s(g_t^h q_t^h . k_s^h / sqrt(D)) v_s^h

    Why: a head that does not help should be able to suppress itself, a soft selection of heads. In fact a
    gate is an inverse temperature: near 1 the head attends as usual, near 0 it returns the plain mean of the
    values so far (it does not fall silent). In our ablation models without it were as good.

    A sum and a count are enough to continue from, so decoding has the same gates as training. And since g
    scales a whole row of scores, g (q . k) = (g q) . k: folded into the query, the fused kernels still apply.
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

    def forward(self, x, rotary, past, summaries=()):
        q, k, v = self.project(x)
        rotated, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if self.gate is not None:
            source = rotated if self.after_rotary else q  # q: what the tokens are, not where they stand
            c = running_mean(past, self.name + ".query", source.mean(dim=1))  # (B, H, T, D) -> (B, T, D)
            g = self.gate(c.type_as(x))  # (B, T, D) -> (B, T, H)
            rotated = rotated * g.transpose(1, 2)[..., None]  # g as (B, H, T, 1)
        return self.out(join_heads(self.attend(rotated, k, v, past)))


class CrossLayerAttention(Attention):
    """Gated cross-layer attention, "GCLA" (helix paper 7). With beta = sigmoid(phi), head h and output are

        o_h = (1 - beta) softmax(q_h . K / sqrt(D)) V  +  beta softmax(q_h . K' / sqrt(D)) V'
        y   = W_out (sigmoid(W_gate x) * [o_1; ..; o_H])

    K and V come from the tokens so far; K' = W_K' s and V' = W_V' s from summaries s of the L layers below.
    Why: a cheap way for layers to hand information on, for coherence over long texts. In our ablation models
    without the summaries were as good.

    Token t sees L vectors, the running means up to t of those layers' outputs, as in the published code. The
    paper's mean over the whole sequence (equation 20) would show each token the future, and could not be
    cached. The queries are rotated and K' is not (equation 26): these scores depend on the absolute position.
    The first layer has nothing below it: no blend, and W_K', W_V' and phi are unused in it.
    """

    reads_summaries = True

    def __init__(self, config, name):
        super().__init__(config, name)
        self.gate = nn.Linear(config.d_model, self.sizes[0], bias=False)
        self.kv_summary = nn.Linear(config.d_model, 2 * self.sizes[1], bias=False)  # W_K', W_V' in one
        self.phi = nn.Parameter(torch.tensor(float(config.phi)))

    def attend_to_summaries(self, q, summaries):
        """q (B, H, T, D), rotated; L summaries (B, T, C) -> (B, H, T, D): a token reads its own L vectors."""
        s = torch.stack(summaries, dim=2).type_as(q)  # (B, T, L, C)
        kv = self.kv_summary(s).unflatten(-1, (2, -1, self.d_head))  # (B, T, L, 2*K*D) -> (B, T, L, 2, K, D)
        k, v = kv.unbind(3)  # 2 x (B, T, L, K, D)
        q = q.unflatten(1, (k.size(3), -1))  # (B, H, T, D) -> (B, K, G, T, D)
        scores = torch.einsum("bkgtd,btlkd->bkgtl", q, k) / self.d_head**0.5
        weights = at_least_float32(scores).softmax(dim=-1).type_as(v)
        return torch.einsum("bkgtl,btlkd->bkgtd", weights, v).flatten(1, 2)

    def forward(self, x, rotary, past, summaries=()):
        q, k, v = self.project(x)
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        heads = self.attend(q, k, v, past)
        if summaries:
            beta = self.phi.sigmoid()
            heads = (1 - beta) * heads + beta * self.attend_to_summaries(q, summaries)
        return self.out(self.gate(x).sigmoid() * join_heads(heads))


class HydraAttention(nn.Module):
    """Hydra latent attention (Silia v2): two kinds of heads, alternating. q, k, v of all heads come from one
    latent vector of width C, W_qkv W_latent n(x), where n is the RMS norm without weight. R is the rotary
    rotation, for the even heads only: a sum has no order. W_out joins the heads.

        even heads, "XLA": softmax attention, gated (arXiv:2505.06708) and exclusive (arXiv:2603.09078)
              a_t = sigmoid(W_gate n(x) + b) * sum over s <= t of softmax_s(n(R q_t) . n(R k_s) / sqrt(D)) v_s
              y_t = a_t without its part along v_t
        odd heads, "AFT": an attention-free transformer (arXiv:2105.14103)
              y_t = sigmoid(n(q_t)) * sum_{s<=t} exp(n(k_s)) v_s / (sum_{s<=t} exp(n(k_s)) + 1e-6)

    Why exclusive: a head's output tends to point along the token's own value, which the residual stream
    carries anyway; what is left is what the other tokens say. Why attention-free: the odd heads keep two
    sums, a state of fixed size, however long the text is. The squares of n(k) add up to D,
    so no coordinate is above sqrt(D) and exp cannot overflow. (The model card does not spell out XLA.)

    Unlike other mixers this one norms its input itself, and it can change the width, from d_in to d_out.
    """

    reads_summaries = False

    def __init__(self, config, name, d_in=0, d_out=0):
        super().__init__()
        self.name, self.d_head = name, config.d_head
        d_in, inner = d_in or config.d_model, config.n_head * config.d_head
        self.latent = nn.Linear(d_in, config.d_model, bias=False)
        self.qkv = nn.Linear(config.d_model, 3 * inner, bias=False)  # rows: head by head its q, k, v
        self.gate = nn.Linear(d_in, inner // 2)
        self.out = nn.Linear(inner, d_out or config.d_model, bias=False)

    def forward(self, x, rotary, past, summaries=()):
        h = unit_rms(x)
        qkv = self.qkv(self.latent(h)).unflatten(-1, (-1, 3, self.d_head))  # (B, T, 3*H*D) -> (B, T, H, 3, D)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)  # 3 x (B, H, T, D)
        gate = split_heads(self.gate(h).sigmoid(), self.d_head)  # (B, T, H/2*D) -> (B, H/2, T, D)
        even = self.softmax_heads(q[:, 0::2], k[:, 0::2], v[:, 0::2], gate, rotary, past)  # (B, H/2, T, D)
        odd = self.sum_heads(q[:, 1::2], k[:, 1::2], v[:, 1::2], past)
        heads = torch.stack([even, odd], dim=2).flatten(1, 2)  # alternating again: (B, H, T, D)
        return self.out(join_heads(heads))

    def softmax_heads(self, q, k, v, gate, rotary, past):
        """Even heads: q, k, v, gate (B, H/2, T, D) -> y, the same shape"""
        q, k = unit_rms(apply_rotary(q, *rotary)), unit_rms(apply_rotary(k, *rotary))
        keys, values = past.append(self.name + ".key", k), past.append(self.name + ".value", v)
        a = gate * causal_attention(q, keys, values)
        own = F.normalize(at_least_float32(v), dim=-1).type_as(v)
        return a - (a * own).sum(dim=-1, keepdim=True) * own

    def sum_heads(self, q, k, v, past):
        """Odd heads: q, k, v (B, H/2, T, D) -> y, the same shape"""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, T, H/2, D), as sums are kept
        weight = at_least_float32(unit_rms(k)).exp()
        total = past.running_sum(self.name + ".weight", weight)
        mean = past.running_sum(self.name + ".weighted", weight * v) / (total + 1e-6)
        return (unit_rms(q).sigmoid() * mean.type_as(q)).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------
# Feed-forwards: (B, T, C) -> (B, T, C), each token by itself. The matrices that lead up are one product.


class GELU(nn.Module):
    """W_down GELU(W_up x), the feed-forward of GPT-2 without biases. 2 C N parameters."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    """W_down (SiLU(gate) * up) (Shazeer, arXiv:2002.05202): the feed-forward of Llama. 3 C N parameters."""

    def __init__(self, config, width=0):
        super().__init__()
        width = width or config.d_ff
        self.up = nn.Linear(config.d_model, 2 * width, bias=False)
        self.down = nn.Linear(width, config.d_model, bias=False)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)  # (B, T, 2*N) -> 2 x (B, T, N)
        return self.down(F.silu(gate) * up)


class Butterfly(nn.Module):
    """W_down (SiLU(gate) * up + bypass) (Nano paper III.D): a SwiGLU with a linear path. 4 C N parameters.

    Why: the bypass is to help gradients through when there are few layers. In our ablation a SwiGLU of as
    many parameters (its N 4/3 as large) was as good.
    """

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.d_model, 3 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        gate, up, bypass = self.up(x).chunk(3, dim=-1)  # (B, T, 3*N) -> 3 x (B, T, N)
        return self.down(F.silu(gate) * up + bypass)


class DualStream(nn.Module):
    """Two streams side by side, "DSFF" (helix paper 9): a = SwiGLU(x), narrow, and b = GELU(x), wide; of them
    alpha * a + (1 - alpha) * b, where alpha = sigmoid(W_f [a; b]) has one weight for each coordinate.
    3 C N_a + 2 C N_b + 2 C^2 parameters, N_a = d_narrow, N_b = d_ff.

    Why: one stream for local patterns, one for the meaning of the whole, and each coordinate takes its share.
    In our ablation one SwiGLU of as many parameters was as good.
    """

    def __init__(self, config):
        super().__init__()
        self.narrow = SwiGLU(config, config.d_narrow)
        self.wide = GELU(config)
        self.fuse = nn.Linear(2 * config.d_model, config.d_model, bias=False)

    def forward(self, x):
        a, b = self.narrow(x), self.wide(x)
        alpha = self.fuse(torch.cat([a, b], dim=-1)).sigmoid()
        return alpha * a + (1 - alpha) * b


# ----------------------------------------------------------------------------------------------------------
# Blocks: x (B, T, C), rotary tables, past, summaries -> (B, T, C)


class PreNormBlock(nn.Module):
    """x = x + Mixer(Norm(x)), then x = x + FFN(Norm(x)) (Llama; both Wiolas)."""

    def __init__(self, config, layer):
        super().__init__()
        self.norm_1 = PARTS["norm"][config.norm](config)
        self.mixer = PARTS["mixer"][config.mixer](config, str(layer))
        self.norm_2 = PARTS["norm"][config.norm](config)
        self.ffn = PARTS["ffn"][config.ffn](config)

    def mix(self, x, rotary, past, summaries):
        return self.mixer(x, rotary, past, summaries)

    def forward(self, x, rotary, past, summaries=()):
        x = x + self.mix(self.norm_1(x), rotary, past, summaries)
        return x + self.ffn(self.norm_2(x))


class SiliaBlock(nn.Module):
    """x = x + Unit_2(u * SiLU(v)), with [u; v] = Unit_1(x): attention inside the SwiGLU (Silia v2).

    The card does not say why. As we read it, a tiny model should not pay for two kinds of layers.
    """

    def __init__(self, config, layer):
        super().__init__()
        mixer = PARTS["mixer"][config.mixer]
        self.unit_1 = mixer(config, f"{layer}.1", config.d_model, 2 * config.d_ff)
        self.unit_2 = mixer(config, f"{layer}.2", config.d_ff, config.d_model)

    def forward(self, x, rotary, past, summaries=()):
        u, v = self.unit_1(x, rotary, past).chunk(2, dim=-1)  # (B, T, 2*N) -> 2 x (B, T, N)
        return x + self.unit_2(u * F.silu(v), rotary, past)


# ----------------------------------------------------------------------------------------------------------
# Token merging, "ATM" (helix paper 8). In training, two neighbours that are nearly the same go through the
# mixer of a middle layer as one vector, their average, and both get its output. (The feed-forward still sees
# them all.) Why: fewer tokens, less work. But then the first of a pair sees the second, the very token that
# it is to predict. The published method has this leak; here it is off unless a config asks for it.


def greedy_pairs(x, threshold):
    """x (B, T, C) -> (B, T): True where a token merges with the one before it.

    The greedy scan of Algorithm 4 goes from left to right and pairs similar tokens not yet paired. In a run
    of similar neighbours these are the first two, the next two, ...: a token's offset from the start of its
    run decides, and the start is a running maximum. No loop over tokens. With B = 1, for example,

        similar = [0 1 1 0 1]  ->  start = [0 0 0 3 3], t - start = [0 1 2 0 1], second = [0 1 0 0 1]
    """
    x = at_least_float32(x)
    dot = torch.linalg.vecdot(x[:, 1:], x[:, :-1])  # (B, T - 1)
    norm = torch.linalg.vecdot(x, x).sqrt()  # (B, T)
    similar = dot > threshold * norm[:, 1:] * norm[:, :-1]  # (B, T - 1): the cosine, without dividing
    similar = F.pad(similar, (1, 0))  # (B, T): like the token before? The first has none
    t = torch.arange(x.size(1), device=x.device)
    start = torch.where(similar, 0, t).cummax(dim=1).values  # (B, T): where its run starts
    return (t - start) % 2 == 1


def take(x, index):
    """Rows of x (B, T, C) by index (B, M) -> (B, M, C)"""
    return x.gather(1, index[..., None].expand(-1, -1, x.size(-1)))


def mix_merged(mixer, second, x, rotary, past, summaries):
    """The mixer on pairs merged into one; second (B, T) is True for a token that joins the one before it.

    Merged tokens are numbered anew from 0, so they are rotated by smaller angles than at inference. A pair
    has the summaries of its last token. Sequences that merge more are padded at the end, with some of their
    second tokens, which no token sees (attention is causal) and which are not copied back. For example,

        second = [0 1 0 0 1]  ->  M = 3, first = [0 2 3], last = [1 2 4], group = [0 0 1 2 2]
    """
    M = int((~second).sum(dim=1).max())
    first = second.int().argsort(dim=1, stable=True)[:, :M]  # (B, M): a pair's first token, or the only one
    joined = second.roll(-1, 1)  # (B, T): does the next token join this one? second[:, 0], False, comes last
    last = first + joined.gather(1, first)  # (B, M): of each pair its last token
    merged = (take(x, first) + take(x, last)) / 2
    summaries = [take(summary, last) for summary in summaries]
    mixed = mixer(merged, [table[:M] for table in rotary], past, summaries)
    group = (~second).cumsum(dim=1) - 1  # (B, T): the number of each token's pair
    return take(mixed, group)


class MergingBlock(PreNormBlock):
    """A PreNormBlock that merges tokens in training, if it is one of the layers n/3 .. 2n/3 - 1 of n.

    `merge_ratio` is the share of tokens that the last pass merged away, the paper's mu.
    """

    def __init__(self, config, layer):
        super().__init__(config, layer)
        middle = config.n_layer // 3 <= layer < 2 * config.n_layer // 3
        self.find_pairs = PARTS["token_merging"][config.token_merging] if middle else None
        self.merge_threshold = config.merge_threshold
        self.merge_ratio = 0.0

    def mix(self, x, rotary, past, summaries):
        if not (self.find_pairs and self.training and past.whole):
            return self.mixer(x, rotary, past, summaries)
        second = self.find_pairs(x.detach(), self.merge_threshold)
        self.merge_ratio = second.float().mean()
        return mix_merged(self.mixer, second, x, rotary, past, summaries)


def prenorm_block(config, layer):
    """A PreNormBlock, or with token merging a MergingBlock."""
    return PreNormBlock(config, layer) if config.token_merging == "off" else MergingBlock(config, layer)


# ----------------------------------------------------------------------------------------------------------
# The table of parts: the choices for each field of ModelConfig that names one. A new part is one class (or
# function) and one line here. They are called as
#   position(config, position)    norm, ffn(config)    mixer(config, name)    block(config, layer)
#   token_merging(x, threshold)   init(weight, std=std)
# and in block="silia" mixer(config, name, d_in, d_out), since its units change the width.


def truncated_normal(weight, std):
    """Fill with a normal of deviation std, cut at two deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


PARTS = {
    "position": {"rotary": plain_rotary, "spiral": spiral_rotary, "mirrored": mirrored_rotary,
                 "helix": helix_rotary},
    "norm": {"rms": rms_norm, "offset_rms": OffsetRMSNorm, "bare_rms": bare_rms_norm},
    "mixer": {"gated_spiral": GatedSpiralAttention, "cross_layer": CrossLayerAttention,
              "hydra": HydraAttention, "attention": Attention},
    "ffn": {"gelu": GELU, "swiglu": SwiGLU, "butterfly": Butterfly, "dual_stream": DualStream},
    "block": {"prenorm": prenorm_block, "silia": SiliaBlock},
    "token_merging": {"off": None, "paper": greedy_pairs},
    "init": {"truncated_normal": truncated_normal, "normal": nn.init.normal_, "pytorch": None},
}


def check_config(c):
    """ValueError, in a sentence, if the fields of a ModelConfig do not go together."""
    for name, parts in PARTS.items():
        value = getattr(c, name)
        need(value in parts, f"{name}={value!r} is unknown; choices: {', '.join(parts)}.")
    for name in ("vocab_size", "context", "n_layer", "d_model", "n_head", "d_ff", "rope_base", "winding",
                 "norm_eps", "embedding_std"):
        need(getattr(c, name) > 0, f"{name} must be above 0, not {getattr(c, name)}.")
    K, D = c.n_kv_head or c.n_head, c.d_head or c.d_model // c.n_head
    need(K >= 1 and c.n_head % K == 0, f"n_kv_head={c.n_kv_head} does not divide n_head={c.n_head}.")
    need(c.d_head or c.d_model % c.n_head == 0,
         f"n_head={c.n_head} does not divide d_model={c.d_model}; set d_head.")
    need(D >= 2 and D % 2 == 0, f"d_head={D} must be even: positions turn pairs of coordinates.")
    need(c.ffn != "dual_stream" or (c.d_narrow or c.d_ff // 4) >= 1,
         f"d_narrow={c.d_narrow} with d_ff={c.d_ff} leaves no narrow stream.")
    hydra = issubclass(PARTS["mixer"][c.mixer], HydraAttention)
    need(not hydra or K == c.n_head,
         f"n_kv_head={c.n_kv_head} is not for mixer={c.mixer!r}: each head has its own.")
    need(not hydra or c.n_head % 2 == 0,
         f"n_head={c.n_head} must be even with mixer={c.mixer!r}: half attend, half sum.")
    need(c.block != "silia" or hydra, f"block='silia' is made of mixer='hydra', not {c.mixer!r}.")
    need(c.block != "silia" or c.token_merging == "off",
         f"token_merging={c.token_merging!r} is not for block='silia'.")
    need(c.weight_std >= 0, f"weight_std={c.weight_std} must not be negative.")
    need(-1 <= c.merge_threshold <= 1, f"merge_threshold={c.merge_threshold} is a cosine, between -1 and 1.")
    need(c.lookback >= 0, f"lookback={c.lookback} must not be negative.")


# ----------------------------------------------------------------------------------------------------------
# The language model


def chunked_cross_entropy(x, weight, targets):
    """The mean cross-entropy of logits x W^T, 1,024 tokens at a time: never all logits at once.

    x (B, T, C), weight (V, C), targets (B, T), -100 is ignored -> a number. The same as forming the logits,
    in much less memory: with V = 32,000 they are the largest tensor of a training step. "accurate" adds up in
    float32. (F.linear_cross_entropy is new in PyTorch 2.13.)
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):  # it has no rule of its own for this function
        dtype = torch.get_autocast_dtype(device)
        x, weight = x.to(dtype), weight.to(dtype)
    options = nn.LinearCrossEntropyOptions(acc_policy="accurate", chunking_method=None, batch_chunk_size=1024)
    return F.linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), options=options)


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head: logits = Norm(x) E^T, where E is the embedding, if tied (Nano III.E)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # in training, recompute each block in backward: less memory
        self.chunked_loss = False  # compute the loss piece by piece and no logits: much less memory
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        block = PARTS["block"][config.block]
        self.blocks = nn.ModuleList(block(config, layer) for layer in range(config.n_layer))
        self.norm = PARTS["norm"][config.norm](config)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        reads = PARTS["mixer"][config.mixer].reads_summaries
        self.lookback = min(config.lookback, config.n_layer - 1) if reads else 0
        self.apply(self.init_weights)

    def init_weights(self, module):
        """As published: a normal of deviation 0.02, for Nano cut at two deviations; biases 0. Silia's
        weights stay as PyTorch makes them (init="pytorch").

        0.02 is GPT-2's, right for some 2,500 inputs. With weight_std=0 a product is as large as its input
        whatever the width: a run of config/tiny.py with --max_steps=2500 ends at 0.353 nats per token, not at
        0.442; one of its whole length is no better for it.
        """
        fill = PARTS["init"][self.config.init]
        if fill is None:
            return
        if isinstance(module, nn.Embedding):
            fill(module.weight, std=self.config.embedding_std)
        if isinstance(module, nn.Linear):
            fill(module.weight, std=self.config.weight_std or module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @property
    def head_weight(self):  # (V, C)
        return self.embedding.weight if self.head is None else self.head.weight

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

    def run_blocks(self, idx, past):
        """Token ids (B, T) -> output of the last block (B, T, C)"""
        rotary = past.rotary(self.rotary, idx.size(1))
        x = self.embedding(idx)  # (B, T) -> (B, T, C)
        if self.config.embedding_norm:
            x = unit_rms(x)
        summaries = []  # of the last `lookback` layers: running means of their outputs, (B, T, C) each
        for layer, block in enumerate(self.blocks):
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, rotary, past, summaries, use_reentrant=False)
            else:
                x = block(x, rotary, past, summaries)
            if self.lookback and layer < len(self.blocks) - 1:  # no layer reads a summary of the last one
                summaries = [*summaries, running_mean(past, f"{layer}.output", x)][-self.lookback:]
        return x

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """Token ids idx (B, T) -> logits (B, T, V), or (B, 1, V) with last_only; and the mean loss, or None.

        targets (B, T): the token after each; -100 is ignored; nothing is shifted here. With chunked_loss and
        targets, logits are None. With a cache, idx continues from where the last call stopped, and tokens are
        never merged. ValueError when the context is exceeded.
        """
        T, past = idx.size(1), cache or NoCache()
        limit = min(self.config.context, past.capacity)
        if not 1 <= T <= limit - past.length:  # spelt out: torch.compile cannot build the sentence beforehand
            raise ValueError(f"{T} tokens after {past.length} do not fit a context of {limit}.")
        x = self.run_blocks(idx, past)  # (B, T) -> (B, T, C)
        past.advance(idx)
        x = self.norm(x[:, -1:] if last_only else x)
        if targets is not None and self.chunked_loss:
            return None, chunked_cross_entropy(x, self.head_weight, targets)
        logits = F.linear(x, self.head_weight)  # (B, T, C) -> (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(at_least_float32(logits).flatten(0, 1), targets.flatten())

    def merge_ratio(self):
        """The share of tokens that the last training pass merged away, a mean over the layers that merge."""
        ratios = [block.merge_ratio for block in self.blocks if getattr(block, "find_pairs", None)]
        return float(sum(ratios) / max(1, len(ratios)))

    @torch.no_grad()
    def generate(self, prompt, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None,
                 n_ids=None, cache=None):
        """Continue prompt (B, T): a generator that yields one column of new ids (B, 1) at a time.

        Only ids below n_ids are drawn (None: all): a model may have more rows than its tokenizer has tokens.
        Pass a cache to continue from an earlier call; prompt is then what the cache has not seen, beginning
        with the last id that was drawn. When the context is full, or a prompt too long, the cache is filled
        anew with the last half window: computing a full window at each step would be slow. With a sink_token,
        the first prompt must begin with it; it stays in front.
        """
        cache = cache or Cache(self.config.context)
        unread = prompt  # ids that the cache has not seen yet
        for _ in range(max_new_tokens):
            if cache.length + unread.size(1) > self.config.context:
                everything = unread if cache.tokens is None else torch.cat([cache.tokens, unread], dim=1)
                unread = everything[:, -max(1, self.config.context // 2):]
                if self.config.sink_token:
                    unread = torch.cat([everything[:, :1], unread[:, 1:]], dim=1)
                cache.reset()
            logits, _ = self(unread, cache=cache, last_only=True)
            drawn = sample_token(logits[:, -1, :n_ids], temperature, top_k, top_p, generator)
            yield drawn
            unread = drawn


def sample_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token id for each row of logits (B, V) -> (B, 1).

    temperature 0 takes the likeliest. top_k keeps exactly k tokens, ties or not (0 or None: all). top_p, in
    (0, 1], keeps the likeliest tokens up to and including the one at which their probabilities add up to p.
    ValueError beyond these limits.
    """
    need(temperature >= 0, f"temperature={temperature} must be 0 or more.")
    need((top_k or 0) >= 0, f"top_k={top_k} must be 0 (off) or more.")
    need(0 < top_p <= 1, f"top_p={top_p} must be above 0 and at most 1.")
    logits = at_least_float32(logits)
    if temperature < 1e-6:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits / temperature
    if not top_k and top_p >= 1:
        return draw(logits.softmax(dim=-1), generator)  # sorting would cost more
    V = logits.size(-1)
    logits, ids = logits.topk(min(top_k or V, V))  # (B, V) -> (B, k), likeliest first
    probs = logits.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    mass_before[:, 0] = 0  # exactly, so that one token always stays
    probs = probs.masked_fill(mass_before >= top_p, 0)
    return ids.gather(-1, draw(probs, generator))


def draw(probs, generator=None):
    """Draw an index for each row of probs (B, n), which need not add up to 1 -> (B, 1).

    It is the first whose running sum exceeds a uniform number. torch.multinomial would draw n random numbers:
    with n = 32,000 that takes as long as two layers.
    """
    exact = torch.float32 if probs.device.type == "mps" else torch.float64
    sums = probs.cumsum(dim=-1, dtype=exact)
    total = sums[:, -1:]
    x = total * torch.rand(total.shape, dtype=exact, device=probs.device, generator=generator)  # below total
    return torch.searchsorted(sums, x, right=True)
