"""
Train a language model: one device, one plain loop, exact resume.

    python train.py config/tiny.py                      the embedded storybook, minutes on a CPU
    python train.py config/nano.py --batch_size=16      any field by name; --help lists them all
    python train.py config/tiny.py --resume             go on after Ctrl-C, a crash or a kill

Everything goes to out/<run>/: ckpt.pt (the last state), best.pt (the lowest validation loss), log.csv. The
batch of step i is a function of (seed, i) alone and nothing else is random, so a run that was stopped and
resumed ends, on a CPU, with the same weights to the last bit as one that was not.
"""

import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while PyTorch loads: no traceback, just the end

import numpy as np
import torch
from tqdm import tqdm

import prepare
from model import LanguageModel, ModelConfig
from support.checkpoint import (check_resume, check_same_model, keep_earlier_run, load_checkpoint, load_model, load_optimizers,
                                save_checkpoint)
from support.corpus import open_data
from support.report import Log, evaluation_line, merging_line, print_plan
from support.runtime import choose_device, compile_training, interruptible, keep_freed_memory
from support.settings import read_settings


@dataclass
class TrainConfig:
    """How to train. Every field is also an option."""

    data: str = "tinystories"  # folder under data/, made by prepare.py
    out: str = ""  # folder under out/; empty: the name of the config file
    resume: bool = False  # go on from out/<run>/ckpt.pt
    init_from: str = ""  # start a new run from the weights of this checkpoint
    seed: int = 1337  # of the initial weights and of the batches
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: str = "auto"  # compute type: auto, float32, bfloat16, float16; weights are always float32
    compile: str = "auto"  # torch.compile: auto (on CUDA, without token merging), on, off
    gradient_checkpointing: bool = False  # recompute activations in backward: less memory, more time
    chunked_loss: bool = False  # the loss without all logits at once: much less memory; often faster on a CPU
    max_steps: int = 20000  # optimizer steps in all
    batch_size: int = 32  # windows of `context` tokens in a step
    grad_accum: int = 1  # read the batch in this many parts: less memory, the same step
    optimizer: str = "adamw"  # adamw; muon: torch.optim.Muon for the blocks' matrices, AdamW for the rest
    lr: float = 3e-4  # peak learning rate
    min_lr: float = 0.0  # where the cosine ends
    schedule: str = "cosine"  # learning rate after the warm-up: cosine, or cooldown (constant, then a cosine)
    warmup: float = 0.05  # share of max_steps in which the learning rate rises
    cooldown: float = 0.45  # schedule=cooldown: share of max_steps, at the end, in which the rate falls
    weight_decay: float = 0.1  # on matrices and embeddings; never on gains and biases
    beta1: float = 0.9  # AdamW: decay of the gradient's running mean
    beta2: float = 0.95  # AdamW: decay of the squared gradient's running mean
    adam_eps: float = 1e-8  # AdamW: added to the denominator
    grad_clip: float = 1.0  # largest norm of the gradient
    eval_every: int = 500  # steps between evaluations; each writes a checkpoint
    eval_tokens: int = 0  # validate on the first so many tokens of the split; 0: all of it
    log_every: int = 10  # steps between rows of log.csv
    sample_tokens: int = 80  # tokens of the sample shown at each evaluation

    def __post_init__(self):
        wrong = {
            "max_steps must not be negative": self.max_steps < 0,
            "batch_size, grad_accum, eval_every and log_every must be at least 1":
                min(self.batch_size, self.grad_accum, self.eval_every, self.log_every) < 1,
            "grad_accum must divide batch_size": self.batch_size % max(1, self.grad_accum) != 0,
            "lr must be above 0": not self.lr > 0,
            "min_lr must lie between 0 and lr": not 0 <= self.min_lr <= self.lr,
            "warmup is a share of max_steps, between 0 and 1": not 0 <= self.warmup <= 1,
            "beta1 and beta2 must lie in [0, 1)": not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1),
            "grad_clip and adam_eps must be above 0": not (self.grad_clip > 0 and self.adam_eps > 0),
            "weight_decay, eval_tokens and sample_tokens must not be negative":
                min(self.weight_decay, self.eval_tokens, self.sample_tokens) < 0,
            "seed must lie between 0 and 2**63 - 1": not 0 <= self.seed < 2**63,
            "out is the name of one folder, under out/": self.out == ".." or self.out != Path(self.out).name,
            "data is the name of one folder, under data/":
                self.data in ("", "..") or self.data != Path(self.data).name,
            "compile is one of auto, on, off": self.compile not in ("auto", "on", "off"),
            "optimizer is adamw or muon": self.optimizer not in ("adamw", "muon"),
            "schedule is cosine or cooldown": self.schedule not in ("cosine", "cooldown"),
            "cooldown is a share of max_steps, between 0 and 1": not 0 <= self.cooldown <= 1,
            "resume and init_from exclude each other": self.resume and bool(self.init_from),
        }
        for sentence, is_so in wrong.items():
            if is_so:
                raise ValueError(sentence + ".")


