"""
Train a language model: one device, one plain loop, exact resume.

    python train.py config/tiny.py                      the embedded storybook, minutes on a CPU
    python train.py config/nano.py --batch_size=16      any field by name; --help lists them all
    python train.py config/tiny.py --resume             go on after Ctrl-C, a crash or a kill

Everything goes to out/<run>/: ckpt.pt (the last state), best.pt (the lowest validation loss), log.csv. The
batch of step i is a function of (seed, i) alone and nothing else is random, so a run that was stopped and
resumed ends, on a CPU, with the same weights to the last bit as one that was not.
"""

import contextlib
import csv
import ctypes
import hashlib
import json
import math
import os
import signal
import sys
import time
import zipfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while PyTorch loads: no traceback, just the end

import numpy as np
import torch
from tqdm import tqdm

import config as settings
import tokenizer as tokenizers
from model import LanguageModel, ModelConfig, NoCache

LOG_COLUMNS = ["step", "tokens", "lr", "train_loss", "val_loss", "bits_per_byte", "grad_norm",
               "tokens_per_second", "merge_ratio"]


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


def choose_device(device, dtype):
    """Names from the command line -> (torch.device, torch.dtype to compute in), or ValueError.

    auto: CUDA, else Apple's MPS, else CPU; then bfloat16 where the GPU has it (compute capability 8.0),
    float16 on an older one, float32 everywhere else.
    """
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        device = next(name for name in present if present[name])
    kind = device.split(":")[0]
    try:
        known = kind in present and torch.device(device)
    except RuntimeError:  # cuda:x
        known = False
    if not known:
        raise ValueError(f"device={device!r} is unknown; choices: auto, cpu, cuda, cuda:N, mps.")
    if not present[kind]:
        raise ValueError(f"this machine has no {kind} device that PyTorch can use; try device=cpu.")
    new_gpu = kind == "cuda" and torch.cuda.get_device_capability(torch.device(device)) >= (8, 0)
    if dtype == "auto":
        dtype = "float32" if kind != "cuda" else "bfloat16" if new_gpu else "float16"
    allowed = {"cpu": ["float32", "bfloat16"], "mps": ["float32"], "cuda": ["float32", "float16"]}[kind]
    allowed += ["bfloat16"] if new_gpu else []
    if dtype not in allowed:
        raise ValueError(f"dtype={dtype!r} is not for this {kind} device; choices: {', '.join(allowed)}.")
    return torch.device(device), getattr(torch, dtype)


# ----------------------------------------------------------------------------------------------------------
# Data


def open_data(name, model_config):
    """data/<name>/ -> ([train ids, val ids], tokenizer, meta), all checked against each other.

    The ids are uint16 arrays that stay on disk: a batch reads its windows only. meta is meta.json, with the
    text of tokenizer.json as meta["tokenizer"].
    """
    folder = Path("data") / name
    if name == "storybook" and model_config.sink_token not in ("", *tokenizers.SPECIALS):
        raise ValueError(f"data=storybook has no {model_config.sink_token}: take data=storybook_munch.")
    if name in ("storybook", "storybook_munch") and not folder.exists():
        import prepare

        prepare.storybook(name, model_config.vocab_size)
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        meta["tokenizer"] = (folder / "tokenizer.json").read_bytes().decode("utf-8")
        same = hashlib.sha256(meta["tokenizer"].encode("utf-8")).hexdigest() == meta["tokenizer_sha256"]
        sizes = {split: int(meta[split]["tokens"]) for split in ("train", "val")}
        found = {split: (folder / f"{split}.bin").stat().st_size for split in sizes}
        readable = meta["format"] == 1
    except (FileNotFoundError, NotADirectoryError):
        command = f"python prepare.py --name {name} --vocab_size {model_config.vocab_size}"
        command += " --munch" if model_config.sink_token else ""
        raise ValueError(f"there is no data in {folder}: {command} makes it of TinyStories, or of your own "
                         "text with --input.") from None
    except (KeyError, TypeError, ValueError, RecursionError):
        readable = False
    if not readable:
        raise ValueError(f"{folder} is damaged, or of another version: remove it and make it anew.")
    if not same:
        raise ValueError(f"{folder}/tokenizer.json is not the one that the data was made with.")
    tokenizer = tokenizers.parse(meta["tokenizer"])
    if model_config.sink_token not in ("", *tokenizer.specials):
        raise ValueError(f"{folder}/tokenizer.json has no token sink_token={model_config.sink_token!r}.")
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(f"{folder}/tokenizer.json has {tokenizer.vocab_size} tokens, more than the model's "
                         f"vocab_size={model_config.vocab_size}.")
    for split, needed in (("train", model_config.context + 1), ("val", 1)):
        tokens = sizes[split]
        if found[split] != 2 * tokens:
            raise ValueError(f"{folder}/{split}.bin has {found[split]} bytes; meta.json says 2 x {tokens}.")
        if tokens < needed:
            raise ValueError(f"{folder}/{split}.bin has {tokens} tokens, but at least {needed} are "
                             f"needed with context={model_config.context}.")
    splits = [np.memmap(folder / f"{split}.bin", dtype="<u2", mode="r") for split in sizes]
    if max(ids.max() for ids in splits) >= tokenizer.vocab_size:
        raise ValueError(f"the data in {folder} has ids that its tokenizer does not know.")
    return splits, tokenizer, meta


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


