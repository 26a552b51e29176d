"""
Do the papers' ideas help? Every variant is trained in the same way, with several seeds, and one table compares.

    python extras/ablate.py                              the storybook, all variants, three seeds
    python extras/ablate.py --data slice --jobs 2        other data, two runs at a time
    python extras/ablate.py --data slice --table         what is there so far, without training

All models are as large as Nano here: the inner width of the feed-forward is chosen so that as many parameters
are in use. All see the same tokens, in the same batches for the same seed, at the same learning rate; Silia
alone has its own optimizer, rate and schedule, those of config/silia_tiny.py. Each run is one of train.py's:
the last column of out/ablate-<data>.csv has the options that repeat it. Runs that are in this file are not
repeated, and a run that was stopped goes on from its checkpoint. What stays of a run is
out/ablate-<data>-<variant>-<seed>/log.csv.

The loss is the validation loss after the last step. Intervals are 95%, by Student's t over the seeds; the
difference to Nano is taken seed by seed, as the batches are the same. A core-second is a second of processor
time, so that a busy machine does not blur the speed; it includes the evaluations.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for runs of this size, a second process does more than a thread

import torch

import config as settings
import prepare
import train
from model import LanguageModel, ModelConfig
from train import TrainConfig

BASE = dict(context=256, n_layer=3, d_model=128, n_head=8, device="cpu", batch_size=4, lr=3e-3, min_lr=1e-4,
            warmup=0.1, weight_decay=0.0, sample_tokens=0)
DATA = {"storybook": dict(embedding_std=0.3)}  # see config/tiny.py
NANO_FF = 256  # d_ff of Nano; that of the others follows

HELIX = dict(n_kv_head=4, position="helix", mixer="cross_layer", ffn="dual_stream", norm="offset_rms",
             init="normal")
VARIANTS = {
    "nano": {},
    "alpha-0": dict(alpha=0.0),  # standard rotary
    "no-gate": dict(gate=False),
    "late-gate": dict(gate_after_rotary=True),
    "swiglu": dict(ffn="swiglu"),  # for the butterfly
    "baseline": dict(mixer="attention", alpha=0.0, ffn="swiglu"),  # none of Nano's parts
    "helix": HELIX,
    "helix-no-summaries": HELIX | dict(lookback=0),
    "helix-no-radius": HELIX | dict(radial_amplitude=0.0),
    "helix-one-stream": HELIX | dict(ffn="swiglu"),
    "helix-merge-0.92": HELIX | dict(token_merging="paper", merge_threshold=0.92),  # the published threshold
    "helix-merge-0.3": HELIX | dict(token_merging="paper", merge_threshold=0.3),  # merges to the end
    "silia": dict(d_model=72, n_head=2, d_head=72, position="mirrored", alpha=0.0, mixer="hydra",
                  norm="bare_rms", embedding_norm=True, block="silia", init="pytorch",
                  sink_token="<|user|>",  # as good as <|actor|>: no text has it, and every tokenizer does
                  optimizer="muon", lr=1e-2, schedule="cooldown", warmup=0.05),
}

COLUMNS = ["variant", "seed", "parameters", "tokens", "val_loss", "bits_per_byte", "tokens_per_core_second",
           "settings"]
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # 1 to 10 degrees of freedom


def count(options):
    """Parameters in use: those that get a gradient. Without a layer below, some of the helix's get none."""
    model_config = settings.load(words(options), TrainConfig, ModelConfig)[1][1]
    with torch.device("meta"):  # shapes only
        model, idx = LanguageModel(model_config).eval(), torch.zeros(1, 2, dtype=torch.long)
        model(idx, idx)[1].backward()
    return sum(p.numel() for p in model.parameters() if p.grad is not None)


def words(options):
    """{name: value} -> the words of train.py's command line"""
    return [f"--{name}={value}" for name, value in options.items()]


