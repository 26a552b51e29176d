"""
Do the papers' ideas help? Every variant is trained in the same way, with several seeds; one table compares.

    python extras/ablate.py                              the storybook, all variants, three seeds
    python extras/ablate.py --data slice --jobs 2        other data, two runs at a time
    python extras/ablate.py --data slice --table         what is there so far, without training

A run of the default 1,000 steps takes two to three minutes of one core; there are 39.

Any data of prepare.py will do. A slice of TinyStories, about 13 MB, from the download of `python prepare.py`:

    head -n 90000 data/raw/TinyStoriesV2-GPT4-train.txt > slice.txt
    python prepare.py --name slice --input slice.txt --vocab_size 4096

All models are as large as Nano here: the inner width of the feed-forward is chosen so that as many parameters
are in use. All see the same tokens, in the same batches for the same seed. The learning rate is one for all,
between the 2e-3 of config/tiny.py and the 4e-3 of config/helix_tiny.py; nobody's was tuned. Silia alone has
its own optimizer, rate and schedule, those of config/silia_tiny.py.

Each run is one of train.py's; the last column of out/ablate-<data>.csv has its options, all but --seed. Runs
that are in this file are not repeated, and a run that was stopped goes on from its checkpoint. What stays of
it in the end is out/ablate-<data>-<variant>-<seed>/log.csv.

The loss is that on the first 65,536 tokens of the validation split after the last step, in nats per token.
Intervals are 95%, by Student's t over the seeds; the difference to Nano is taken seed by seed, as the batches
are the same. A core-second is a second of processor time, which a busy machine hardly stretches; the three
evaluations of a run are included.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # at this size, use a second core for a second run

import torch

import prepare
import train
from model import LanguageModel, ModelConfig
from support import need
from support.checkpoint import load_checkpoint, saved_config
from support.corpus import open_data
from support.runtime import run_main
from support.settings import CommandLine, read_settings
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
                  sink_token="<|user|>",  # as good as <|actor|>, which only --munch makes: no text has it
                  optimizer="muon", lr=1e-2, schedule="cooldown", warmup=0.05),
}

COLUMNS = ["variant", "seed", "parameters", "tokens", "val_loss", "bits_per_byte", "tokens_per_core_second",
           "settings"]
T95 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # Student's t for 3, 4, .. 11 values


def words(options):
    """{name: value} -> the words of train.py's command line"""
    return [f"--{name}={value}" for name, value in options.items()]


def configs(options):
    """{name: value} -> (TrainConfig, ModelConfig), as train.py makes them of its command line"""
    return read_settings(words(options), TrainConfig, ModelConfig)[1]


def count(options):
    """Parameters in use: those that get a gradient. In the helix's lowest layer, some have nothing to do."""
    model, idx = LanguageModel(configs(options)[1]).eval(), torch.zeros(1, 2, dtype=torch.long)
    model(idx, idx)[1].backward()
    return sum(p.numel() for p in model.parameters() if p.grad is not None)


