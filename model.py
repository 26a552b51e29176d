"""
Small language models in one file, to be read from the top.

The model here is Wiola Nano (Chowdhury, Oosa, Reddy, arXiv:2608.14604; "the paper" below): a decoder-only
transformer of 12,915,888 parameters. What differs from GPT-2 or Llama, in the order of this file:

- Rotary positions whose frequencies fan out a little, the "spiral" (paper III.B).
- Attention scores multiplied by one number per head and token, a gate that reads the running mean of all
  queries so far (III.C). It may look at the past only, and it must be the same number whether a text is
  read at once or token by token.
- A feed-forward with a product *and* a linear bypass inside, the "butterfly" (III.D).
- One memory, with two verbs, for training and for decoding. Everything in this file that looks at the past
  is a list of rows (keys, values) or a running sum (the gate's mean), so every layer is written once:

      past.append(name, x)         all rows so far, this chunk's included
      past.running_sum(name, x)    sums over all tokens so far, this chunk's included

  `NoCache` answers as if nothing came before (training); `Cache` remembers (decoding). A text can be fed in
  chunks of any lengths and gives the same logits: to 1e-10 in float64, to rounding in float32.

Map:  ModelConfig | rotary tables | memory | causal attention | norm | mixers | feed-forwards | block |
      the table of parts | sampling one token | LanguageModel

Letters in the shape comments; the paper's letter in brackets where it differs:
  B  sequences in the batch            T  tokens in this chunk
  S  tokens so far, S = past + T       V  vocabulary
  C  width of the residual stream [d]  H  query heads
  K  key/value heads (K = H unless they are shared between groups of query heads)
  D  width of a head [d_h]             F  inner width of the feed-forward [d_ff]
"""

import difflib
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
    """One field for each choice. The defaults are Wiola Nano; each ablation of the paper is one field."""

    vocab_size: int = 32000  # token ids the model knows (V)
    context: int = 1024  # longest window in tokens
    n_layer: int = 6  # blocks
    d_model: int = 256  # width of the residual stream (C)
    n_head: int = 8  # query heads (H)
    n_kv_head: int = 0  # key/value heads (K), each serving n_head / n_kv_head query heads; 0: n_head
    d_head: int = 0  # width of a head (D), even; 0: d_model / n_head
    d_ff: int = 512  # inner width of the feed-forward (F)
    position: str = "spiral"  # rotary tables: spiral
    rope_base: float = 10000.0  # the slowest pair turns about this many times slower than the fastest
    alpha: float = 0.05  # how far the spiral's frequencies fan out; 0 is standard rotary
    mixer: str = "gated_spiral"  # what mixes tokens: gated_spiral, attention
    gate: bool = True  # gated_spiral: multiply scores by the gate
    gate_after_rotary: bool = False  # gated_spiral: the gate reads the queries after rotation, not before
    ffn: str = "butterfly"  # feed-forward: butterfly, swiglu, gelu
    norm: str = "rms"  # normalisation: rms
    norm_eps: float = 1e-6  # added to the mean square before its root
    block: str = "prenorm"  # how a layer is put together: prenorm

    def __post_init__(self):
        for name in ("vocab_size", "context", "n_layer", "d_model", "n_head", "d_ff"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name, parts in PARTS.items():
            choice = getattr(self, name)
            if choice not in parts:
                close = difflib.get_close_matches(choice, parts, n=1)
                hint = f"did you mean {close[0]!r}? " if close else ""
                raise ValueError(f"{name}={choice!r} is unknown; {hint}Choices: {', '.join(parts)}.")
        if self.d_head == 0:
            if self.d_model % self.n_head:
                raise ValueError(f"n_head={self.n_head} does not divide d_model={self.d_model}; set d_head.")
            self.d_head = self.d_model // self.n_head
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.d_head < 2 or self.d_head % 2:
            raise ValueError(f"d_head={self.d_head} must be even: positions turn pairs of coordinates.")
        if not 1 <= self.n_kv_head <= self.n_head or self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head} does not divide n_head={self.n_head}.")
        if not self.rope_base > 0:
            raise ValueError(f"rope_base must be above 0, not {self.rope_base}.")
        if not self.norm_eps > 0:
            raise ValueError(f"norm_eps must be above 0, not {self.norm_eps}.")