# ----------------------------------------------------------------------------------------------------------
# Device and precision


# ----------------------------------------------------------------------------------------------------------
# Data


def get_batch(ids, step, config, context, sink=None):
    """The windows of a step, a function of (seed, step) alone: inputs, targets (batch_size, context) each.

    sink is a token id, or None: it takes the place of the first input, and the targets stay.
    """
    rng = np.random.default_rng([config.seed, step])
    starts = rng.integers(0, len(ids) - context, size=config.batch_size)  # the last reaches the last token
    windows = torch.from_numpy(np.stack([ids[s : s + context + 1] for s in starts]).astype(np.int64))
    inputs, targets = windows[:, :-1].clone(), windows[:, 1:]
    if sink is not None:
        inputs[:, 0] = sink
    return inputs, targets


def validation_batches(ids, end_of_text, context, batch_size, sink=None):
    """Yields (inputs, targets): each token of `ids` is a target once, the first one after an end-of-text."""
    stream = torch.from_numpy(np.concatenate([[end_of_text], ids]).astype(np.int64))
    inputs, targets = stream[:-1].clone(), stream[1:]
    if sink is not None:
        inputs[::context] = sink  # the first of each window
    whole = len(ids) // context * context  # tokens in full windows; the last, shorter one goes alone
    if whole:
        yield from zip(*(part[:whole].view(-1, context).split(batch_size) for part in (inputs, targets)))
    if whole < len(ids):
        yield inputs[None, whole:], targets[None, whole:]


@torch.no_grad()
def evaluate(model, ids, tokenizer, batch_size, autocast):
    """Loss on all of `ids`, the same every time: (nats per token, bits per byte of text)."""
    n_bytes = np.array([len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)])
    n_bytes[list(tokenizer.specials.values())] = 0  # an end-of-text costs bits, but is no text
    device = next(model.parameters()).device
    nats = 0.0
    model.eval()
    sink = tokenizer.specials.get(model.config.sink_token)
    for x, y in validation_batches(ids, tokenizer.end_of_text, model.config.context, batch_size, sink):
        with autocast:
            nats += model(x.to(device), y.to(device))[1].item() * y.numel()
    model.train()
    return nats / len(ids), nats / math.log(2) / max(1, n_bytes[ids].sum())


# ----------------------------------------------------------------------------------------------------------
# Optimizer


def learning_rate(step, config):
    """Linear warm-up, then cosine (helix paper, equation 43), for step = 0 .. max_steps - 1.

    Two changes: the warm-up counts from 1, so that the first step already learns, and the cosine ends at
    min_lr. With schedule="cooldown" (Silia) the rate stays at its peak until the last share `cooldown` of the
    steps; the cosine is for those.
    """
    warm = config.warmup * config.max_steps
    if step + 1 < warm:
        return config.lr * (step + 1) / warm
    start = max(warm, (1 - config.cooldown) * config.max_steps) if config.schedule == "cooldown" else warm
    progress = max(0.0, step - start) / max(1.0, config.max_steps - start)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizers(model, config):
    """{name: optimizer}: AdamW, and with optimizer="muon" also Muon, for the matrices of the blocks.

    Weight decay is on matrices and embeddings only. The tied matrix is one of them, once. Muon's steps are
    scaled to the size of AdamW's, so that one learning rate serves both.
    """
    muon = [p for p in model.blocks.parameters() if p.dim() == 2 and config.optimizer == "muon"]
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


