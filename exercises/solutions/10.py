"""Exercise 10: the mean-pooled summary, which shows every token the future.

After 200 steps the loss is 1.819, 0.26 below the floor; decoded, it is 2.473, and logits are off by up to 5.3
(the checker prints it). After 1,500 steps it is 1.47 below: 0.3 to 0.45 nats for each of the first seven
tokens, and 2.20 for the eighth, which is in no mean; logits are off by up to 19.7.

    cp exercises/solutions/10.py my_10.py
    python -c "import torch, my_10 as my; m = my.train(1500); idx = torch.randint(8, (512, 9)); x, y = (
        idx[:, :-1], idx[:, 1:]); print(my.measure(m, idx), torch.nn.functional.cross_entropy(m(x)[0].mT, y,
        reduction='none').mean(0))"

A window of 256 tokens hides the next one better in its mean. After 500 steps on the storybook, phi starting
at 0, the validation loss is 0.605, with running means 0.610 (one seed): no theft worth the name, so far.

    python -c "import my_10, train; train.LanguageModel = my_10.MeanPooled; train.main()" \
        config/helix_short.py --phi=0 --max_steps=500
"""

import math

import torch

from model import Cache, LanguageModel, ModelConfig, NoCache, at_least_float32


class WholeMean(NoCache):
    """`running_mean` divides by the number of tokens so far: give it that many times the mean of all."""

    def running_sum(self, name, x):
        count = torch.arange(1, x.size(1) + 1, device=x.device)
        return at_least_float32(x).mean(dim=1, keepdim=True) * count[:, None]  # (B, 1, C) * (T, 1)


class MeanPooled(LanguageModel):
    """Equation 20 in a full pass. Step by step, all tokens are those so far: the usual cache is right."""

    def forward(self, idx, targets=None, cache=None, last_only=False):
        return super().forward(idx, targets, cache or WholeMean(), last_only)


def train(steps=200):
    torch.manual_seed(1)
    model = MeanPooled(ModelConfig(vocab_size=8, context=8, n_layer=2, d_model=32, n_head=4, d_ff=64,
                                   mixer="cross_layer", phi=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        idx = torch.randint(8, (64, 9))
        _, loss = model(idx[:, :-1], idx[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def measure(model, idx):
    x, y = idx[:, :-1], idx[:, 1:]
    logits, loss = model(x, y)
    cache = Cache(model.config.context)
    steps = torch.cat([model(token, cache=cache)[0] for token in x.split(1, dim=1)], dim=1)
    return math.log(model.config.vocab_size) - loss.item(), (logits - steps).abs().max().item()