# ----------------------------------------------------------------------------------------------------------
# Positions: a pair of coordinates (j, j + D/2) is a point in the plane, turned by an angle that grows with
# the token's position. Models differ in the two tables only, never in the rotation.


def spiral_rotary(config, position):
    """Tables of the spiral rotary encoding (paper III.B), for positions m and pairs i = 0 .. D/2 - 1:

        angle_i(m) = m * base^(-2i/D) * (1 + alpha * sqrt((i + 1) / (D/2)))

    position (T,) -> cos, sin (T, D/2). alpha = 0 is standard rotary. The paper says that the fast pairs get
    the larger boost; by its own formula, which this is, the slow ones do.
    """
    half = config.d_head // 2
    i = torch.arange(half, dtype=position.dtype, device=position.device)
    theta = config.rope_base ** (-i / half) * (1 + config.alpha * ((i + 1) / half).sqrt())
    angle = position[:, None] * theta  # (T,), (D/2,) -> (T, D/2)
    return angle.cos(), angle.sin()


def apply_rotary(x, cos, sin):
    """Turn the pairs (j, j + D/2) of x (B, H, T, D) by the tables' angles (T, D/2). Same shape and dtype."""
    a, b = x.chunk(2, dim=-1)  # (B, H, T, D) -> 2 x (B, H, T, D/2)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


# ----------------------------------------------------------------------------------------------------------
# Memory


