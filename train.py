"""
Train a language model: one plain loop, exact resume.

    python train.py config/tiny.py                      the embedded storybook, minutes on a CPU
    python train.py config/nano.py --batch_size=16      any field by name; --help lists them all
    python train.py config/tiny.py --resume             go on after Ctrl-C, a crash or a kill
    torchrun --standalone --nproc_per_node=2 train.py config/nano.py    the same steps by two processes

Everything goes to out/<run>/: ckpt.pt (the last state), best.pt (the lowest validation loss), log.csv. The
batch of step i is a function of (seed, i) alone and nothing else is random, so a run that was stopped and
resumed ends, on a CPU and with the same number of threads, with the same weights to the last bit as one that
was not. (The threads are as many as cores are free at the start; --threads sets them.)

In this order: settings, data, optimizers, the run. What is imported from support/ makes it safe (interrupts,
files that are whole or absent, errors in a sentence) and reports on it; none of it changes what is learned.
"""

import itertools
import math
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from support.runtime import (chat_roles, choose_device, choose_threads, compile_training, interruptible,
                             keep_freed_memory, run_main, sink_id)
from support.settings import answer_early, read_settings

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # `&` and nohup ignore it
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while PyTorch loads: no traceback, just the end
if __name__ == "__main__":
    run_main(lambda: answer_early("train.py", "model.py"))  # --help, misspelt options: before PyTorch loads

import numpy as np
import torch
from tqdm import tqdm

import prepare
from model import LanguageModel, ModelConfig
from support import need, parallel
from support.checkpoint import check_finite, load_model, new_model, starting_checkpoint
from support.corpus import open_data
from support.report import Progress, evaluation_line, merging_line, print_plan


@dataclass
class TrainConfig:
    """How to train. Every field is also an option."""

    data: str = "tinystories"  # folder under data/, made by prepare.py
    out: str = ""  # folder under out/; empty: the name of the config file
    resume: bool = False  # continue from out/<run>/ckpt.pt
    init_from: str = ""  # start a new run from the weights of this checkpoint (resume goes on without it)
    seed: int = 1337  # of the initial weights and of the batches
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    threads: int = 0  # of a CPU; 0: OMP_NUM_THREADS if it is set, else as many as cores are free at the start
    dtype: str = "auto"  # compute type: auto, float32, bfloat16, float16; weights are always float32
    compile: str = "auto"  # torch.compile: auto (on CUDA, without token merging), on, off
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, more time
    chunked_loss: bool = False  # the loss without all logits at once: much less memory; often faster on a CPU
    max_steps: int = 20000  # optimizer steps in all
    batch_size: int = 32  # windows of `context` tokens in a step
    windows: str = "stream"  # where they are cut: stream (anywhere), documents (where one begins)
    assistant_only: bool = True  # of conversations, only what the assistant says counts in the loss
    grad_accum: int = 1  # micro-batches in a step, their gradients added up: less memory, the same step
    optimizer: str = "adamw"  # adamw; muon: torch.optim.Muon for the blocks' matrices, AdamW for the rest
    lr: float = 3e-4  # peak learning rate
    min_lr: float = 0.0  # learning rate at the end of the cosine
    schedule: str = "cosine"  # learning rate after the warm-up: cosine, or cooldown (constant, then a cosine)
    warmup: float = 0.05  # share of max_steps in which the learning rate rises
    cooldown: float = 0.45  # schedule=cooldown: share of max_steps, at the end, in which the rate falls
    weight_decay: float = 0.1  # on matrices and embeddings; never on biases and the weights of norms
    beta1: float = 0.9  # AdamW: decay of the gradient's running mean
    beta2: float = 0.95  # AdamW: decay of the squared gradient's running mean
    adam_eps: float = 1e-8  # AdamW: added to the denominator
    grad_clip: float = 1.0  # largest norm of the gradient
    eval_every: int = 500  # steps between evaluations; each writes a checkpoint
    eval_tokens: int = 0  # validate on the first so many tokens of the split; 0: all of it
    log_every: int = 10  # steps between rows of log.csv
    sample_tokens: int = 80  # tokens of the sample shown at each evaluation

    def __post_init__(self):
        need(self.max_steps >= 0, "max_steps must not be negative.")
        need(min(self.batch_size, self.grad_accum, self.eval_every, self.log_every) >= 1,
             "batch_size, grad_accum, eval_every and log_every must be at least 1.")
        need(self.batch_size % self.grad_accum == 0, "grad_accum must divide batch_size.")
        need(self.lr > 0, "lr must be above 0.")
        need(0 <= self.min_lr <= self.lr, "min_lr must lie between 0 and lr.")
        need(0 <= self.warmup <= 1, "warmup is a share of max_steps, between 0 and 1.")
        need(0 <= self.beta1 < 1 and 0 <= self.beta2 < 1, "beta1 and beta2 must lie in [0, 1).")
        need(self.grad_clip > 0 and self.adam_eps > 0, "grad_clip and adam_eps must be above 0.")
        need(min(self.weight_decay, self.eval_tokens, self.sample_tokens) >= 0,
             "weight_decay, eval_tokens and sample_tokens must not be negative.")
        need(0 <= self.seed < 2**63, "seed must lie between 0 and 2**63 - 1.")
        need(self.out != ".." and self.out == Path(self.out).name,
             "out is the name of one folder, under out/.")
        need(self.data not in ("", "..") and self.data == Path(self.data).name,
             "data is the name of one folder, under data/.")
        need(self.compile in ("auto", "on", "off"), "compile is one of auto, on, off.")
        need(self.optimizer in ("adamw", "muon"), "optimizer is adamw or muon.")
        need(self.windows in ("stream", "documents"), "windows is stream or documents.")
        need(self.schedule in ("cosine", "cooldown"), "schedule is cosine or cooldown.")
        need(0 <= self.cooldown <= 1, "cooldown is a share of max_steps, between 0 and 1.")