def plan(data, variant, max_steps, vocab_size):
    """All options of a run but the seed, {name: value}; d_ff comes as near to Nano's size as it can."""
    common = dict(data=data, vocab_size=vocab_size) | BASE | DATA.get(data, {})
    common |= dict(max_steps=max_steps, eval_every=max(1, max_steps // 2), eval_tokens=65536)
    options, F = common | VARIANTS[variant], NANO_FF
    size, *two = [count(o) for o in (common | dict(d_ff=F), options | dict(d_ff=F), options | dict(d_ff=2 * F))]
    return options | dict(d_ff=round(F + F * (size - two[0]) / (two[1] - two[0])))  # a straight line


def name_of(options, variant, seed):
    return f"ablate-{options['data']}-{variant}-{seed}"


def results(path):
    """Finished runs in the csv file: {(variant, seed, settings): row}"""
    if not path.exists():
        return {}
    with open(path, encoding="utf-8", newline="") as file:
        return {(row["variant"], row["seed"], row["settings"]): row for row in csv.DictReader(file)
                if row["settings"]}


def run(path, options, variant, seed):
    """One run, by train.py's own loop, and its row in the csv file. Goes on from its checkpoint, if any."""
    _, (config, model_config) = settings.load(words(options | dict(seed=seed)), TrainConfig, ModelConfig)
    config.out = name_of(options, variant, seed)
    folder, start = Path("out") / config.out, 0
    if (folder / "ckpt.pt").exists():
        old = train.load_checkpoint(folder / "ckpt.pt")
        now = asdict(config), asdict(model_config)
        config.resume = (old["train_config"] | dict(resume=False), old["model_config"]) == now
        start = old["step"] if config.resume else 0
    began = time.process_time()
    train.train(config, model_config)
    seconds = time.process_time() - began
    per_step = config.batch_size * model_config.context
    with open(folder / "log.csv", encoding="utf-8", newline="") as file:
        last = list(csv.DictReader(file))[-1]
    row = [variant, seed, count(options), config.max_steps * per_step, last["val_loss"], last["bits_per_byte"],
           round((config.max_steps - start) * per_step / seconds) or "", " ".join(words(options))]
    with open(path, "a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)
    for name in ("ckpt.pt", "best.pt"):
        (folder / name).unlink(missing_ok=True)


def run_all(path, todo, jobs):
    """Each run in a process of its own, `jobs` at a time. True if none failed."""
    running, failed, total = {}, False, len(todo)
    while todo or running:
        if todo and len(running) < jobs:
            variant, seed = todo.pop(0)
            command = [sys.executable, __file__, *sys.argv[1:], "--run", variant, str(seed)]
            quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, encoding="utf-8")
            running[subprocess.Popen(command, **quiet)] = variant, seed
            print(f"{total - len(todo)} of {total}: {variant}, seed {seed}", flush=True)
        for process in [process for process in running if len(running) == jobs or not todo]:
            try:
                said = process.communicate(timeout=0.2)[1].strip().splitlines()
            except subprocess.TimeoutExpired:
                continue
            variant, seed = running.pop(process)
            if process.returncode:
                failed = True
                print(f"{variant}, seed {seed}: {said[-1] if said else 'was killed'}", file=sys.stderr)
    return not failed


def interval(values):
    """Numbers -> their mean, and half of its 95% interval, or None if they are fewer than three."""
    n = len(values)
    half = T95[min(n - 1, len(T95)) - 1] * statistics.stdev(values) / n**0.5 if n >= 3 else None
    return statistics.mean(values), half


def show(values, sign=""):
    mean, half = interval(values)
    return f"{mean:{sign}.3f}" + (f" ± {half:.3f}" if half is not None else "")


def table(rows, data):
    """Markdown. rows: {variant: {seed: row}}"""
    lines = ["| variant | seeds | parameters | loss | bits per byte | loss minus Nano's | tokens/core-second |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    loss = {variant: {seed: float(row["val_loss"]) for seed, row in found.items()}
            for variant, found in rows.items()}
    for variant, found in rows.items():
        shared = [seed for seed in found if seed in loss.get("nano", {}) and variant != "nano"]
        minus = show([loss[variant][seed] - loss["nano"][seed] for seed in shared], "+") if shared else ""
        bits = [float(row["bits_per_byte"]) for row in found.values()]
        speed = [float(row["tokens_per_core_second"]) for row in found.values() if row["tokens_per_core_second"]]
        first = next(iter(found.values()))
        lines.append(f"| {variant} | {len(found)} | {int(first['parameters']):,} | "
                     f"{show(list(loss[variant].values()))} | {show(bits)} | {minus} | "
                     f"{statistics.median(speed) if speed else 0:,.0f} |")
    tokens = {int(row["tokens"]) for found in rows.values() for row in found.values()}
    note = f"data/{data}, {max(tokens):,} tokens each; nats per token, ± half of a 95% interval."
    if any(len(found) < 3 for found in rows.values()):
        note += " Fewer than three seeds give no interval: these are means only."
    return "\n".join([*lines, "", note])


def arguments():
    parser = argparse.ArgumentParser(description="Do the papers' ideas help?", allow_abbrev=False)
    parser.error = lambda message: sys.exit(f"error: {message}")
    parser.add_argument("--data", default="storybook", help="folder under data/, made by prepare.py")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME",
                        help=f"default: all, {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--max_steps", type=int, default=1000, help="of 1,024 tokens (default: 1000)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="runs at a time (default: half the cores)")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # one run, in a process of its own
    args = parser.parse_args()
    if min(args.seeds, args.max_steps, args.jobs) < 1:
        raise ValueError("--seeds, --max_steps and --jobs must be at least 1.")
    return args


def main():
    args = arguments()
    path = Path("out") / f"ablate-{args.data}.csv"
    if args.data == "storybook":
        prepare.storybook()  # returns at once if it is there
    try:
        meta = json.loads((Path("data") / args.data / "meta.json").read_text(encoding="utf-8"))
        vocab_size = int(meta["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        vocab_size = 4096  # train.open_data will say in a sentence what is wrong
    if args.run:
        args.variants = args.run[:1]
    plans = {variant: plan(args.data, variant, args.max_steps, vocab_size) for variant in args.variants}
    if args.run:
        variant, seed = args.run
        return run(path, plans[variant], variant, int(seed))
    for options in plans.values():
        train.open_data(args.data, settings.load(words(options), TrainConfig, ModelConfig)[1][1])
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    wanted = {(variant, str(seed)): " ".join(words(options))
              for seed in range(1, args.seeds + 1) for variant, options in plans.items()}
    done = results(path)
    todo = [key for key, how in wanted.items() if (*key, how) not in done]
    good = args.table or run_all(path, todo, args.jobs)
    done = results(path)
    rows = {}
    for variant, seed in sorted(wanted, key=lambda key: args.variants.index(key[0])):
        if row := done.get((variant, seed, wanted[variant, seed])):
            rows.setdefault(variant, {})[seed] = row
    if not rows:
        raise ValueError(f"{path} has no finished run of these variants with these settings.")
    print(table(rows, args.data))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on.")