def wide(x):
    """x in float32, or as it is if that is wider: sums and losses are never kept in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class NoCache:
    """The memory of a pass over whole sequences: nothing came before, and nothing is kept."""

    length = 0  # tokens before this chunk

    def append(self, name, x):
        """x (B, H, T, D) -> x: the rows of this chunk are all rows."""
        return x

    def running_sum(self, name, x):
        """x (B, T, ...) -> inclusive prefix sums over T, same shape, float32 or wider."""
        return wide(x).cumsum(dim=1)

    def advance(self, idx):
        """Nothing to count."""


class Cache:
    """The memory of decoding: what `NoCache` would see if all chunks so far came as one.

    Rows are written in place into buffers of `capacity` tokens, made when a name is first used; sums are
    carried over. `length` moves once per pass of the whole model, by `advance`, and sums become valid only
    then, so a pass that fails halfway leaves the memory as it was. No gradient flows into the past.
    """

    def __init__(self, capacity):
        self.capacity = capacity
        self.reset()

    def reset(self):
        """Forget everything."""
        self.length = 0
        self.tokens = None  # (B, length): the ids behind the rows, so that a full cache can be refilled
        self.rows = {}  # name -> (B, H, capacity, D); only [:, :, :length] is ever read
        self.sums, self.new_sums = {}, {}  # name -> (B, 1, ...)

    def append(self, name, x):
        """Keep the rows x (B, H, T, D); return all rows so far, (B, H, length + T, D)."""
        B, H, T, D = x.shape
        if name not in self.rows:
            self.rows[name] = x.new_empty(B, H, self.capacity, D)
        rows, end = self.rows[name], self.length + T
        rows[:, :, self.length : end] = x.detach()
        return rows[:, :, :end]

    def running_sum(self, name, x):
        """x (B, T, ...) -> prefix sums that go on from the tokens before, same shape, float32 or wider."""
        total = wide(x).cumsum(dim=1)
        if name in self.sums:
            total = total + self.sums[name]
        self.new_sums[name] = total[:, -1:].detach().clone()
        return total

    def advance(self, idx):
        """All layers have seen the tokens idx (B, T): count them."""
        self.tokens = idx if self.tokens is None else torch.cat([self.tokens, idx], dim=1)
        self.length += idx.size(1)
        self.sums.update(self.new_sums)


def running_mean(past, name, x):
    """Mean over all tokens up to and including each one. (B, T, D) -> (B, T, D), float32 or wider."""
    count = torch.arange(past.length + 1, past.length + x.size(1) + 1, device=x.device)  # integers: exact
    return past.running_sum(name, x) / count[:, None]


# ----------------------------------------------------------------------------------------------------------
# Attention


def causal_attention(q, k, v):
    """Softmax attention of the last T of S tokens, each over itself and those before.

    q (B, H, T, D), k and v (B, K, S, D) -> (B, H, T, D). Query head h reads key/value head h // (H/K).
    The fused kernels build no (T, S) matrix in training. For a chunk that continues a text (1 < T < S) the
    causal triangle stands at the lower right; `is_causal` would put it at the upper left.
    """
    T, S = q.size(2), k.size(2)
    mask = None if T in (1, S) else causal_lower_right(T, S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1,
                                          enable_gqa=q.size(1) != k.size(1))


def split_heads(x, d_head):
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.unflatten(-1, (-1, d_head)).transpose(1, 2)


def join_heads(x):
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


# ----------------------------------------------------------------------------------------------------------
# Norm


class RMSNorm(nn.Module):
    """y = gamma * x / sqrt(mean(x^2) + eps) over the last dimension (paper III.A)."""

    def __init__(self, config):
        super().__init__()
        self.eps = config.norm_eps
        self.gain = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x):
        return F.rms_norm(x, self.gain.shape, self.gain, self.eps)


# ----------------------------------------------------------------------------------------------------------
# Mixers: (x (B, T, C), rotary tables, past) -> (B, T, C); the only parts that look at other tokens.
# `name` tells the memories of the layers apart.


class Attention(nn.Module):
    """Plain causal attention with rotary positions, the baseline:

        y_t = W_o [sum_s softmax_s(q_t . k_s / sqrt(D)) v_s]_heads,   s <= t
    """

    def __init__(self, config, name):
        super().__init__()
        self.name, self.d_head = name, config.d_head
        self.sizes = [n * config.d_head for n in (config.n_head, config.n_kv_head, config.n_kv_head)]
        self.qkv = nn.Linear(config.d_model, sum(self.sizes), bias=False)  # W_q, W_k, W_v in one product
        self.out = nn.Linear(self.sizes[0], config.d_model, bias=False)

    def project(self, x):
        """(B, T, C) -> queries (B, H, T, D), keys and values (B, K, T, D)"""
        return [split_heads(y, self.d_head) for y in self.qkv(x).split(self.sizes, dim=-1)]

    def attend(self, q, k, v, past):
        """Rotated queries and keys of this chunk, and its values -> the mixer's output (B, T, C)"""
        k = past.append(self.name + ".key", k)  # (B, K, T, D) -> (B, K, S, D)
        v = past.append(self.name + ".value", v)
        return self.out(join_heads(causal_attention(q, k, v)))

    def forward(self, x, rotary, past):
        q, k, v = self.project(x)
        return self.attend(apply_rotary(q, *rotary), apply_rotary(k, *rotary), v, past)


class GatedSpiralAttention(Attention):
    """Gated Spiral Attention (paper III.C): head h multiplies all scores of token t by one gate g_t^h.

        c_t = 1/(t+1) sum_{s<=t} 1/H sum_h q_s^h                  running mean of the head-mean query
        g_t = sigmoid(W_2 SiLU(W_1 c_t) + b_2)                    in (0, 1)^H
        head h: softmax_s(g_t^h q_t^h . k_s^h / sqrt(D)) v_s^h,   s <= t

    The gate scales a whole row of scores, and g (q . k) = (g q) . k: it is folded into the query, and the
    fused kernels apply (the published code gives them up). A gate of 0 does not silence its head, as the
    paper has it: all scores become equal, and the head returns the plain mean of the values so far.
    """

    def __init__(self, config, name):
        super().__init__(config, name)
        self.after_rotary = config.gate_after_rotary
        self.gate = nn.Sequential(
            nn.Linear(config.d_head, config.n_head, bias=False),  # W_1
            nn.SiLU(),
            nn.Linear(config.n_head, config.n_head),  # W_2, b_2
            nn.Sigmoid(),
        ) if config.gate else None

    def forward(self, x, rotary, past):
        q, k, v = self.project(x)
        content = q  # before rotation the gate sees what the tokens are, not where they stand
        q, k = apply_rotary(q, *rotary), apply_rotary(k, *rotary)
        if self.gate is not None:
            source = q if self.after_rotary else content
            c = running_mean(past, self.name + ".query", source.mean(dim=1))  # (B, H, T, D) -> (B, T, D)
            g = self.gate(c.type_as(x))  # (B, T, D) -> (B, T, H)
            q = q * g.transpose(1, 2)[..., None]  # g: (B, T, H) -> (B, H, T, 1)
        return self.attend(q, k, v, past)


