"""
Make nano.npz and helix.npz with the published packages.

    python make.py nano      with wiola13m 1.0.1 and transformers 4.45.2
    python make.py helix     with wiola 0.1.1, pyyaml and transformers 4.46.3, so in another environment

Both with torch 2.13.0; pip needs --no-deps for the packages. silia.npz cannot be made like this, as Silia is
not a package: it is an excerpt of a file that was computed with the reference's own model.py (the Silia v2
graph, without a norm after the heads), with logits_step, one token at a time, for greedy and the training.

Weights are random, with no gain, offset, bias or phi at its default, and large enough for a slip anywhere to
show. Id 0 is not used: the helix package never trains its embedding as an input ("padding").

  config, w/NAME            config.json as a string, and the weights
  ids, logits, loss         one pass in eval mode, and the mean loss of the next token
  g/NAME                    gradients of that loss
  greedy                    20 tokens after the first 5 of the first row, with the package's cache
  train_ids, train_losses   20 batches, and the loss of each as AdamW goes through them; no merging
  logits_train              helix: one pass over ids in training mode with token merging
"""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

# The seeds are such that greedy tokens are not always the same, and no cosine lies near the threshold.
CONFIGS = {
    "nano": ("wiola13m", 1, dict(
        vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40,
        max_position_embeddings=64, rope_theta=5000.0, spiral_alpha=0.07, rms_norm_eps=1e-5)),
    "helix": ("wiola", 41, dict(
        vocab_size=61, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        dsff_narrow_size=12, dsff_wide_size=32, max_position_embeddings=64, srpe_theta=5000.0,
        srpe_spiral_divisor=6, srpe_radial_amplitude=0.2, srpe_radial_frequency=0.05, gcla_lookback=2,
        rms_norm_eps=1e-5, atm_enabled=True, atm_threshold=0.8)),
}


def randomise(model, generator):
    """Large matrices; everything else is drawn around its default."""
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() == 2:
            p.data = 0.4 * noise if "embed" in name else 1.5 * noise / p.size(1) ** 0.5
        else:
            p.data += 0.4 * noise


def similarities(model, ids):
    """The cosines of neighbours that token merging looks at, of all layers that merge."""
    found = []
    merging = [layer for layer in model.model.layers if layer.atm_layer]
    hook = lambda module, x, y: found.append(y)
    hooks = [layer.input_norm.register_forward_hook(hook) for layer in merging]
    model(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack([torch.cosine_similarity(y[:, 1:], y[:, :-1], dim=-1) for y in found])


def make(family):
    package, seed, settings = CONFIGS[family]
    package = importlib.import_module(package)
    generator = torch.Generator().manual_seed(seed)
    model = package.WiolaForCausalLM(package.WiolaConfig(**settings)).eval()
    randomise(model, generator)
    draw = lambda *shape: torch.randint(1, settings["vocab_size"], shape, generator=generator)
    ids, train_ids = draw(2, 24), draw(20, 2, 16)
    for t in (3, 4, 9, 14, 15, 16):  # neighbours that are alike, so that some merge
        ids[0, t] = ids[0, t - 1]
    ids[1, 7] = ids[1, 6]

    file = {"config": json.dumps(settings), "ids": ids, "train_ids": train_ids}
    file |= {f"w/{name}": p.detach().clone() for name, p in model.named_parameters()}
    out = model(ids, labels=ids)
    out.loss.backward()
    file |= {"logits": out.logits.detach(), "loss": out.loss.detach()}
    file |= {f"g/{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}

    with torch.no_grad():
        idx, past, greedy = ids[:1, :5], None, []
        for _ in range(20):
            out = model(idx, past_key_values=past, use_cache=True)
            best, second = out.logits[0, -1].topk(2).values
            assert best - second > 1e-3, "rounding could change a greedy token: take another seed"
            past, idx = out.past_key_values, out.logits[:, -1:].argmax(dim=-1)
            greedy.append(idx.item())
        file["greedy"] = greedy
        if family == "helix":
            model.train()
            file["logits_train"] = model(ids, use_cache=False).logits
            cosines, ratios = similarities(model, ids), [x.last_merge_ratio for x in model.model.layers]
            print("merged:", ratios, "; nearest to the threshold:",
                  (cosines - settings["atm_threshold"]).abs().min().item())

    model.train()
    model.config.atm_enabled = False
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for batch in train_ids:
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    file["train_losses"] = losses
    path = Path(__file__).with_name(f"{family}.npz")
    np.savez_compressed(path, **{name: np.asarray(x) for name, x in file.items()})
    print(path, path.stat().st_size, "bytes; largest logit", file["logits"].abs().max().item())
    print("greedy:", greedy, "losses:", losses[0], losses[-1])


if __name__ == "__main__":
    make(sys.argv[1])