# ----------------------------------------------------------------------------------------------------------
# Data


def get_batch(ids, step, config, context, sink=None, end_of_text=None, roles=None):
    """Return the windows of a step, a function of (seed, step) alone: inputs, targets (batch_size, context).

    sink is a token id, or None: it takes the place of the first input, and the targets stay. With
    windows="documents" a window begins where the document that was drawn does, after `end_of_text`: what a
    name refers to then stands in the same window, which is what teaches a model to look back. With roles,
    only the assistant's tokens count as targets.
    """
    rng = np.random.default_rng([config.seed, step])
    starts = rng.integers(0, len(ids) - context, size=config.batch_size)  # the last reaches the last token
    if config.windows == "documents":
        starts = [document_start(ids, start, end_of_text, context) for start in starts]
    windows = np.stack([ids[start : start + context + 1] for start in starts])
    windows = torch.from_numpy(windows.astype(np.int64))  # (batch_size, context + 1)
    inputs = windows[:, :-1].clone()
    targets = windows[:, 1:]
    if roles:
        targets = assistant_targets(inputs, targets, roles)
    if sink is not None:
        inputs[:, 0] = sink
    return inputs, targets


def assistant_targets(inputs, targets, roles):
    """Return the targets (..., T), with -100, which does not count, for what is not the assistant's to say.

    Its tokens count, and the <|end|> that closes its turn: all targets for which the latest of the roles, the
    ids of <|user|>, <|assistant|> and <|end|>, among the inputs so far is <|assistant|>. In a window that
    begins within a turn nobody knows whose it is, so nothing counts before the first of these.
    """
    marks = torch.isin(inputs, torch.tensor(list(roles.values())))
    latest = torch.where(marks, torch.arange(inputs.size(-1)), 0).cummax(dim=-1).values  # where it stands
    return targets.where(inputs.gather(-1, latest) == roles["<|assistant|>"], -100)


def document_start(ids, position, end_of_text, furthest):
    """Return the position of the end-of-text before ids[position], or 0; `position` if it is further back."""
    before = ids[max(0, position - furthest) : position]
    ends = np.flatnonzero(before == end_of_text)
    if len(ends):
        return position - len(before) + ends[-1]
    return 0 if position <= furthest else position


