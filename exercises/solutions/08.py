"""Exercise 8: every layer learns its own spiral."""

from dataclasses import replace

import torch
import torch.nn as nn

from model import PARTS, GatedSpiralAttention, spiral_rotary


class LearnedSpiral(GatedSpiralAttention):
    """Turns by tables of its own, from an alpha of its own, instead of those that all layers are given."""

    def __init__(self, config, name):
        super().__init__(config, name)
        self.config, self.alpha = config, nn.Parameter(torch.tensor(float(config.alpha)))

    def forward(self, x, rotary, past, below=()):
        position = torch.arange(past.length, past.length + x.size(1), device=x.device, dtype=torch.float64)
        tables = spiral_rotary(replace(self.config, alpha=self.alpha), position)
        return super().forward(x, [table.type_as(rotary[0]) for table in tables], past, below)


PARTS["mixer"]["learned_spiral"] = LearnedSpiral
