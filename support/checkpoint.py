"""Checkpoints: plain tensors, numbers, strings and dicts, so that loading one can run no code."""

import os
import zipfile
from dataclasses import asdict, fields
from pathlib import Path

import torch

from model import LanguageModel, ModelConfig
from support.hf_tokenizer import tokenizer_from_json
from support.settings import check_type, find_field


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
    known = {field.name: field for field in fields(ModelConfig)}
    weights = {name.replace(".kv_below.", ".kv_summary."): w for name, w in checkpoint["model"].items()}
    try:
        given = {name: check_type(name, find_field(name, known).type, value)
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


def checkpoint_tokenizer(checkpoint, path):
    """The tokenizer in the checkpoint of this file. ValueError if there is none."""
    if not checkpoint["tokenizer"]:
        raise ValueError(f"{path} has no tokenizer: import it again with --tokenizer.")
    return tokenizer_from_json(checkpoint["tokenizer"])


MOMENTS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum_buffer"}}  # of each parameter


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


def check_same_model(what, old, config, resume):
    """ValueError, naming the first field, if the config of a checkpoint (a dict) is not this run's.

    Fields that the checkpoint is too old to have had their default. A run that begins from weights may merge
    otherwise than they did, and how they were initialised does not matter to it.
    """
    free = () if resume else ("token_merging", "merge_threshold", "init", "embedding_std", "phi")
    old = asdict(ModelConfig(**old))  # zeros such as d_head=0 were kept as such
    for name, new in asdict(config).items():
        if old[name] != new and name not in free:
            raise ValueError(f"{what} has {name}={old[name]!r}, this run {new!r}: give it the same model "
                             "options.")


def check_resume(config, old, path):
    """Say what a resumed run goes on with, and what was changed."""
    if old["step"] > config.max_steps:
        raise ValueError(f"{path} has {old['step']} steps already, more than max_steps={config.max_steps}.")
    before = asdict(type(config)()) | old["train_config"]
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


def newest_checkpoint():
    """The last state of the run that was trained last."""
    found = sorted(Path("out").glob("*/ckpt.pt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError("there is no checkpoint under out/: train first (python train.py config/tiny.py), "
                         "or name one with --checkpoint.")
    return found[-1]
