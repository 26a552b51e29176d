"""Exercise 8: every layer learns its own spiral.

After 200 steps on the storybook the alphas of the three layers have moved from 0.05 to 0.030, 0.027, 0.058
(seed 1); 0.061, 0.050, 0.049 (seed 2); 0.012, 0.054, 0.034 (seed 3): no direction, and no gain to be seen.
The validation losses are 1.704, 1.752, 1.752, mean 1.736; with a fixed alpha 1.719, 1.715, 1.683, mean 1.706.

    cp exercises/solutions/08.py my_08.py
    python -c "import my_08, train; train.main()" config/short.py --mixer=learned_spiral --max_steps=200
    python -c "import torch; print(torch.load('out/short/ckpt.pt')['model']['blocks.0.mixer.alpha'])"

with --seed=1 and so on; the others with --mixer=gated_spiral.
"""

from dataclasses import replace

import torch
import torch.nn as nn

from model import PARTS, GatedSpiralAttention, spiral_rotary


class LearnedSpiral(GatedSpiralAttention):
    """Turns by tables of its own, from an alpha of its own, instead of those that all layers are given."""

    def __init__(self, config, name):
        super().__init__(config, name)
        self.config, self.alpha = config, nn.Parameter(torch.tensor(float(config.alpha)))

    def forward(self, x, rotary, past, summaries=()):
        position = torch.arange(past.length, past.length + x.size(1), device=x.device, dtype=torch.float64)
        tables = spiral_rotary(replace(self.config, alpha=self.alpha), position)
        return super().forward(x, [table.type_as(rotary[0]) for table in tables], past, summaries)


PARTS["mixer"]["learned_spiral"] = LearnedSpiral
