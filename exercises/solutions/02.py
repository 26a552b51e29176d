"""Exercise 2: standard rotary positions, and the spiral that gains a turn."""

import math

import torch


def standard_rotary(config, position):
    half = config.head_width // 2
    i = torch.arange(half, dtype=position.dtype, device=position.device)
    angle = position[:, None] * config.rope_base ** (-i / half)
    return angle.cos(), angle.sin()


def alpha_of_a_turn(config, distance):
    half = config.head_width // 2
    slowest = config.rope_base ** (-(half - 1) / half)  # the root is 1 here: the spiral gains alpha * slowest
    return 2 * math.pi / (distance * slowest)
