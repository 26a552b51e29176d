"""Exercise 7: a gate that also reads the second moment of the query."""

import torch
import torch.nn as nn

from model import PARTS, GatedSpiralAttention, apply_rotary, join_heads, running_mean


class SecondMoment(GatedSpiralAttention):
    """g_t = sigmoid(W_2 SiLU(W_1 [c_t; m_t]) + b_2), with the running means c of q and m of q * q."""

    def __init__(self, config, name):
        super().__init__(config, name)
        self.gate[0] = nn.Linear(2 * self.d_head, config.n_head, bias=False)  # W_1

    def forward(self, x, rotary, past, below=()):
        q, k, v = self.project(x)
        mean = q.mean(dim=1)  # over the heads: (B, H, T, D) -> (B, T, D)
        c = running_mean(past, self.name + ".query", mean)
        m = running_mean(past, self.name + ".squared_query", mean.square())
        g = self.gate(torch.cat([c, m], dim=-1).type_as(x))  # (B, T, 2*D) -> (B, T, H)
        q = apply_rotary(q, *rotary) * g.transpose(1, 2)[..., None]  # g as (B, H, T, 1)
        return self.out(join_heads(self.attend(q, apply_rotary(k, *rotary), v, past)))


PARTS["mixer"]["second_moment"] = SecondMoment
