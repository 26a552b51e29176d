"""What a run logs and prints, and what a model costs."""

import csv
import io
import math
import os
import sys

import torch
from tqdm import tqdm

from model import Cache, NoCache
from support.files import atomic_write, free_name, reason

LOG_COLUMNS = ["step", "tokens", "lr", "train_loss", "val_loss", "bits_per_byte", "grad_norm",
               "tokens_per_second", "merge_ratio"]


class Log:
    """log.csv, a line at a time so that it can be watched."""

    def __init__(self, path, rows=()):
        """Begin the file with these rows."""
        with atomic_write(path) as file:
            file.write(csv_lines(rows, header=True))
        self.path = path
        self.file = open(path, "ab", buffering=0)
        self.rows = list(rows)
        self.waiting = b""  # of the file's content, what is not on the disk yet

    def write(self, row):
        """Append a row. What a full disk does not take waits for the next one."""
        self.rows.append(row)
        self.waiting += csv_lines([row])
        try:
            self.waiting = self.waiting[self.file.write(self.waiting):]
        except OSError as error:
            tqdm.write(f"warning: cannot write {self.path}: {reason(error)}; the rows wait.", file=sys.stderr)

    def is_in(self, folder):
        """Return whether the log is in this folder: it may have been renamed, replaced or removed."""
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), os.stat(folder / self.path.name))
        except OSError:
            return False


def csv_lines(rows, header=False):
    """Return rows of the log as the bytes of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, LOG_COLUMNS, extrasaction="ignore", lineterminator="\n")
    if header:
        writer.writeheader()
    for row in rows:
        writer.writerow({key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()})
    return text.getvalue().encode("utf-8")


def read_log(path, last_step):
    """Return the rows of a log.csv up to a step: a resumed run writes the later ones again.

    A spreadsheet may have saved it, a crash may have torn its last line, somebody may have written into it.
    If anything in it is no row of ours, the file is kept under another name as it was.
    """
    data = path.read_bytes() if path.exists() else b""
    table = csv.DictReader(data.decode("utf-8-sig", errors="replace").replace("\0", "").splitlines())
    rows = []
    strange = False
    try:
        for row in table:
            if not is_log_row(row):
                strange = True
            elif int(row["step"]) <= last_step:
                rows.append(row)
    except csv.Error:  # a line of 100 kB, for example
        strange = True
    if strange or not set(table.fieldnames or ()) <= set(LOG_COLUMNS):
        kept = free_name(path)
        path.rename(kept)
        print(f"{path} has something in it that is no row of a log: it is kept as {kept}")
    return rows


def is_log_row(row):
    """Return whether a row of a CSV file is whole and has a step and numbers only."""
    try:
        for x in row.values():  # None, if there are too few; a list of those that are too many
            if x != "":
                float(x)
        return row.get("step", "").isdecimal()
    except (TypeError, ValueError):
        return False


class Progress:
    """The progress bar, and what there is to say about the steps since the last row of log.csv."""

    def __init__(self, start, max_steps, tokens_per_step):
        self.tokens_per_step = tokens_per_step
        self.bar = tqdm(total=max_steps, initial=start, unit="step", dynamic_ncols=True,
                        mininterval=0.1 if sys.stderr.isatty() else 10,  # a log file needs few lines
                        disable=os.environ.get("TERM") == "dumb")  # it cannot go back to a line's beginning
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
    threads = f" with {torch.get_num_threads()} thread(s)" if device.type == "cpu" else ""
    print(f"device      {device}, computing in {str(dtype).removeprefix('torch.')}{threads}")
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
    line = (f"step {row['step']}: {train_loss}val {loss:.4f}{counted}, perplexity "
            f"{math.exp(min(loss, 700)):.4g}, {row['bits_per_byte']:.4f} bits per byte")
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
