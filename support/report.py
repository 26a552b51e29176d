"""What a run logs and prints, and what a model costs."""

import csv
import io
import math
import os
import sys

import torch
from tqdm import tqdm

from model import Cache, NoCache
from support import need
from support.files import atomic_write

LOG_COLUMNS = ["step", "tokens", "lr", "train_loss", "val_loss", "bits_per_byte", "grad_norm",
               "tokens_per_second", "merge_ratio"]


class Log:
    """log.csv, a line at a time so that it can be watched."""

    def __init__(self, path, start):
        rows = []
        if start and path.exists():  # keep what a resumed run is not going to write again
            with open(path, encoding="utf-8", errors="replace", newline="") as file:
                steps = [(row, row.get("step") or "") for row in csv.DictReader(file)]
                rows = [row for row, step in steps if step.isdigit() and int(step) <= start]
        text = io.StringIO()
        writer = csv.DictWriter(text, LOG_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        with atomic_write(path) as file:
            file.write(text.getvalue().encode("utf-8"))
        self.path = path
        self.file = open(path, "a", encoding="utf-8", newline="", buffering=1)

    def write(self, row):
        row = {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()}
        csv.DictWriter(self.file, LOG_COLUMNS, lineterminator="\n").writerow(row)

    def check_ours(self):
        """ValueError if another run has begun in this folder, which gives the folder a log of its own."""
        ours = self.path.exists() and os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path))
        need(ours, f"another run has taken over {self.path.parent}: this one stops.")


class Progress:
    """The progress bar, and what there is to say about the steps since the last row of log.csv."""

    def __init__(self, start, max_steps, tokens_per_step):
        self.tokens_per_step = tokens_per_step
        self.bar = tqdm(total=max_steps, initial=start, unit="step", dynamic_ncols=True,
                        mininterval=0.1 if sys.stderr.isatty() else 10)  # a log file needs few lines
        self.clear()

    def clear(self):
        self.losses = []
        self.merge_ratios = []
        self.seconds = 0.0

    def add(self, loss, lr, grad_norm, merge_ratios, seconds):
        """Count one step. merge_ratios has one number for each micro-batch, or none."""
        self.losses.append(loss)
        self.merge_ratios += merge_ratios
        self.seconds += seconds
        self.lr = lr
        self.grad_norm = grad_norm
        self.bar.update()
        self.bar.set_postfix(loss=f"{loss:.3f}", lr=f"{lr:.1e}", tok_s=f"{self.speed():,.0f}")

    def speed(self):
        """Return tokens per second. Evaluations do not count as time."""
        return len(self.losses) * self.tokens_per_step / self.seconds

    def row(self, step):
        """Return a row for the log, the means since the row before, and begin anew."""
        row = {"step": step, "tokens": step * self.tokens_per_step}
        if self.losses:
            row |= {"lr": self.lr, "train_loss": sum(self.losses) / len(self.losses),
                    "grad_norm": self.grad_norm, "tokens_per_second": self.speed()}
        if self.merge_ratios:
            row["merge_ratio"] = sum(self.merge_ratios) / len(self.merge_ratios)
        self.clear()
        return row


def print_plan(config, model, meta, device, dtype, n_val, roles=None):
    """Print what is about to happen, before it does. With roles, only the assistant's tokens count."""
    context = model.config.context
    per_step = config.batch_size * context
    n_train = meta["train"]["tokens"]
    whose = "of the assistant " if roles else ""
    costs = budget(model)
    n = sum(costs["parameters"].values())
    print(f"data        {config.data}: {n_train:,} tokens to train on, {n_val:,} {whose}to validate on")
    print(f"device      {device}, computing in {str(dtype).removeprefix('torch.')}")
    print(f"step        {config.batch_size} x {context} = {per_step:,} tokens, {config.grad_accum} part(s); "
          f"{config.max_steps:,} steps are {config.max_steps * per_step / n_train:.2f} epochs")
    print(f"parameters  {n:,}")
    for name, size in costs["parameters"].items():
        print(f"    {name:<16}{size:>13,}{size / n:>8.1%}")
    print(f"decoding    {costs['cache_bytes']:,} bytes of keys and values at {context} tokens and "
          f"{costs['state_bytes']:,} of running sums; {costs['flops_per_token'] / 1e6:.1f} MFLOP a token")
    V = model.config.vocab_size
    known = meta["vocab_size"]
    if known < V:
        print(f"note        the tokenizer has {known:,} tokens: {V - known:,} rows of the embedding are "
              "unused")
    near_zero = model.config.embedding_std <= 0.02 and model.config.init != "pytorch"
    expected = ", the first loss to expect" if near_zero else ""
    print(f"guess       uniform: a loss of ln {V} = {math.log(V):.3f}{expected}\n")


