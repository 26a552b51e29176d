"""Exercise 2: standard rotary, and the alpha that gains a turn.

Over Nano's 1,024 tokens the slowest pair turns by 10.4 degrees. The published alpha of 0.05 adds half a
degree; a full turn more takes an alpha of 34.5:

    cp exercises/solutions/02.py my_02.py
    python -c "import model, my_02 as my; a = my.alpha_of_a_turn(model.ModelConfig(), 1024); print(a, 360 / a,
        0.05 * 360 / a)"
"""

import math

import torch


def standard_rotary(config, position):
    half = config.d_head // 2
    i = torch.arange(half, dtype=position.dtype, device=position.device)
    angle = position[:, None] * config.rope_base ** (-i / half)
    return angle.cos(), angle.sin()


def alpha_of_a_turn(config, distance):
    half = config.d_head // 2
    slowest = config.rope_base ** (-(half - 1) / half)  # the root is 1 here: the spiral gains alpha * slowest
    return 2 * math.pi / (distance * slowest)