# ----------------------------------------------------------------------------------------------------------
# Feed-forwards: (B, T, C) -> (B, T, C), each token by itself. Matrices that read the same x are one product.


class Butterfly(nn.Module):
    """Butterfly feed-forward (paper III.D): y = W_down (SiLU(a) * b + c), with a, b, c = W_a x, W_b x, W_c x.

    c is the bypass, a linear path through the block. 4 C F parameters.
    """

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.d_model, 3 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        a, b, bypass = self.up(x).chunk(3, dim=-1)  # (B, T, 3F) -> 3 x (B, T, F)
        return self.down(F.silu(a) * b + bypass)


class SwiGLU(nn.Module):
    """Gated linear unit (Shazeer, arXiv:2002.05202): y = W_down (SiLU(W_a x) * W_b x). 3 C F parameters, so
    F of 4/3 the size equals a butterfly."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.d_model, 2 * config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        a, b = self.up(x).chunk(2, dim=-1)  # (B, T, 2F) -> 2 x (B, T, F)
        return self.down(F.silu(a) * b)


class GELU(nn.Module):
    """The feed-forward of GPT-2, without biases: y = W_down GELU(W_up x). 2 C F parameters."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


# ----------------------------------------------------------------------------------------------------------
# Block


class PreNormBlock(nn.Module):
    """x = x + Mixer(Norm(x)), then x = x + FFN(Norm(x)) (paper III.A)."""

    def __init__(self, config, name):
        super().__init__()
        self.norm_1 = PARTS["norm"][config.norm](config)
        self.mixer = PARTS["mixer"][config.mixer](config, name)
        self.norm_2 = PARTS["norm"][config.norm](config)
        self.ffn = PARTS["ffn"][config.ffn](config)

    def forward(self, x, rotary, past):
        x = x + self.mixer(self.norm_1(x), rotary, past)
        return x + self.ffn(self.norm_2(x))


# A new part is one class (or function) and one line here: then a config can ask for it by name.
PARTS = {
    "position": {"spiral": spiral_rotary},
    "norm": {"rms": RMSNorm},
    "mixer": {"gated_spiral": GatedSpiralAttention, "attention": Attention},
    "ffn": {"butterfly": Butterfly, "swiglu": SwiGLU, "gelu": GELU},
    "block": {"prenorm": PreNormBlock},
}


# ----------------------------------------------------------------------------------------------------------
# The language model