def evaluation_line(row, meta, n_val, roles=None):
    """Return one line on an evaluation, with the distance from the entropy floor where that is known.

    With roles, it was on n_val tokens of the assistant alone.
    """
    train_loss = f"train {row['train_loss']:.4f}, " if "train_loss" in row else ""
    loss = row["val_loss"]
    tokens, floor = ("assistant_tokens", "assistant_token") if roles else ("tokens", "token")
    floor = meta["val"].get(f"floor_nats_per_{floor}")
    counted = f" (on {n_val:,} tokens of the assistant)" if roles else ""
    line = (f"step {row['step']}: {train_loss}val {loss:.4f}{counted}, perplexity {math.exp(min(loss, 700)):.4g}, "
            f"{row['bits_per_byte']:.4f} bits per byte")
    if floor is not None and n_val == meta["val"][tokens]:
        line += f"; {loss - floor:.4f} above the entropy floor of {floor:.4f}"
    return line


def merging_line(model, ratio, batch_size):
    """Return one line on what merging this share of the tokens saves in a step, forward and backward.

    Counted on a copy that has shapes only. In fact a little less: a batch is as long as its longest row.
    """
    from torch.utils.flop_counter import FlopCounterMode  # needed here only, and slow to import

    def flops(module, *inputs):  # of a forward pass over one window
        with FlopCounterMode(display=False) as counter:
            module(*inputs)
        return counter.get_total_flops()

    config = model.config
    T = config.context
    saved = 0
    passes = 4 if model.gradient_checkpointing else 3  # forward, again for backward; backward costs two
    merging = [layer for layer, block in enumerate(model.blocks) if getattr(block, "find_pairs", None)]
    with torch.device("meta"):
        copy = type(model)(config).eval()
        whole = flops(copy, torch.zeros(1, T, dtype=torch.long))
        for layer in merging:
            for sign, n in ((1, T), (-1, round((1 - ratio) * T))):
                x, tables = torch.zeros(1, n, config.d_model), torch.zeros(2, n, config.d_head // 2)
                summaries = [x] * min(layer, model.lookback)
                saved += sign * flops(copy.blocks[layer].mixer, x, tables, NoCache(), summaries)
    return (f"merged {ratio:.1%} of the tokens in {len(merging)} of {config.n_layer} layers, which saves "
            f"{passes * batch_size * saved / 1e9:.3g} GFLOP, {saved / whole:.1%} of a step (of the scores of "
            f"these layers alone it would be the paper's mu (2 - mu), {ratio * (2 - ratio):.1%})")


def budget(model, length=None, dtype=torch.float32):
    """Return what the model costs, exactly:

    parameters       by component, layers added up; their sum is the model's size
    cache_bytes      rows that one sequence of `length` tokens keeps (default: the context), in `dtype`
    state_bytes      running sums that it keeps, whatever the length
    flops_per_token  to decode the last of `length` tokens: 2 for each multiply-add of the matrix products

    All but the first are read off a copy that has shapes and no contents (PyTorch's "meta" device) and
    decodes one token: no formula can be out of date.
    """
    from torch.utils.flop_counter import FlopCounterMode  # needed here only, and slow to import

    parameters = {}
    for name, p in model.named_parameters():  # "blocks.0.mixer.qkv.weight" -> "mixer.qkv"
        component = ".".join(s for s in name.split(".")[:-1] if s != "blocks" and not s.isdigit())
        parameters[component] = parameters.get(component, 0) + p.numel()
    length = length or model.config.context
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        copy = type(model)(model.config).to(dtype)
        cache = Cache(length)
        cache.length = length - 1
        copy(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    return {
        "parameters": parameters,
        "cache_bytes": sum(x.nbytes for x in cache.rows.values()),
        "state_bytes": sum(x.nbytes for x in cache.sums.values()),
        "flops_per_token": counter.get_total_flops(),
    }
