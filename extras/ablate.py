"""
Do the papers' ideas help? Every variant is trained in the same way, with several seeds; one table compares.

    python extras/ablate.py                              the storybook, all variants
    python extras/ablate.py --data slice --jobs 2        other data, two runs at a time
    python extras/ablate.py --data slice --table         what is there so far, without training

First each variant runs at three learning rates (--lr_factors times its own) with one seed, then at its best
one with the other seeds. A run of 2,000 steps takes two to three minutes of one core; there are 80.

Any data of prepare.py will do. A slice of TinyStories, about 13 MB, from the download of `python prepare.py`:

    head -n 90000 data/raw/TinyStoriesV2-GPT4-train.txt > slice.txt
    python prepare.py --name slice --input slice.txt --vocab_size 4096

All models are as large as Nano here: the inner width of the feed-forward is chosen so that as many parameters
are in use. All see the same tokens, in the same batches for the same seed. Silia alone has its own optimizer
and schedule, those of config/silia_tiny.py.

Each run is one of train.py's; the last column of out/ablate-<data>.csv has its options, all but --seed. Runs
that are in this file are not repeated, and a run that was stopped goes on from its checkpoint. What stays of
it in the end is out/ablate-<data>-<variant>-<learning rate>-<seed>/log.csv.

The loss is that on the first 65,536 tokens of the validation split after the last step, in nats per token,
in the windows of training: on the storybook, each story from its beginning.
Intervals are 95%, by Student's t over the seeds; differences (to Nano, the baseline and the helix, where they
have run) are taken seed by seed, as the batches are the same. A core-second is a second of processor time,
which a busy machine hardly stretches; the three evaluations of a run are included.
"""

import argparse
import csv
import json
import math
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
from model import PARTS, CrossLayerAttention, DualStream, LanguageModel, ModelConfig
from support import need
from support.checkpoint import load_checkpoint, saved_config
from support.corpus import open_data
from support.runtime import free_cores, run_main
from support.settings import CommandLine, read_settings
from train import TrainConfig

BASE = dict(context=256, n_layer=3, d_model=128, n_head=8, weight_std=0.0, device="cpu", batch_size=2, lr=3e-3,
            min_lr=1e-4, warmup=0.1, beta2=0.99, weight_decay=0.0, sample_tokens=0)  # see config/tiny.py
DATA = {"storybook": dict(embedding_std=0.6, windows="documents")}
NANO_FF = 256  # d_ff of Nano; that of the others follows


class WithoutOutputGate(CrossLayerAttention):
    """Cross-layer attention whose heads are joined as they are."""

    def __init__(self, config, name):
        super().__init__(config, name)
        self.gate = AlwaysOpen()


class AlwaysOpen(torch.nn.Module):
    def forward(self, x):
        return x.new_tensor(math.inf)  # its sigmoid is 1


class ScalarBlend(DualStream):
    """Two streams, blended by one number for each token, not by one for each coordinate."""

    def __init__(self, config):
        super().__init__(config)
        self.fuse = torch.nn.Linear(2 * config.d_model, 1, bias=False)


PARTS["mixer"]["without_output_gate"] = WithoutOutputGate
PARTS["ffn"]["scalar_blend"] = ScalarBlend

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
    "helix-no-offset": HELIX | dict(norm="rms"),
    "helix-no-output-gate": HELIX | dict(mixer="without_output_gate"),
    "helix-one-stream": HELIX | dict(ffn="swiglu"),
    "helix-scalar-blend": HELIX | dict(ffn="scalar_blend"),
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
    config.out = f"ablate-{config.data}-{variant}-{config.lr:g}-{seed}"
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


def key(variant, seed, options):
    """What a finished run is known by in the csv file"""
    return variant, seed, " ".join(words(options))


def run_all(path, wanted, args):
    """The runs (variant, seed, options) that are not finished, each in its own process, args.jobs at a time.

    True if none failed.
    """
    def one(what):
        variant, seed, options = what
        print(f"{variant}, seed {seed}, learning rate {options['lr']:g}", flush=True)
        command = [sys.executable, __file__, *sys.argv[1:], "--variants", variant,
                   "--run", json.dumps([seed, options])]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["killed"]
            print(f"{variant}, seed {seed}: {said[-1]}", file=sys.stderr)
        return done.returncode == 0

    done = results(path)
    todo = [] if args.table else [run for run in wanted if key(*run) not in done]
    # Ctrl-C reaches the processes too: they save, and no more follow
    with ThreadPoolExecutor(args.jobs or free_cores()) as pool:
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
    references = {"nano": "loss minus Nano's", "baseline": "minus the baseline's", "helix": "minus helix's"}
    references = {name: title for name, title in references.items() if name in rows}
    titles = ["variant", "seeds", "parameters", "learning rate", "loss", "bits per byte", *references.values(),
              "tokens/core-second"]
    lines = [titles, ["---"] * len(titles)]
    for variant, found in rows.items():
        one, *_ = runs = list(found.values())
        minus = []
        for name in references:
            both = loss[variant].keys() & loss[name].keys() if name != variant else ()
            minus.append(show([loss[variant][seed] - loss[name][seed] for seed in both], "+") if both else "")
        rate = dict(word.split("=", 1) for word in one["settings"].split()).get("--lr", "")
        bits = [float(row["bits_per_byte"]) for row in runs]
        speed = statistics.median(int(row["tokens_per_core_second"]) for row in runs)
        lines.append([variant, str(len(runs)), f"{int(one['parameters']):,}", rate,
                      show(loss[variant].values()), show(bits), *minus, f"{speed:,.0f}"])
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
    parser.add_argument("--lr_factors", type=float, nargs="+", default=[0.5, 1, 2], metavar="X",
                        help="learning rates to try with seed 1, times each variant's (default: 0.5 1 2)")
    parser.add_argument("--max_steps", type=int, default=2000, help="of 512 tokens (default: 2000)")
    parser.add_argument("--jobs", type=int, default=0,
                        help="runs at a time, of one thread each (0, the default: as many as cores are free)")
    parser.add_argument("--table", action="store_true", help="only print the table")
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)  # [seed, options] of one run
    args = parser.parse_args()
    need(min(args.seeds, args.max_steps) >= 1, "--seeds and --max_steps must be at least 1.")
    need(args.jobs >= 0, "--jobs must not be negative.")
    need(min(args.lr_factors) > 0, "--lr_factors must be above 0.")
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
        run(path, args.run[1], args.variants[0], args.run[0])
        return True
    if not args.table and not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")

    # Each learning rate with the first seed; then the best one with the others
    first = [(variant, "1", options | dict(lr=options["lr"] * factor))
             for variant, options in plans.items() for factor in args.lr_factors]
    good = run_all(path, first, args)
    best = {}  # {variant: (loss, options)}
    for variant, seed, options in first:
        row = results(path).get(key(variant, seed, options))
        if row and (variant not in best or float(row["val_loss"]) < best[variant][0]):
            best[variant] = float(row["val_loss"]), options
    seeds = [str(seed) for seed in range(1, args.seeds + 1)]
    good &= run_all(path, [(variant, seed, best[variant][1]) for seed in seeds for variant in best], args)
    done, rows = results(path), {}
    for variant, (_, options) in best.items():
        rows[variant] = {seed: done[key(variant, seed, options)] for seed in seeds
                         if key(variant, seed, options) in done}
    print(table(rows, args.data))
    return good


def ablate_and_exit():
    sys.exit(0 if ablate(arguments()) else 1)


def main():
    run_main(ablate_and_exit, interrupted="interrupted: the same command goes on.", status=1)


if __name__ == "__main__":
    main()
