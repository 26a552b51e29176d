"""Exercise 2: rotary positions for a longer context, and the alpha that gains a turn.

The last pair is i = D/2 - 1, so its frequency is base^(-(D-2)/D). It is 1/s of what it was if the base grows
by s^(D/(D-2)); on the first, i = 0, the base has no influence.

Trained for 300 steps on windows of 64 tokens, then the validation loss with windows of (one seed)

                                   64     128     256 tokens
    plain rotary                1.577   1.631   2.097
    positions divided by s      1.577   2.203   2.750
    stretched                   1.577   1.606   1.733

So four times the context costs 0.16 nats and not 0.52; but more to look back at is no gain yet. Dividing is
the worst of the three, presumably because it slows the fast pairs, too. (Its paper trains on with it; here
nothing was trained on.)

    python train.py config/short.py --position=rotary --max_steps=300 --context=64 --data=storybook --out=short
    cp exercises/solutions/02.py my_02.py
    python my_02.py out/short/ckpt.pt

Over Nano's 1,024 tokens the slowest pair turns by 10.4 degrees. The published alpha of 0.05 adds half a
degree; a full turn more takes an alpha of 34.5:

    python -c "import model, my_02 as my; a = my.alpha_of_a_turn(model.ModelConfig(), 1024); print(a, 360 / a,
        0.05 * 360 / a)"
"""

import math
from dataclasses import replace

from model import plain_rotary


def stretched_rotary(config, position, trained):
    s, D = config.context / trained, config.d_head
    return plain_rotary(replace(config, rope_base=config.rope_base * s ** (D / (D - 2))), position)


def alpha_of_a_turn(config, distance):
    half = config.d_head // 2
    slowest = config.rope_base ** (-(half - 1) / half)  # the root is 1 here: the spiral gains alpha * slowest
    return 2 * math.pi / (distance * slowest)


def measure(checkpoint):
    """Print the validation loss for windows that are longer than those of the training."""
    from contextlib import nullcontext

    from model import PARTS
    from support.checkpoint import load_checkpoint, load_model, saved_config
    from support.corpus import open_data
    from train import evaluate

    checkpoint = load_checkpoint(checkpoint)
    config = saved_config(checkpoint)
    trained = config.context
    (_, val_ids), tokenizer, _ = open_data("storybook", config)
    PARTS["position"]["interpolated"] = lambda config, position: plain_rotary(
        config, position * trained / config.context)
    PARTS["position"]["stretched"] = lambda config, position: stretched_rotary(config, position, trained)
    for name in ("rotary", "interpolated", "stretched"):
        for context in (trained, 2 * trained, 4 * trained):
            model = load_model(checkpoint, replace(config, context=context, position=name))
            loss, _ = evaluate(model, val_ids, tokenizer, 32, nullcontext())
            print(f"{name}, context {context}: a validation loss of {loss:.3f}")


if __name__ == "__main__":
    import sys

    measure(sys.argv[1])