def save_checkpoint(checkpoint, path):
    """Write beside `path`, flush to disk, rename: whatever happens, `path` is the old file or the new one."""
    if not all(torch.isfinite(w).all() for w in checkpoint["model"].values()):
        raise ValueError(f"the weights are no longer finite: {path} was not written.")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # a full disk is either, from Python or from PyTorch's writer
        raise OSError(f"cannot write {path}: {error}".splitlines()[0]) from None
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path):
    """Read a checkpoint onto the CPU, or ValueError in a sentence. Runs no code from the file."""
    needed = {"format": int, "step": int, "best_val_loss": float, "model": dict, "optimizer": dict,
              "scaler": dict, "model_config": dict, "train_config": dict, "tokenizer": str}
    try:
        with zipfile.ZipFile(path) as file:
            whole = file.testzip() is None  # PyTorch does not look at the checksums
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        whole = whole and all(isinstance(checkpoint[name], kind) for name, kind in needed.items())
        whole = whole and checkpoint["format"] == 1 and checkpoint["step"] >= 0
    except FileNotFoundError:
        raise ValueError(f"there is no checkpoint {path}.") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from None
    except Exception:  # a damaged file can end in any of a dozen errors
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged, or no checkpoint of this project.")
    return checkpoint


def load_model(checkpoint):
    """The model of a checkpoint, float32, on the CPU."""
    known, weights = {field.name: field for field in fields(ModelConfig)}, checkpoint["model"]
    try:
        given = {name: settings.check(name, settings.find(name, known).type, value)
                 for name, value in checkpoint["model_config"].items()}
        config = ModelConfig(**given)
        if config.n_layer > len(weights) or not all(torch.isfinite(w).all() for w in weights.values()):
            raise ValueError("weights are missing, or not finite")
        with torch.device("meta"):  # shapes only: nothing is allocated before it is known to fit
            model = LanguageModel(config)
        model.load_state_dict(weights, assign=True)
        return model.float()
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0].rstrip(".:")
        raise ValueError(f"the checkpoint does not fit this model.py: {reason}.") from None


MOMENTS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}  # of each parameter


def load_tokenizer(checkpoint, path):
    """The tokenizer in the checkpoint of this file. ValueError if there is none."""
    if not checkpoint["tokenizer"]:
        raise ValueError(f"{path} has no tokenizer: import it again with --tokenizer.")
    return tokenizers.parse(checkpoint["tokenizer"])


def load_optimizers(optimizers, states):
    """Put the saved moments of each parameter into the optimizers; the settings stay those of this run."""
    try:
        states = {"AdamW": states} if "state" in states else states  # as it was written before Muon
        if states.keys() != optimizers.keys():
            raise ValueError
        for name, optimizer in optimizers.items():
            now, saved = optimizer.state_dict(), states[name]["state"]
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for i, moments in saved.items():
                if moments.keys() != MOMENTS[name]:
                    raise ValueError
                for key, x in moments.items():  # the fused kernel trusts these shapes
                    if x.dtype != torch.float32 or x.shape != (() if key == "step" else parameters[i].shape):
                        raise ValueError
            optimizer.load_state_dict({"state": saved, "param_groups": now["param_groups"]})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise ValueError("the optimizer's state in the checkpoint does not fit: give it the same model and "
                         "optimizer options.") from None


def check_same(what, old, config, resume):
    """ValueError, naming the first field, if the config of a checkpoint (a dict) is not this run's.

    Fields that the checkpoint is too old to have had their default. A run that begins from weights may merge
    otherwise than they did, and how they were initialised does not matter to it.
    """
    free = () if resume else ("token_merging", "merge_threshold", "init", "embedding_std", "phi")
    old = asdict(ModelConfig()) | old
    for name, new in asdict(config).items():
        if old[name] != new and name not in free:
            raise ValueError(f"{what} has {name}={old[name]!r}, this run {new!r}: give it the same model "
                             "options.")


# ----------------------------------------------------------------------------------------------------------
# The run


