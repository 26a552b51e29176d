"""
How fast is it here? One command, one table, in Markdown.

    python extras/bench.py                         everything, three rounds: three quarters of an hour
    python extras/bench.py --quick                 eight rows, idle and beside a busy process: 9 minutes
    python extras/bench.py --only decode           one section: train, decode, prefill, prepare, merge, memory
    python extras/bench.py --out docs/bench.md     into a section of that file as well

Each number is the median over rounds that take all rows in turn, each in a process of its own (with --quick
first idle, then beside a busy process), so that a noisy machine disturbs them alike; compare rows of one run
only. With the published package in the same environment (pip install wiola13m==1.0.1 transformers==4.45.2)
its model is measured beside ours; with the packages tokenizers or rustbpe, these are too. Peak memory is that
of the whole process, PyTorch included, with --quick in both of its measurements.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from support.files import atomic_write
from support.runtime import choose_threads, keep_freed_memory, prepare_decoding, run_main
from support.settings import CommandLine, read_settings


def rows():
    for name in ("nano", "baseline", "helix", "silia"):
        for dtype in ("float32", "bfloat16"):
            for compiled in (False, True):
                label = f"{name}, {dtype}" + (", compiled" if compiled else "")
                yield "train", label, dict(name=name, dtype=dtype, compiled=compiled)
    for compiled in (False, True):
        label = "nano, bfloat16, chunked loss" + (", compiled" if compiled else "")
        yield "train", label, dict(name="nano", dtype="bfloat16", compiled=compiled, chunked=True)
    for name in ("nano", "baseline", "helix", "silia"):
        for dtype in ("float32", "bfloat16"):
            for compiled in (False, True):
                label = f"{name}, {dtype}, batch 1" + (", compiled" if compiled else "")
                yield "decode", label, dict(name=name, dtype=dtype, batch=1, compiled=compiled)
    for dtype in ("float32", "bfloat16"):
        yield "decode", f"nano, {dtype}, batch 16", dict(name="nano", dtype=dtype, batch=16)
        yield "decode", f"nano, {dtype}, batch 1, the last 128 of 1,024", dict(
            name="nano", dtype=dtype, batch=1, before=880)
    for dtype in ("float32", "bfloat16"):
        yield "prefill", f"nano, {dtype}, 512 tokens", dict(name="nano", dtype=dtype)
    if importlib.util.find_spec("wiola13m"):
        theirs = dict(name="published", dtype="float32")
        yield "train", "published Nano (wiola13m), float32", theirs
        yield "decode", "published Nano, float32, batch 1", theirs | {"batch": 1}
        yield "prefill", "published Nano, float32, 512 tokens", theirs
    for what in ("count chunks", "learn merges", "train", "encode", "tiktoken: encode",
                 "tiktoken: encode a batch"):
        yield "prepare", what, dict(what=what)
    for what in ("rustbpe: train", "tokenizers: train", "tokenizers: encode a batch"):
        if importlib.util.find_spec(what.split(":")[0]):
            yield "prepare", what, dict(what=what)
    for what in ("vectorised", "loop"):
        yield "merge", what, dict(what=what)
    for chunked in (False, True):
        label = "step of 8 x 1024 tokens, " + ("chunked loss" if chunked else "plain loss")
        yield "memory", label, dict(name="nano", dtype="float32", T=1024, steps=1, chunked=chunked)
    for T in (512, 1024, 2048, 4096, 8192):
        yield "memory", f"step of 1 x {T} tokens, chunked loss", dict(
            name="nano", dtype="float32", B=1, T=T, steps=1, chunked=True)


QUICK = [("train", "nano, float32"), ("train", "nano, bfloat16, chunked loss"),
         ("train", "published Nano (wiola13m), float32"),
         ("decode", "nano, float32, batch 1"), ("decode", "nano, float32, batch 1, compiled"),
         ("decode", "nano, bfloat16, batch 1, compiled"), ("decode", "published Nano, float32, batch 1"),
         ("prefill", "nano, float32, 512 tokens")]


def quick_rows():
    """The eight rows that matter (six without the published package), in fewer steps."""
    for section, label, options in rows():
        if (section, label) in QUICK:
            yield section, label, options | ({"warm": 1, "steps": 3} if section == "train" else {})


def build(name, context):
    """One of our models, or the published one, with initial weights."""
    import torch

    from model import LanguageModel, ModelConfig
    from train import TrainConfig  # its settings stand in the same files

    torch.manual_seed(0)
    if name == "published":
        from wiola13m import WiolaConfig, WiolaForCausalLM

        return WiolaForCausalLM(WiolaConfig(max_position_embeddings=context))
    if name == "helix":  # of Nano's size
        config = ModelConfig(context=context, n_kv_head=4, d_ff=640, d_narrow=160, position="helix",
                             mixer="cross_layer", ffn="dual_stream", norm="offset_rms", init="normal")
    else:
        words = [str(ROOT / "config" / f"{name}.py"), f"--context={context}"]
        _, (_, config) = read_settings(words, TrainConfig, ModelConfig)
    return LanguageModel(config)


def train(name, dtype, compiled=False, B=8, T=256, steps=4, chunked=False, warm=3):
    """Optimizer steps on random ids: tokens per second."""
    import torch

    if name != "published":
        keep_freed_memory()
        choose_threads()
    model = build(name, T).train()
    model.chunked_loss = chunked
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (B, T + 1))
    seconds = []
    for _ in range(warm + steps if steps > 1 else 1):
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            if name == "published":
                loss = forward(input_ids=ids[:, :-1], labels=ids[:, :-1]).loss
            else:
                loss = forward(ids[:, :-1], ids[:, 1:])[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    return B * T / statistics.median(seconds[-steps:]), "tokens/s"


def decode(name, dtype, batch, compiled=False, before=0, n=128):
    """Reading 16 tokens and generating n greedy ones, as sample.py does; `before` more do not count:
    tokens per second, all sequences together."""
    import torch

    model = build(name, 1024).to(getattr(torch, dtype)).eval()
    cache = None if name == "published" else prepare_decoding(model, "on" if compiled else "off")
    ids = torch.randint(0, model.config.vocab_size, (batch, before + 16))

    def generate(n):
        if name == "published":
            model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        else:
            for _ in model.generate(ids[:, before:], n, temperature=0, cache=cache):
                pass

    with torch.no_grad():
        generate(8)
        if cache:
            cache.reset()
        if before:
            model(ids[:, :before], cache=cache, last_only=True)
        began = time.perf_counter()
        generate(n)
    return batch * n / (time.perf_counter() - began), "tokens/s"


def prefill(name, dtype, T=512):
    """Reading a prompt of 512 tokens, up to the logits of the last, as sample.py does: milliseconds."""
    import torch

    model = build(name, 1024).to(getattr(torch, dtype)).eval()
    cache = None if name == "published" else prepare_decoding(model)
    ids, seconds = torch.randint(0, model.config.vocab_size, (1, T)), []
    with torch.no_grad():
        for _ in range(8):
            began = time.perf_counter()
            if name == "published":
                model.lm_head(model.model(ids, use_cache=True).last_hidden_state[:, -1:])
            else:
                cache.reset()
                model(ids, cache=cache, last_only=True)
            seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds[2:]), "ms"


def prepare(what):
    """On the text of 8,000 little stories, one process: millions of bytes per second."""
    import tiktoken

    import storybook
    import tokenizer as bpe
    from prepare import encode_batch
    from support.hf_tokenizer import tokenizer_to_json

    documents = [text for text, _ in storybook.stories(8000, 1)]
    size = sum(len(text.encode("utf-8")) for text in documents) / 1e6
    counts = bpe.count_chunks(documents)
    trained = bpe.train_bpe(counts, 1024)
    ranks = {trained.token_bytes(id): id for id in trained.vocab.values()}
    alone = tiktoken.Encoding("", pat_str=trained.pattern, mergeable_ranks=ranks, special_tokens={})
    batch = [(text, True) for text in documents]
    encode_batch([], tokenizer_to_json(trained))  # each process reads the tokenizer once: not measured
    run = {
        "count chunks": lambda: bpe.count_chunks(documents),
        "learn merges": lambda: bpe.train_bpe(counts, 1024),
        "train": lambda: bpe.train_bpe(bpe.count_chunks(documents), 1024),
        "encode": lambda: encode_batch(batch, tokenizer_to_json(trained)),
        "tiktoken: encode": lambda: [alone.encode_ordinary(text) for text in documents],
        "tiktoken: encode a batch": lambda: alone.encode_ordinary_batch(documents, os.cpu_count()),
    }
    if what.startswith("tokenizers"):
        import tokenizers
        from tokenizers import Regex, models, pre_tokenizers, trainers

        pieces = pre_tokenizers.Split(Regex(trained.pattern), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
        other = tokenizers.Tokenizer(models.BPE())
        other.pre_tokenizer = pre_tokenizers.Sequence([pieces, as_bytes])
        trainer = trainers.BpeTrainer(vocab_size=1020, show_progress=False,
                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
        run["tokenizers: train"] = lambda: other.train_from_iterator(documents, trainer)
        read = tokenizers.Tokenizer.from_str(tokenizer_to_json(trained)).encode_batch_fast
        run["tokenizers: encode a batch"] = lambda: read(documents, add_special_tokens=False)
    if what.startswith("rustbpe"):
        import rustbpe

        run[what] = lambda: rustbpe.Tokenizer().train_from_iterator(iter(documents), 1020)
    began = time.perf_counter()
    run[what]()
    return size / (time.perf_counter() - began), "MB/s"


def merge(what, B=8, T=1024, C=256):
    """Token merging of 8 x 1024 tokens, forward and backward, 13% of them merged: milliseconds."""
    import torch

    from model import greedy_pairs, mix_merged

    torch.manual_seed(0)
    x, copies = torch.randn(B, T, C), torch.rand(B, T) < 0.15
    for t in range(1, T):
        x[copies[:, t], t] = x[copies[:, t], t - 1] + 0.01 * torch.randn(int(copies[:, t].sum()), C)
    x.requires_grad_()

    def loop():
        out = []
        for row in x:
            merged, t = [], 0
            while t < T:
                pair = t + 1 < T and torch.cosine_similarity(row[t], row[t + 1], dim=0).item() > 0.92
                merged += [(row[t] + row[t + 1]) / 2] * 2 if pair else [row[t]]
                t += 2 if pair else 1
            out.append(torch.stack(merged))
        return torch.stack(out)

    tables = (torch.zeros(T, 1),) * 2
    vectorised = lambda: mix_merged(lambda m, *_: m, greedy_pairs(x.detach(), 0.92), x, tables, None, [])
    run, seconds = {"vectorised": vectorised, "loop": loop}[what], []
    for _ in range(5 if what == "vectorised" else 1):
        began = time.perf_counter()
        run().sum().backward()
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds), "ms"


@contextlib.contextmanager
def neighbour(busy):
    """Have another process keep one core busy, or not."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if process:
            process.kill()
            process.wait()