def plan(data, variant, max_steps, vocab_size):
    """All options of a run but the seed, {name: value}; d_ff comes as near to Nano's size as it can."""
    common = dict(data=data, vocab_size=vocab_size) | BASE | DATA.get(data, {})
    common |= dict(max_steps=max_steps, eval_every=max(1, max_steps // 2), eval_tokens=65536)
    options, F = common | VARIANTS[variant], NANO_FF
    size, one, two = map(count, (common | dict(d_ff=F), options | dict(d_ff=F), options | dict(d_ff=2 * F)))
    return options | dict(d_ff=round(F + F * (size - one) / (two - one)))  # a straight line


def results(path):
    """Finished runs in the csv file: {(variant, seed, settings): row}"""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {(row["variant"], row["seed"], row["settings"]): row for row in csv.DictReader(text.splitlines())}


def run(path, options, variant, seed):
    """One run, by train.py's own loop, and its row in the csv file. Goes on from its checkpoint, if any."""
    config, model_config = configs(options | dict(seed=seed))
    config.out = f"ablate-{config.data}-{variant}-{seed}"
    folder = Path("out") / config.out
    start = 0
    if (folder / "ckpt.pt").exists():
        old = load_checkpoint(folder / "ckpt.pt")
        same_training = old["train_config"] | dict(resume=False) == asdict(config)
        config.resume = same_training and saved_config(old) == model_config
        start = old["step"] if config.resume else 0
    began = time.process_time()
    train.train(config, model_config)
    seconds = time.process_time() - began
    per_step = config.batch_size * model_config.context
    with open(folder / "log.csv", encoding="utf-8", newline="") as file:
        last = list(csv.DictReader(file))[-1]
    speed = round((config.max_steps - start) * per_step / seconds)
    row = [variant, seed, count(options), config.max_steps * per_step, last["val_loss"],
           last["bits_per_byte"], speed, " ".join(words(options))]
    with open(path, "a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)
    for name in ("ckpt.pt", "best.pt"):
        (folder / name).unlink(missing_ok=True)


def run_all(todo, jobs):
    """The runs (variant, seed, settings), each in its own process, `jobs` at a time. True if none failed."""
    def one(what):
        variant, seed, _ = what
        print(f"{variant}, seed {seed}", flush=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--variants", variant, "--run", seed]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["killed"]
            print(f"{variant}, seed {seed}: {said[-1]}", file=sys.stderr)
        return done.returncode == 0

    with ThreadPoolExecutor(jobs) as pool:  # Ctrl-C reaches the processes too: they save, and no more follow
        return all(list(pool.map(one, todo)))


def show(values, sign=""):
    """Numbers -> "mean ± half of its 95% interval", or only the mean if they are fewer than three."""
    values = list(values)
    n, mean = len(values), f"{statistics.mean(values):{sign}.3f}"
    if n < 3:
        return mean
    t = T95[min(n, 11) - 3]  # for more than 11 a little too wide
    return f"{mean} ± {t * statistics.stdev(values) / n**0.5:.3f}"


def table(rows, data):
    """Markdown, a line for each variant that has finished. rows: {variant: {seed: row}}"""
    rows = {variant: found for variant, found in rows.items() if found}
    need(rows, f"no run on data/{data} is finished with these settings.")
    loss = {variant: {seed: float(row["val_loss"]) for seed, row in found.items()}
            for variant, found in rows.items()}
    titles = ["variant", "seeds", "parameters", "loss", "bits per byte", "loss minus Nano's",
              "tokens/core-second"]
    lines = [titles, ["---"] * len(titles)]
    for variant, found in rows.items():
        nano = loss.get("nano", {}) if variant != "nano" else {}
        minus = [x - nano[seed] for seed, x in loss[variant].items() if seed in nano]
        one, *_ = runs = list(found.values())
        lines.append([variant, str(len(runs)), f"{int(one['parameters']):,}", show(loss[variant].values()),
                      show([float(row["bits_per_byte"]) for row in runs]), show(minus, "+") if minus else "",
                      f"{statistics.median(int(row['tokens_per_core_second']) for row in runs):,.0f}"])
    note = f"data/{data}, {int(one['tokens']):,} tokens each. After ±: half of the 95% interval."
    if min(map(len, rows.values())) < 3:
        note += " Fewer than three seeds give no interval: only their mean is shown."
    return "\n".join([*(f"| {' | '.join(cells)} |" for cells in lines), "", note])


def arguments():
    parser = CommandLine(description="Do the papers' ideas help?")
    parser.add_argument("--data", default="storybook", help="folder under data/, made by prepare.py")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME",
                        help=f"of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--max_steps", type=int, default=1000, help="of 1,024 tokens (default: 1000)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2),
                        help="runs at a time (default: half the cores)")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # one run, in a process of its own
    args = parser.parse_args()
    need(min(args.seeds, args.max_steps, args.jobs) >= 1,
         "--seeds, --max_steps and --jobs must be at least 1.")
    return args


def ablate(args):
    """Do what the command line says. True if no run failed."""
    path = Path("out") / f"ablate-{args.data}.csv"
    if args.data == "storybook":
        prepare.storybook()  # returns at once if it is there
    try:
        meta = json.loads((Path("data") / args.data / "meta.json").read_text(encoding="utf-8"))
        vocab_size = int(meta["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        vocab_size = 4096  # open_data will say in a sentence what is wrong
    plans = {variant: plan(args.data, variant, args.max_steps, vocab_size) for variant in args.variants}
    for options in plans.values():
        open_data(args.data, configs(options)[1])
    if args.run:
        run(path, plans[args.variants[0]], args.variants[0], args.run)
        return True

    wanted = [(variant, str(seed), " ".join(words(options)))
              for seed in range(1, args.seeds + 1) for variant, options in plans.items()]
    good = True
    if not args.table:
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
        done = results(path)
        good = run_all([key for key in wanted if key not in done], args.jobs)
    done = results(path)
    rows = {variant: {} for variant in plans}
    for variant, seed, how in wanted:
        if row := done.get((variant, seed, how)):
            rows[variant][seed] = row
    print(table(rows, args.data))
    return good


def ablate_and_exit():
    sys.exit(0 if ablate(arguments()) else 1)


def main():
    run_main(ablate_and_exit, interrupted="interrupted: the same command goes on.", status=1)


if __name__ == "__main__":
    main()