def sample_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw one token id a row from logits (B, V) -> (B, 1).

    temperature 0 takes the likeliest. top_k keeps exactly k tokens, ties or not (0: all). top_p keeps the
    likeliest tokens up to and including the one at which their probability reaches p.
    """
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    V = logits.size(-1)
    logits, ids = wide(logits).topk(min(top_k or V, V))  # (B, k), likeliest first
    probs = ((logits - logits[:, :1]) / temperature).softmax(dim=-1)  # at most 0: no temperature overflows
    mass_before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(mass_before >= top_p, 0) if top_p < 1 else probs
    return ids.gather(-1, torch.multinomial(probs, 1, generator=generator))


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, and a head tied to the embedding: logits = Norm(x) E^T (paper III.E)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False  # in training, recompute each block in backward: less memory
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        block = PARTS["block"][config.block]
        self.blocks = nn.ModuleList(block(config, str(layer)) for layer in range(config.n_layer))
        self.norm = PARTS["norm"][config.norm](config)
        self.apply(self.init_weights)

    @staticmethod
    def init_weights(module):
        """As published: a normal of deviation 0.02 cut at two deviations; biases 0. Gates start near 1/2."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def rotary(self, start, T):
        """Tables (T, D/2) for positions start .. start + T - 1, in float32, or float64 in a float64 model.

        Angles are large and must not be rounded, so they are computed in float64 where the device has it.
        """
        weight = self.embedding.weight
        exact = torch.float32 if weight.device.type == "mps" else torch.float64
        position = torch.arange(start, start + T, device=weight.device, dtype=exact)
        cos, sin = PARTS["position"][self.config.position](self.config, position)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return cos.to(dtype), sin.to(dtype)

    def forward(self, idx, targets=None, cache=None, last_only=False):
        """Token ids idx (B, T) -> logits (B, T, V), or (B, 1, V) with last_only; and the mean loss, or None.

        targets (B, T): the token after each; -100 is ignored; nothing is shifted here. With a cache, idx goes
        on where the last call stopped. ValueError when the context is exceeded.
        """
        T, past = idx.size(1), NoCache() if cache is None else cache
        if not 1 <= T <= self.config.context - past.length:
            raise ValueError(f"{T} tokens after {past.length} do not fit a context of {self.config.context}.")
        rotary = self.rotary(past.length, T)
        x = self.embedding(idx)  # (B, T) -> (B, T, C)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, rotary, past, use_reentrant=False)
            else:
                x = block(x, rotary, past)
        past.advance(idx)
        x = self.norm(x[:, -1:] if last_only else x)
        logits = F.linear(x, self.embedding.weight)  # (B, T, C) -> (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=-100)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=0, top_p=1.0, generator=None, n_ids=None,
                 cache=None):
        """Continue idx (B, T): a generator that yields one column of new ids (B, 1) at a time.

        Only the ids below n_ids are drawn (None: all). Pass a cache to go on from an earlier call: idx is
        then what the cache has not seen, beginning with the last id that was drawn. What does not fit the
        context, be it a long prompt or a long story, is cut to its last half window, which is read anew.
        """
        cache = Cache(self.config.context) if cache is None else cache
        for _ in range(max_new_tokens):
            if cache.length + idx.size(1) > self.config.context:
                seen = idx if cache.tokens is None else torch.cat([cache.tokens, idx], dim=1)
                idx = seen[:, -max(1, self.config.context // 2):]
                cache.reset()
            logits, _ = self(idx, cache=cache, last_only=True)
            idx = sample_token(logits[:, -1, :n_ids], temperature, top_k, top_p, generator)
            yield idx

    def budget(self, length=None, dtype=torch.float32):
        """What the model costs, counted on a copy without storage (the "meta" device), not from formulas:

        parameters       by component, layers added up; their sum is the model's size
        cache_bytes      rows that one sequence of `length` tokens keeps (default: the context), in `dtype`
        state_bytes      running sums that it keeps, whatever the length
        flops_per_token  to decode the last of `length` tokens: 2 per multiply-add of every matrix product
        """
        from torch.utils.flop_counter import FlopCounterMode

        parameters = {}
        for name, p in self.named_parameters():  # "blocks.0.mixer.qkv.weight" -> "mixer.qkv"
            component = ".".join(s for s in name.split(".")[:-1] if s != "blocks" and not s.isdigit())
            parameters[component] = parameters.get(component, 0) + p.numel()
        length = length or self.config.context
        with torch.device("meta"):
            model, cache = LanguageModel(self.config).to(dtype), Cache(length)
            if length > 1:
                model(torch.zeros(1, length - 1, dtype=torch.long), cache=cache)
            with FlopCounterMode(display=False) as counter:
                model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
        return {
            "parameters": parameters,
            "cache_bytes": sum(x.numel() * x.element_size() for x in cache.rows.values()),
            "state_bytes": sum(x.numel() * x.element_size() for x in cache.sums.values()),
            "flops_per_token": counter.get_total_flops(),
        }