def measure(row, conditions):
    """One row in a process of its own -> [value, unit, peak memory in bytes] for each condition, or None.

    conditions: whether another process is busy, for each. None: it failed, which is said on stderr.
    """
    command = [sys.executable, __file__, "--row", json.dumps([*row, conditions])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr.splitlines()[-1] if done.stderr else "failed", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def measure_here(section, label, options, conditions):
    """Print what `measure` returns."""
    import resource

    if len(conditions) > 1:
        import torch

        threads = torch.get_num_threads()
    found = []
    for busy in conditions:
        with neighbour(busy):
            value, unit = SECTIONS[section](**options)
        if len(conditions) > 1:  # each chooses its threads anew, among all that PyTorch would take
            torch.set_num_threads(threads)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found.append([value, unit, peak])
    print(json.dumps(found))


def show(found):
    """Measurements of a row -> "median (lowest to highest) unit", or nothing if all failed."""
    if not found:
        return ""
    values = sorted(value for value, _, _ in found)
    numbers = [f"{x:,.{0 if x >= 100 else 1}f}" for x in (statistics.median(values), values[0], values[-1])]
    spread = f" ({numbers[1]} to {numbers[2]})" if len(values) > 1 else ""
    return f"{numbers[0]}{spread} {found[0][1]}"


def table(chosen, conditions, results):
    """Rows, names of columns, {(row number, column): measurements} -> lines of Markdown"""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "wiola13m", "transformers")
                if importlib.util.find_spec(name)]
    lines = [f"Medians (lowest to highest) on {os.cpu_count()} cores with {', '.join(versions)}.", "",
             f"| what | which | {' | '.join(conditions)} | peak memory | rounds |",
             "| --- | --- |" + " --- |" * (len(conditions) + 2)]
    for i, (section, label, _) in enumerate(chosen):
        found = [results[i, name] for name in conditions]
        if any(found):
            peak = max(peak for column in found for _, _, peak in column)
            cells = [section, label, *map(show, found), f"{peak / 1e6:,.0f} MB", str(min(map(len, found)))]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_section(path, title, lines):
    """Put lines under the heading `title` of a Markdown file, in place of what is there; the rest stays."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    parts = [part for part in re.split(r"^(?=## )", text, flags=re.MULTILINE) if part]
    section = "\n".join([f"## {title}", "", *lines, ""])
    places = [n for n, part in enumerate(parts) if part.startswith(f"## {title}\n")]
    if places:
        parts[places[0]] = section
    else:
        parts.append(section)
    with atomic_write(path) as file:
        file.write("\n".join(part.rstrip("\n") + "\n" for part in parts).encode("utf-8"))


SECTIONS = {"train": train, "decode": decode, "prefill": prefill, "prepare": prepare, "merge": merge,
            "memory": train}


def main():
    parser = CommandLine(description="How fast is it here?")
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--quick", action="store_true", help="eight rows, idle and beside one busy process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown file; its section of this table is replaced")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)  # one measurement, in this process
    args = parser.parse_args()
    if args.row:
        measure_here(*args.row)
        return
    chosen = [row for row in (quick_rows() if args.quick else rows()) if args.only in (None, row[0])]
    conditions = {"idle": False, "beside a busy process": True} if args.quick else {"result": False}
    results = {(i, name): [] for i in range(len(chosen)) for name in conditions}
    for n in range(args.rounds):
        for i, row in enumerate(chosen):
            print(f"round {n + 1}: {row[0]}, {row[1]}", file=sys.stderr)
            for name, found in zip(conditions, measure(row, list(conditions.values())) or []):
                results[i, name].append(found)
    lines = table(chosen, conditions, results)
    print("\n".join(lines))
    if args.out:
        title = "Quick" if args.quick else f"Section {args.only}" if args.only else "All rows"
        write_section(args.out, title, lines)


if __name__ == "__main__":
    run_main(main, advice="try one section, with --only")
