"""Exercise 3: min-p sampling."""

import torch


def sample_min_p(logits, temperature, min_p, generator=None):
    if temperature < 1e-6:
        return logits.argmax(dim=-1, keepdim=True)
    probs = (logits / temperature).softmax(dim=-1)
    probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
    return torch.multinomial(probs, 1, generator=generator)  # which makes them add up to 1 again