def train(config, model_config):
    """Set up, then loop: see how far the steps so far have brought us, then do one more."""
    device, dtype = choose_device(config.device, config.dtype)
    (train_ids, val_ids), tokenizer, meta = open_data(config.data, model_config)
    val_ids = val_ids[: config.eval_tokens or None]
    folder = Path("out") / config.out
    path, best_path = folder / "ckpt.pt", folder / "best.pt"
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    torch.set_float32_matmul_precision("high")  # TF32, on the GPUs that have it

    source = path if config.resume else config.init_from
    if source:
        old = load_checkpoint(source)
        check_same(source, old["model_config"], model_config, config.resume)
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
    describe(config, model, meta, device, dtype, len(val_ids))
    sink = tokenizer.specials.get(model_config.sink_token)
    first_batch = get_batch(train_ids, start, config, model_config.context, sink)
    forward = compile_model(model, config, device, autocast, first_batch)
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
                tqdm.write(report(row, meta, len(val_ids)))
                if "merge_ratio" in row:
                    tqdm.write(report_merging(model, row["merge_ratio"], config.batch_size))
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


def keep_freed_memory():
    """Have Linux's malloc keep what a step frees for the next one.

    Otherwise it gives large tensors back to the system and gets them anew, page by page and zeroed: a fifth
    of a step on a CPU, or more. The process keeps its peak memory, which grows by about a fourth.
    """
    try:
        malloc = ctypes.CDLL("libc.so.6")
        malloc.mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings
        malloc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing is given back
    except (OSError, AttributeError):  # another system
        pass


def new_model(model_config, seed):
    """A model with initial weights, or ValueError if there is no room for it."""
    torch.manual_seed(seed)
    try:
        return LanguageModel(model_config)
    except (RuntimeError, MemoryError):
        raise ValueError("a model of this size does not fit into this machine's memory.") from None


@contextlib.contextmanager
def interruptible():
    """Yields a list that the first Ctrl-C (or kill) only appends to; a second one acts at once."""
    stop, before = [], {}

    def note(number, frame):
        stop.append(number)
        signal.signal(number, before[number])

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Ctrl-C, a polite kill, a closed terminal
        if hasattr(signal, name):
            number = getattr(signal, name)
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_finite(step, **numbers):
    """ValueError, with advice, if one is not finite. Nothing is saved then: the last checkpoint is good."""
    for name, x in numbers.items():
        if not math.isfinite(x):
            raise ValueError(f"the {name.replace('_', ' ')} is {x} after {step} steps: try a lower lr, a "
                             "longer warmup or dtype=float32. The last checkpoint is from before, and kept.")


def check_resume(config, old, path):
    """Say what a resumed run goes on with, and what was changed."""
    if old["step"] > config.max_steps:
        raise ValueError(f"{path} has {old['step']} steps already, more than max_steps={config.max_steps}.")
    before = asdict(TrainConfig()) | old["train_config"]
    changed = [f"{name}={x!r}" for name, x in asdict(config).items()
               if name not in ("resume", "init_from") and before[name] != x]
    print(f"resuming {path} after {old['step']} steps" + "".join("; now " + change for change in changed))


def keep_earlier_run(folder):
    """A new run never overwrites an old one: an earlier folder of the same name gets a number and stays."""
    if folder.exists() and any(folder.iterdir()):
        n = 1
        while (kept := folder.with_name(f"{folder.name}.{n}")).exists():
            n += 1
        folder.rename(kept)
        print(f"the earlier run in {folder} is now {kept}")
    folder.mkdir(parents=True, exist_ok=True)