# ----------------------------------------------------------------------------------------------------------
# Checkpoints: plain tensors, numbers, strings and dicts, so that loading one can run no code


# ----------------------------------------------------------------------------------------------------------
# The run


def train(config, model_config):
    """Set up, then loop: see how far the steps so far have brought us, then do one more."""
    device, dtype = choose_device(config.device, config.dtype)
    if config.data in prepare.STORYBOOKS and not (prepare.DATA / config.data).exists():
        prepare.storybook(config.data, model_config.vocab_size)
    (train_ids, val_ids), tokenizer, meta = open_data(config.data, model_config)
    val_ids = val_ids[: config.eval_tokens or None]
    folder = Path("out") / config.out
    path, best_path = folder / "ckpt.pt", folder / "best.pt"
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    torch.set_float32_matmul_precision("high")  # TF32, on the GPUs that have it

    source = path if config.resume else config.init_from
    if source:
        old = load_checkpoint(source)
        check_same_model(source, old["model_config"], model_config, config.resume)
        if old["tokenizer"] != meta["tokenizer"]:
            raise ValueError(f"{source} was trained with another tokenizer than that of data/{config.data}.")
        model = load_model(old)
    else:
        model = new_model(model_config, config.seed)
    model.to(device).gradient_checkpointing = config.gradient_checkpointing
    model.chunked_loss = config.chunked_loss
    if device.type == "cpu":
        keep_freed_memory()
    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    start, best = 0, math.inf
    if config.resume:
        start, best = old["step"], old["best_val_loss"]
        load_optimizers(optimizers, old["optimizer"])
        scaler.load_state_dict(old["scaler"])
        check_resume(config, old, path)
    print_plan(config, model, meta, device, dtype, len(val_ids))
    sink = tokenizer.specials.get(model_config.sink_token)
    first_batch = get_batch(train_ids, start, config, model_config.context, sink)
    forward = compile_training(model, config, device, autocast, first_batch)
    if not config.resume:
        keep_earlier_run(folder)
    log = Log(folder / "log.csv", start)

    def save(target):
        log.check_ours()
        checkpoint = {
            "format": 1, "step": step, "best_val_loss": best, "model": model.state_dict(),
            "optimizer": {name: optimizer.state_dict() for name, optimizer in optimizers.items()},
            "scaler": scaler.state_dict(),
            "model_config": asdict(model_config), "train_config": asdict(config),
            "tokenizer": meta["tokenizer"],
        }
        try:
            save_checkpoint(checkpoint, target)
        except OSError:
            log.check_ours()  # the folder may have been taken over in between
            raise

    per_step = config.batch_size * model_config.context  # tokens
    losses, merged, norm, clock = [], [], None, time.perf_counter()  # since the last row of the log
    bar = tqdm(total=config.max_steps, initial=start, unit="step", dynamic_ncols=True,
               mininterval=0.1 if sys.stderr.isatty() else 10)  # a log file needs few lines
    with interruptible() as stop, log.file, bar:
        for step in range(start, config.max_steps + 1):
            # So far `step` steps are done.
            end = stop or step == config.max_steps
            row = {"step": step, "tokens": step * per_step}
            if losses:
                speed = len(losses) * per_step / (time.perf_counter() - clock)
                row |= {"lr": rate, "train_loss": sum(losses) / len(losses), "grad_norm": norm,
                        "tokens_per_second": speed}
            if merged:
                row["merge_ratio"] = sum(merged) / len(merged)
            evaluating = (step % config.eval_every == 0 or step == config.max_steps) and (losses or step == 0)
            if evaluating:
                rows_at_once = config.batch_size // config.grad_accum
                val_loss, bits = evaluate(model, val_ids, tokenizer, rows_at_once, autocast)
                check_finite(step, validation_loss=val_loss)
                row |= {"val_loss": val_loss, "bits_per_byte": bits}
            if evaluating or (losses and (end or step % config.log_every == 0)):
                log.write(row)  # before the checkpoint: a resumed run drops the rows that it writes again
                losses, merged = [], []
            if evaluating and val_loss < best:
                best = val_loss
                save(best_path)
            if evaluating or stop:
                save(path)
            if evaluating:
                tqdm.write(evaluation_line(row, meta, len(val_ids)))
                if "merge_ratio" in row:
                    tqdm.write(merging_line(model, row["merge_ratio"], config.batch_size))
                tqdm.write(show_sample(model, tokenizer, config) + "\n")
            if end:
                break
            if not losses:
                clock = time.perf_counter()

            rate = set_rates(optimizers, step, config)
            step_loss = 0.0
            x, y = get_batch(train_ids, step, config, model_config.context, sink)
            for x_part, y_part in zip(x.chunk(config.grad_accum), y.chunk(config.grad_accum)):
                with autocast:
                    _, loss = forward(x_part.to(device), y_part.to(device))
                scaler.scale(loss / config.grad_accum).backward()
                step_loss += loss.item() / config.grad_accum
                if model_config.token_merging != "off":
                    merged.append(model.merge_ratio())
            for optimizer in optimizers.values():
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).item()
            # float16 gradients overflow now and then: the scaler then skips the step and lowers its scale
            check_finite(step, loss=step_loss, gradient_norm=0.0 if scaler.is_enabled() else norm)
            for optimizer in optimizers.values() if math.isfinite(norm) else ():  # all of them, or none
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad(set_to_none=True)
            losses.append(step_loss)
            bar.update()
            bar.set_postfix(loss=f"{step_loss:.3f}", lr=f"{rate:.1e}",
                            tok_s=f"{len(losses) * per_step / (time.perf_counter() - clock):,.0f}")
    if stop:
        print(f"stopped after {step} steps and saved {path}: the same command with --resume goes on.")
        sys.exit(128 + stop[0])
    print(f"done. Last state: {path}; best: {best_path}, validation loss {best:.4f}.")
    print(f'Now try: python sample.py --checkpoint {path} --prompt "Once upon a time"')


