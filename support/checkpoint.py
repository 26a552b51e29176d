"""Checkpoints: plain tensors, numbers, strings and dicts, so that loading one can run no code."""

import contextlib
import math
import sys
import zipfile
from dataclasses import asdict, fields
from pathlib import Path

import torch
from tqdm import tqdm

from model import LanguageModel, ModelConfig
from support import need
from support.files import atomic_write, free_name, leftovers
from support.hf_tokenizer import tokenizer_from_json
from support.report import Log, read_log
from support.runtime import out_of_memory
from support.settings import check_type, find_field


def save_checkpoint(checkpoint, path):
    """Write a checkpoint whole or not at all; ValueError if its weights are not finite."""
    finite = all(torch.isfinite(w).all() for w in checkpoint["model"].values())
    need(finite, f"the weights are no longer finite: {path} was not written.")
    with atomic_write(path) as file:
        torch.save(checkpoint, file)


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
        raise ValueError(f"cannot read {path}: {error.strerror or error}.") from None
    except Exception as error:  # a damaged file can end in any of a dozen errors
        if out_of_memory(error):
            raise
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged, or no checkpoint of this project.")
    return checkpoint


def saved_config(checkpoint):
    """Return the ModelConfig of a checkpoint. Fields that it is too old to have get their default."""
    known = {field.name: field for field in fields(ModelConfig)}
    try:
        return ModelConfig(**{name: check_type(name, find_field(name, known).type, value)
                              for name, value in checkpoint["model_config"].items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise misfit(error) from None


def load_model(checkpoint, config=None, model_class=LanguageModel):
    """Return the model of a checkpoint, float32, on the CPU; with `config` in place of its own, if given."""
    config = config or saved_config(checkpoint)
    try:
        weights = {plain_name(name): w for name, w in checkpoint["model"].items()}
        need(len(weights) == len(checkpoint["model"]), "some of its tensors are there twice")
        need(config.n_layer <= len(weights), f"{config.n_layer} layers want more than {len(weights)} tensors")
        with torch.device("meta"):  # shapes only: nothing is allocated before it is known to fit
            model = model_class(config)
        check_tensors(weights, model.state_dict())
        model.load_state_dict(weights, assign=True)
        return model.float()
    except (TypeError, RuntimeError, AttributeError, ValueError) as error:
        if out_of_memory(error):
            raise
        raise misfit(error) from None


def plain_name(name):
    """Return the name that this model.py gives a tensor.

    A model that was saved as torch.compile or DistributedDataParallel had wrapped it has their prefixes.
    """
    parts = [part for part in name.split(".") if part not in ("_orig_mod", "module")]
    return ".".join(parts).replace(".kv_below.", ".kv_summary.")


def check_tensors(weights, wanted):
    """ValueError, naming tensors, unless `weights` has all names and shapes of `wanted` and is finite."""
    known = [name for name in wanted if name in weights]
    faults = {
        "missing": [name for name in wanted if name not in weights],
        "unexpected": [name for name in weights if name not in wanted],
        "of another shape": [f"{name} {tuple(weights[name].shape)} instead of {tuple(wanted[name].shape)}"
                             for name in known if weights[name].shape != wanted[name].shape],
        "not finite": [name for name in known if not torch.isfinite(weights[name]).all()],
    }
    found = []
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            found.append(f"{fault}: {', '.join(names[:4])}{more}")
    need(not found, "; ".join(found))


def misfit(error):
    """Return the ValueError that says in a line what an error in a checkpoint's content means."""
    reason = str(error).splitlines()[0].rstrip(".:")
    return ValueError(f"the checkpoint does not fit this model.py: {reason}.")


def new_model(config, model_class=LanguageModel):
    """Return a model with initial weights; ValueError if there is no room for it."""
    try:
        return model_class(config)
    except (RuntimeError, MemoryError):
        raise ValueError("a model of this size does not fit into this machine's memory.") from None


def checkpoint_tokenizer(checkpoint, path):
    """Return the tokenizer in a checkpoint, read from this path; ValueError if there is none."""
    need(checkpoint["tokenizer"], f"{path} has no tokenizer: import it again with --tokenizer.")
    return tokenizer_from_json(checkpoint["tokenizer"])


MOMENTS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}  # of each parameter


def load_optimizers(optimizers, states):
    """Put the saved moments of each parameter into the optimizers; the settings stay those of this run."""
    try:
        states = {"AdamW": states} if "state" in states else states  # as it was written before Muon
        need(states.keys() == optimizers.keys(), "other optimizers")
        for name, optimizer in optimizers.items():
            saved = states[name]["state"]
            check_moments(optimizer, saved, MOMENTS[name])
            settings = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": saved, "param_groups": settings})
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise ValueError("the optimizer's state in the checkpoint does not fit: give it the same model and "
                         "optimizer options.") from None


def check_moments(optimizer, saved, names):
    """ValueError unless each parameter's saved moments have these names and its shape: kernels trust them."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, moments in saved.items():
        need(moments.keys() == names, "other moments")
        for name, x in moments.items():
            shape = () if name == "step" else parameters[i].shape
            need(x.dtype == torch.float32 and x.shape == shape, "another shape")


def starting_checkpoint(config, model_config, tokenizer_json):
    """Return the checkpoint that a run begins with (resume, init_from), if any, checked."""
    path = run_folder(config) / "ckpt.pt" if config.resume else config.init_from
    if not path:
        return None
    checkpoint = load_checkpoint(path)
    check_same_model(path, asdict(saved_config(checkpoint)), asdict(model_config), config.resume)
    checkpoint_tokenizer(checkpoint, path)  # it must have one
    need(checkpoint["tokenizer"] == tokenizer_json,
         f"{path} was trained with another tokenizer than that of data/{config.data}.")
    return checkpoint


def check_same_model(path, saved, wanted, resume):
    """ValueError, naming the first field, if the model settings saved in a checkpoint are not this run's.

    A run that begins from weights may merge tokens otherwise than they did and have another context, on which
    no weight depends; how they were initialised does not matter to it.
    """
    free = ("context", "token_merging", "merge_threshold", "init", "embedding_std", "weight_std", "phi")
    free = () if resume else free
    for name, value in wanted.items():
        need(saved[name] == value or name in free,
             f"{path} has {name}={saved[name]!r}, this run {value!r}: give it the same model options.")


def check_finite(step, **numbers):
    """ValueError, with advice, if one is not finite. Nothing is saved then: the last checkpoint is good."""
    for name, x in numbers.items():
        need(math.isfinite(x),
             f"the {name.replace('_', ' ')} is {x} after {step} steps: try a lower lr, a longer warmup or "
             "dtype=float32. The last checkpoint is from before, and kept.")


def run_folder(config):
    return Path("out") / config.out


class Run:
    """A run under way: its settings, model, optimizers and gradient scaler, and its folder out/<run>/."""

    def __init__(self, config, model, optimizers, scaler, tokenizer_json, chat=False):
        self.config = config
        self.model = model
        self.optimizers = optimizers
        self.scaler = scaler
        self.tokenizer_json = tokenizer_json
        self.chat = chat  # does it learn from conversations?
        self.start = 0  # steps done before
        self.best_val_loss = math.inf
        self.set_folder(run_folder(config))

    def set_folder(self, folder):
        self.folder = folder
        self.last_path = folder / "ckpt.pt"
        self.best_path = folder / "best.pt"

    def resume(self, checkpoint):
        """Continue from a checkpoint, whose weights the model has already, and say what was changed."""
        config = self.config
        self.start = checkpoint["step"]
        self.best_val_loss = checkpoint["best_val_loss"]
        load_optimizers(self.optimizers, checkpoint["optimizer"])
        self.scaler.load_state_dict(checkpoint["scaler"])
        need(self.start <= config.max_steps,
             f"{self.last_path} has {self.start} steps already, more than max_steps={config.max_steps}.")
        before = asdict(type(config)()) | checkpoint["train_config"]
        changes = {name: value for name, value in asdict(config).items()
                   if name not in ("resume", "init_from") and before[name] != value}
        print(f"resuming {self.last_path} after {self.start} steps"
              + "".join(f"; now {name}={value!r}" for name, value in changes.items()))
        had, has = checkpoint.get("threads"), torch.get_num_threads()
        if had not in (None, has):
            print(f"it had {had} thread(s) and has {has} now, so numbers will differ in their last bits; "
                  f"not with --threads={had}")
        validation = {"data", "eval_tokens", "windows", "assistant_only"}
        if self.start < config.max_steps and validation & changes.keys():
            self.best_val_loss = math.inf
            print("validation is another one from now on: the comparison for best.pt starts anew")

    def open_folder(self):
        """Begin to write; an earlier run of this name moves aside, unless it is this one."""
        for path, _ in leftovers(self.folder):
            path.unlink(missing_ok=True)
        if not self.config.resume:
            keep_earlier_run(self.folder)
        log = self.folder / "log.csv"
        self.log = Log(log, read_log(log, self.start) if self.start else [])

    def follow_folder(self):
        """Go on where the log is now: another run of this name moves the folder of this one aside.

        If it is nowhere, begin a folder anew, so that nothing that was computed is lost. Return whether there
        was a change.
        """
        before = self.folder
        if self.log.is_in(before):
            return False
        for folder in before.parent.glob("*"):
            if self.log.is_in(folder):
                self.set_folder(folder)
                self.log.path = folder / "log.csv"
                break
        else:
            self.set_folder(free_name(before))
            self.folder.mkdir(parents=True)
            self.log = Log(self.folder / "log.csv", self.log.rows)
        tqdm.write(f"{before} was moved, taken over or removed: this run goes on in {self.folder}")
        return True

    def save(self, step, val_loss=math.inf):
        """Write ckpt.pt; before it best.pt, if this validation loss is the lowest so far."""
        self.follow_folder()
        names = ["ckpt.pt"]
        if val_loss < self.best_val_loss:
            if self.best_val_loss == math.inf and self.best_path.exists():  # the best by another validation
                self.best_path.rename(free_name(self.best_path))
            self.best_val_loss = val_loss
            names.insert(0, "best.pt")
        checkpoint = {
            "format": 1, "step": step, "best_val_loss": self.best_val_loss, "model": self.model.state_dict(),
            "optimizer": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
            "model_config": asdict(self.model.config), "train_config": asdict(self.config),
            "tokenizer": self.tokenizer_json, "chat": self.chat, "threads": torch.get_num_threads(),
        }
        for name in names:
            self.follow_folder()
            try:
                save_checkpoint(checkpoint, self.folder / name)
            except OSError:
                if not self.follow_folder():
                    raise
                save_checkpoint(checkpoint, self.folder / name)  # it was moved in between

    def stop(self, step, progress):
        """End before the last step: write to the log what is not in it yet, and save."""
        if progress.losses:
            self.log.write(progress.row(step))
        self.save(step)

    def print_end(self, step, stop):
        """Say how the run ended and what to do next. If a signal ended it, exit as shells expect."""
        if stop:
            now = Path(self.config.out).with_name(self.folder.name)
            moved = "" if self.folder == run_folder(self.config) else f" --out={now}"
            print(f"stopped after {step} steps and saved {self.last_path}: the same command with "
                  f"--resume{moved} goes on.")
            sys.exit(128 + stop[0])
        print(f"done. Last state: {self.last_path}; best: {self.best_path}, "
              f"validation loss {self.best_val_loss:.4f}.")
        more = "--chat" if self.chat else '--prompt "Once upon a time"'
        print(f"Now try: python sample.py --checkpoint {self.last_path} {more}")


def keep_earlier_run(folder):
    """Make the folder of a new run, which overwrites nothing: an earlier one of that name gets a number.

    One that still runs goes on there (`Run.follow_folder`).
    """
    if folder.exists() and any(folder.iterdir()):
        kept = free_name(folder)
        with contextlib.suppress(FileNotFoundError):  # another new run was quicker
            folder.rename(kept)
            print(f"the earlier run in {folder} is now {kept}")
    folder.mkdir(parents=True, exist_ok=True)


def newest_checkpoint():
    """Return the path of the last state of the run that was trained last."""
    found = sorted(Path("out").glob("*/ckpt.pt"), key=lambda path: path.stat().st_mtime)
    need(found, "there is no checkpoint under out/: train first (python train.py config/tiny.py), or name "
                "one with --checkpoint.")
    return found[-1]