def validation_batches(ids, end_of_text, context, batch_size, sink=None, windows="stream", roles=None):
    """Yield (inputs, targets), each (up to batch_size, context): each token of `ids` counts once.

    With roles, only the assistant's do. A target that does not count is -100. The first input is an
    end-of-text, which stands before the stream.
    """
    stream, wanted = validation_stream(ids, end_of_text, roles)
    if windows == "documents":
        bounds = document_windows(ids, end_of_text, context)
    else:
        bounds = ((start, start, min(start + context, len(ids))) for start in range(0, len(ids), context))
    while batch := list(itertools.islice(bounds, batch_size)):
        width = max(end - start for start, _, end in batch)
        inputs = torch.full((len(batch), width), end_of_text)
        targets = torch.full((len(batch), width), -100)
        for row, (start, counted, end) in enumerate(batch):
            inputs[row, : end - start] = stream[start:end]
            targets[row, counted - start : end - start] = wanted[counted:end]
        if sink is not None:
            inputs[:, 0] = sink
        yield inputs, targets


def validation_stream(ids, end_of_text, roles=None):
    """Return ids as inputs, behind an end-of-text, and as targets, each (len(ids),)."""
    stream = torch.from_numpy(np.concatenate([[end_of_text], ids]).astype(np.int64))
    inputs = stream[:-1]
    targets = stream[1:]
    return inputs, assistant_targets(inputs, targets, roles) if roles else targets


def document_windows(ids, end_of_text, context):
    """Yield (start, counted, end) of windows ids[start:end] in which ids[counted:end] are to be predicted.

    A window begins where a document does and takes whole documents while they fit. One that is longer than
    the context is continued by windows that begin half a context before what is left of it.
    """
    start = counted = end = 0
    for document_end in [*(np.flatnonzero(ids == end_of_text) + 1).tolist(), len(ids)]:
        if document_end - start > context and end > counted:
            yield start, counted, end
            start = counted = end
        while document_end - start > context:
            yield start, counted, start + context
            counted = start + context
            start = counted - context // 2
        end = document_end
    if end > counted:
        yield start, counted, end


@torch.no_grad()
def evaluate(model, ids, tokenizer, batch_size, autocast, windows="stream", roles=None):
    """Return the loss on all of `ids`, the same every time: (nats per token, bits per byte of text).

    With windows="stream" they are cut wherever one is full, as for published numbers: what stood before, no
    model can know. With "documents" each is read from its beginning, and the text's entropy can be reached.
    With roles, only the assistant's tokens count.
    """
    n_bytes = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    n_bytes[list(tokenizer.specials.values())] = 0  # an end-of-text costs bits, but is no text
    device = next(model.parameters()).device
    sink = sink_id(model.config, tokenizer)
    nats = 0.0
    n_counted = 0  # tokens
    size = 0  # their bytes
    model.eval()
    batches = validation_batches(ids, tokenizer.end_of_text, model.config.context, batch_size, sink, windows,
                                 roles)
    for x, y in parallel.own_items(batches):
        counted = y[y != -100]
        if len(counted):  # the mean over nothing is no number
            with autocast:
                _, loss = model(x.to(device), y.to(device))
            nats += loss.item() * len(counted)
        n_counted += len(counted)
        size += n_bytes[counted.numpy()].sum()
    model.train()
    nats, n_counted, size = parallel.total([nats, n_counted, size])
    return nats / n_counted, nats / math.log(2) / max(1, size)


# ----------------------------------------------------------------------------------------------------------
# Optimizer


def learning_rate(step, config):
    """Linear warm-up, then cosine (helix paper, equation 43), for step = 0 .. max_steps - 1; later it stays.

    Two changes: the warm-up counts from 1, so that the first step already learns, and the cosine ends at
    min_lr. With schedule="cooldown" (Silia) the rate stays at its peak until the last share `cooldown` of the
    steps; the cosine is for those.
    """
    warm = config.warmup * config.max_steps
    if step + 1 < warm:
        return config.lr * (step + 1) / warm
    step = min(step, config.max_steps)
    start = warm  # of the cosine
    if config.schedule == "cooldown":
        start = max(warm, (1 - config.cooldown) * config.max_steps)
    progress = max(0.0, step - start) / max(1.0, config.max_steps - start)  # 0 .. 1
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(model, config):
    """Return {name: optimizer}: AdamW, and with optimizer="muon" also Muon, for the matrices of the blocks.

    Weight decay is on matrices and embeddings only. The tied matrix is one of them, once. Muon (K. Jordan and
    others, 2024) makes the momentum of a matrix nearly orthogonal before it takes it as the step; its steps
    are scaled to the size of AdamW's, so that one learning rate serves both.
    """
    muon = []
    if config.optimizer == "muon":
        muon = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is q for q in muon)]
    groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
              {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    optimizers = {"AdamW": torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2),
                                             eps=config.adam_eps, fused=True)}
    if muon:
        optimizers["Muon"] = torch.optim.Muon(muon, lr=config.lr, weight_decay=config.weight_decay,
                                              adjust_lr_fn="match_rms_adamw")
    return optimizers