def first_line(error):
    """What an exception says, without the pages that a compiler adds; its kind, if it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def compile_model(model, config, device, autocast, batch):
    """torch.compile where wanted, tried on part of a batch; if that fails, a warning and the plain model.

    Not worth it with token merging: how many tokens are left is another number each time.
    """
    worth_it = device.type == "cuda" and model.config.token_merging == "off"
    if config.compile == "off" or (config.compile == "auto" and not worth_it):
        return model
    try:
        compiled = torch.compile(model)
        x, y = (part.chunk(config.grad_accum)[0].to(device) for part in batch)
        with autocast:
            _, loss = compiled(x, y)
        loss.backward()
        return compiled
    except Exception as error:  # a missing compiler, an old driver: whatever it is, training can go on
        print(f"warning: torch.compile failed ({first_line(error)}); going on without.", file=sys.stderr)
        return model
    finally:
        model.zero_grad(set_to_none=True)


class Log:
    """log.csv, a line at a time so that it can be watched."""

    def __init__(self, path, start):
        rows = []
        if start and path.exists():  # keep what a resumed run is not going to write again
            with open(path, encoding="utf-8", errors="replace", newline="") as file:
                steps = [(row, row.get("step") or "") for row in csv.DictReader(file)]
                rows = [row for row, step in steps if step.isdigit() and int(step) <= start]
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, LOG_COLUMNS, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)
        self.path, self.file = path, open(path, "a", encoding="utf-8", newline="", buffering=1)

    def write(self, row):
        row = {key: f"{x:.6g}" if isinstance(x, float) else x for key, x in row.items()}
        csv.DictWriter(self.file, LOG_COLUMNS, lineterminator="\n").writerow(row)

    def check_ours(self):
        """ValueError if another run has begun in this folder, which gives the folder a log of its own."""
        if not self.path.exists() or not os.path.samestat(os.fstat(self.file.fileno()), os.stat(self.path)):
            raise ValueError(f"another run has taken over {self.path.parent}: this one stops.")


def describe(config, model, meta, device, dtype, n_val):
    """What is about to happen, before it does."""
    context, per_step = model.config.context, config.batch_size * model.config.context
    budget, n_train = model.budget(), meta["train"]["tokens"]
    n = sum(budget["parameters"].values())
    print(f"data        {config.data}: {n_train:,} tokens to train on, {n_val:,} to validate on")
    print(f"device      {device}, computing in {str(dtype).removeprefix('torch.')}")
    print(f"step        {config.batch_size} x {context} = {per_step:,} tokens, {config.grad_accum} part(s); "
          f"{config.max_steps:,} steps are {config.max_steps * per_step / n_train:.2f} epochs")
    print(f"parameters  {n:,}")
    for name, size in budget["parameters"].items():
        print(f"    {name:<16}{size:>13,}{size / n:>8.1%}")
    print(f"decoding    {budget['cache_bytes']:,} bytes of keys and values at {context} tokens and "
          f"{budget['state_bytes']:,} of running sums; {budget['flops_per_token'] / 1e6:.1f} MFLOP a token")
    V, known = model.config.vocab_size, meta["vocab_size"]
    if known < V:
        print(f"note        the tokenizer has {known:,} tokens: {V - known:,} rows of the embedding are idle")
    near_zero = model.config.embedding_std <= 0.02 and model.config.init != "pytorch"
    expected = ", the first loss to expect" if near_zero else ""
    print(f"guessing    has a loss of ln {V} = {math.log(V):.3f}{expected}\n")


def report(row, meta, n_val):
    """One line on an evaluation, with the distance from the entropy floor where that is known."""
    train_loss = f"train {row['train_loss']:.4f}, " if "train_loss" in row else ""
    loss, floor = row["val_loss"], meta["val"].get("floor_nats_per_token")
    line = (f"step {row['step']}: {train_loss}val {loss:.4f}, perplexity {math.exp(min(loss, 700)):.4g}, "
            f"{row['bits_per_byte']:.4f} bits per byte")
    if floor is not None and n_val == meta["val"]["tokens"]:
        line += f"; {loss - floor:.4f} above the entropy floor of {floor:.4f}"
    return line


def report_merging(model, ratio, batch_size):
    """One line on what token merging saves in a step, forward and backward, when it merges away this share.

    Counted on a copy that has shapes only. In fact a little less: a batch is as long as its longest row.
    """
    from torch.utils.flop_counter import FlopCounterMode  # needed here only, and slow to import

    def flops(module, *inputs):  # of a forward pass over one window
        with FlopCounterMode(display=False) as counter:
            module(*inputs)
        return counter.get_total_flops()

    config, T, saved = model.config, model.config.context, 0
    passes = 4 if model.gradient_checkpointing else 3  # forward, again for backward; backward costs two
    merging = [layer for layer, block in enumerate(model.blocks) if block.find_pairs]
    with torch.device("meta"):
        copy = LanguageModel(config).eval()
        whole = flops(copy, torch.zeros(1, T, dtype=torch.long))
        for layer in merging:
            for sign, n in ((1, T), (-1, round((1 - ratio) * T))):
                x, tables = torch.zeros(1, n, config.d_model), torch.zeros(2, n, config.head_width // 2)
                below = [x] * min(layer, config.layers_below)
                saved += sign * flops(copy.blocks[layer].mixer, x, tables, NoCache(), below)
    return (f"merged {ratio:.1%} of the tokens in {len(merging)} of {config.n_layer} layers, which saves "
            f"{passes * batch_size * saved / 1e9:.3g} GFLOP, {saved / whole:.1%} of a step (of the scores of "
            f"these layers alone it would be the paper's mu (2 - mu), {ratio * (2 - ratio):.1%})")


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
        file, (config, model_config) = settings.load(sys.argv[1:], TrainConfig, ModelConfig)
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
