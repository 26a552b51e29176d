"""Exercise 3: min-p sampling.

Of the 1,024 tokens of a small model (validation loss 0.620), so many are left, and the true next one is among
them in so many cases (8,192 tokens of the validation split, one seed):

    temperature      1.0             1.5             2.0
    min_p 0.1      4.1   99.1%     4.5   99.5%     5.4   99.8%
    top_p 0.9      4.1   98.0%    10.3   99.5%   103.6  100.0%

    python train.py config/short.py --max_steps=300 --lr=1e-2 --out=short
    cp exercises/solutions/03.py my_03.py
    python my_03.py out/short/ckpt.pt
"""

import torch


def sample_min_p(logits, temperature, min_p, generator=None):
    if temperature < 1e-6:
        return logits.argmax(dim=-1, keepdim=True)
    probs = (logits / temperature).softmax(dim=-1)
    probs = probs.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), 0)
    return torch.multinomial(probs, 1, generator=generator)  # which makes them add up to 1 again


def measure(checkpoint):
    """How many tokens min-p and top-p leave, and how often the true next one is among them."""
    from support.checkpoint import load_checkpoint, load_model
    from support.corpus import open_data
    from train import TrainConfig, get_batch

    model = load_model(load_checkpoint(checkpoint))
    (_, val_ids), _, _ = open_data("storybook", model.config)
    x, y = get_batch(val_ids, 0, TrainConfig(), model.config.context)
    with torch.no_grad():
        logits = model(x)[0]
    for t in (1.0, 1.5, 2.0):
        probs, ids = (logits / t).softmax(dim=-1).sort(descending=True)
        true = ids == y[..., None]
        for name, kept in (("min_p 0.1", probs >= 0.1 * probs[..., :1]),
                           ("top_p 0.9", probs.cumsum(dim=-1) - probs < 0.9)):
            print(f"temperature {t}, {name}: {kept.sum(dim=-1).float().mean():5.1f} tokens are left, "
                  f"the true one in {(kept & true).any(dim=-1).float().mean():.1%}")


if __name__ == "__main__":
    import sys

    measure(sys.argv[1])