def set_rates(optimizers, step, config):
    """Set this step's learning rate, which is returned, and Muon's momentum: 0.85 to 0.95 in 300 steps."""
    rate = learning_rate(step, config)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = rate
            if "momentum" in group:
                group["momentum"] = 0.85 + 0.1 * min(1.0, step / 300)
    return rate


def clip_and_step(model, optimizers, scaler, max_norm):
    """Clip the gradient to max_norm, let the optimizers step, clear it; return the norm that it had.

    The scaler is for float16, where small gradients would be 0: the loss was multiplied by a large number,
    here they are divided by it. Now and then that overflows; then nothing steps, and the number gets smaller.
    In other types the scaler passes everything on as it is.
    """
    for optimizer in optimizers.values():
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()
    if math.isfinite(norm):  # all optimizers step, or none: left alone, the scaler decides for each by itself
        for optimizer in optimizers.values():
            scaler.step(optimizer)
    scaler.update()
    model.zero_grad(set_to_none=True)
    return norm


# ----------------------------------------------------------------------------------------------------------
# The run


def train(config, model_config):
    """Train a model as the two configs say: set up, then step after step. Results are in out/<run>/."""
    # Where to compute and how precisely: weights are float32, matrix products under autocast are in dtype
    device, dtype = choose_device(config.device, config.dtype)
    choose_threads(config.threads)
    parallel.share_work(config, device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    torch.set_float32_matmul_precision("high")  # TF32, on the GPUs that have it

    # Token ids of both splits (on disk), their tokenizer, and what prepare.py noted about them
    with parallel.first_alone():
        if config.data in prepare.STORYBOOKS and not (prepare.DATA / config.data).exists():
            prepare.storybook(config.data, model_config.vocab_size)
    (train_ids, val_ids), tokenizer, meta = open_data(config.data, model_config)
    val_ids = val_ids[: config.eval_tokens or None]
    sink = sink_id(model_config, tokenizer)
    roles = chat_roles(tokenizer) if meta["chat"] and config.assistant_only else None
    n_val = len(val_ids)  # targets that count
    if roles:
        n_val = (validation_stream(val_ids, tokenizer.end_of_text, roles)[1] != -100).sum().item()
    need(n_val, f"the first {len(val_ids)} tokens of val.bin have none of the assistant: raise eval_tokens.")

    # The model with its optimizers, new or from a checkpoint; `run` holds them and writes out/<run>/
    run = set_up(config, model_config, meta, device, dtype)
    print_plan(config, run.model, meta, device, dtype, n_val, roles)
    batch_options = (config, model_config.context, sink, tokenizer.end_of_text, roles)
    first_rows = parallel.own_rows(*get_batch(train_ids, run.start, *batch_options))
    forward = compile_training(run.model, config, device, autocast, first_rows)
    progress = Progress(run.start, config.max_steps, tokens_per_step=config.batch_size * model_config.context)
    run.open_folder()

    step = run.start  # how many are done
    with (interruptible() as stop, run.log.file, progress.bar,
          parallel.save_if_another_ends(lambda: run.stop(step, progress))):
        if step == 0:
            evaluate_and_save(run, progress.row(step), val_ids, tokenizer, meta, autocast, roles, n_val)
        while step < config.max_steps and not parallel.anyone_stops(stop):
            # The batch of this step (of several processes, each takes its rows), and its learning rate
            began = time.perf_counter()
            x, y = get_batch(train_ids, step, *batch_options)
            n_targets = (y != -100).sum().item()  # those that count
            x, y = parallel.own_rows(x, y)
            lr = set_rates(run.optimizers, step, config)

            # Forward and backward, one micro-batch after the other: their gradients add up, each weighted by
            # its share of the targets
            step_loss, merge_ratios = 0.0, []
            for x_part, y_part in zip(x.chunk(config.grad_accum), y.chunk(config.grad_accum)):
                share = parallel.n_processes() * (y_part != -100).sum().item() / max(1, n_targets)
                if not share:
                    y_part = x_part  # the mean over no targets is no number; that over any, times 0, is 0
                with autocast:
                    _, loss = forward(x_part.to(device), y_part.to(device))
                run.scaler.scale(loss * share).backward()
                step_loss += loss.item() * share
                if model_config.token_merging != "off":
                    merge_ratios.append(run.model.merge_ratio())
            step_loss, *merge_ratios = parallel.average(run.model, [step_loss, *merge_ratios])

            # Clip the gradient and step
            norm = clip_and_step(run.model, run.optimizers, run.scaler, config.grad_clip)
            check_finite(step, loss=step_loss, gradient_norm=0.0 if run.scaler.is_enabled() else norm)
            step += 1

            # Log; from time to time evaluate and save as well
            progress.add(step_loss, lr, norm, merge_ratios, time.perf_counter() - began)
            if step % config.eval_every == 0 or step == config.max_steps:
                evaluate_and_save(run, progress.row(step), val_ids, tokenizer, meta, autocast, roles, n_val)
            elif step % config.log_every == 0:
                run.log.write(progress.row(step))
        if stop:  # Ctrl-C, or a polite kill
            run.stop(step, progress)
    run.print_end(step, stop)


def set_up(config, model_config, meta, device, dtype):
    """Make the model and its optimizers, or continue those of a checkpoint. Return them as a Run."""
    checkpoint = starting_checkpoint(config, model_config, meta["tokenizer"])  # of resume, init_from, or None
    if checkpoint:
        model = load_model(checkpoint, model_config, LanguageModel)
    else:
        torch.manual_seed(config.seed)
        model = new_model(model_config, LanguageModel)
    model.to(device)
    model.gradient_checkpointing = config.gradient_checkpointing
    model.chunked_loss = config.chunked_loss
    if device.type == "cpu":
        keep_freed_memory()
    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = parallel.Run(config, model, optimizers, scaler, meta["tokenizer"], meta["chat"])
    if config.resume:
        run.resume(checkpoint)
    return run


def evaluate_and_save(run, row, val_ids, tokenizer, meta, autocast, roles, n_val):
    """Evaluate, complete the row and log it, save the run, show a sample. n_val: how many targets count."""
    config = run.config
    n_windows = config.batch_size // config.grad_accum // parallel.n_processes()  # at once, as in training
    val_loss, bits_per_byte = evaluate(run.model, val_ids, tokenizer, n_windows, autocast, config.windows,
                                       roles)
    check_finite(row["step"], validation_loss=val_loss)
    row |= {"val_loss": val_loss, "bits_per_byte": bits_per_byte}
    run.log.write(row)  # before the checkpoint: a resumed run drops the rows that it writes again
    run.save(row["step"], val_loss)
    tqdm.write(evaluation_line(row, meta, n_val, roles))
    if "merge_ratio" in row:
        tqdm.write(merging_line(run.model, row["merge_ratio"], config.batch_size))
    tqdm.write(sample_text(run.model, tokenizer, config, first_turn(val_ids, roles)) + "\n")


def first_turn(val_ids, roles):
    """Return the ids up to the first <|assistant|>, for a sample to go on from: of plain text, none."""
    return val_ids[: np.argmax(val_ids == roles["<|assistant|>"]) + 1].tolist() if roles else []


def sample_text(model, tokenizer, config, ids):
    """Return the beginning of a document, as the model generates it now, behind its first ids."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(config.seed)
    sink = sink_id(model.config, tokenizer)
    start = [tokenizer.end_of_text] if sink is None else [sink, tokenizer.end_of_text]
    start += ids
    model.eval()
    for token in model.generate(torch.tensor([start], device=generator.device), config.sample_tokens,
                                temperature=0.8, generator=generator, n_ids=tokenizer.vocab_size):
        if token.item() == tokenizer.end_of_text:
            break
        ids.append(token.item())
    model.train()
    return tokenizer.decode(ids)


@parallel.processes()
def read_and_train():
    """Read the command line and train, alone or as one of several processes."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    file, (config, model_config) = read_settings(sys.argv[1:], TrainConfig, ModelConfig)
    config.out = config.out or (file.stem if file else "nano")
    train(config, model_config)


def main():
    run_main(read_and_train, interrupted="interrupted.", stdout_may_end=True)


if __name__ == "__main__":
    main()