def new_model(model_config, seed):
    """A model with initial weights, or ValueError if there is no room for it."""
    torch.manual_seed(seed)
    try:
        return LanguageModel(model_config)
    except (RuntimeError, MemoryError):
        raise ValueError("a model of this size does not fit into this machine's memory.") from None


def check_finite(step, **numbers):
    """ValueError, with advice, if one is not finite. Nothing is saved then: the last checkpoint is good."""
    for name, x in numbers.items():
        if not math.isfinite(x):
            raise ValueError(f"the {name.replace('_', ' ')} is {x} after {step} steps: try a lower lr, a "
                             "longer warmup or dtype=float32. The last checkpoint is from before, and kept.")


def show_sample(model, tokenizer, config):
    """The beginning of a story, as the model tells it now."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(config.seed)
    sink = tokenizer.specials.get(model.config.sink_token)
    start = [tokenizer.end_of_text] if sink is None else [sink, tokenizer.end_of_text]
    idx, ids = torch.tensor([start], device=generator.device), []
    model.eval()
    for token in model.generate(idx, config.sample_tokens, 0.8, generator=generator,
                                n_ids=tokenizer.vocab_size):
        if token.item() == tokenizer.end_of_text:
            break
        ids.append(token.item())
    model.train()
    return tokenizer.decode(ids)


def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdout:
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        file, (config, model_config) = read_settings(sys.argv[1:], TrainConfig, ModelConfig)
        config.out = config.out or (file.stem if file else "nano")
        train(config, model_config)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except (MemoryError, torch.OutOfMemoryError):
        sys.exit("error: out of memory; try a larger grad_accum or a smaller batch_size.")
    except KeyboardInterrupt:
        print("interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
