"""The promises of train.py: exact resume, safe checkpoints, honest numbers, plain errors."""

import csv
import io
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import prepare
import sample
import storybook
import train
from model import LanguageModel, ModelConfig
from support import checkpoint as checkpoint_module, settings
from support.checkpoint import load_checkpoint, load_model, save_checkpoint
from support.corpus import open_data
from support.report import LOG_COLUMNS, Log, Progress, read_log
from support.runtime import Output, chat_roles, choose_device, interruptible
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--data=small", "--vocab_size=300", "--context=16", "--n_layer=2", "--d_model=16", "--n_head=2",
         "--d_ff=24", "--batch_size=4", "--device=cpu", "--lr=1e-2", "--sample_tokens=5", "--log_every=2",
         "--out=run"]
HELIX = ["--n_layer=3", "--position=helix", "--mixer=cross_layer", "--ffn=dual_stream", "--norm=offset_rms",
         "--init=normal", "--token_merging=paper", "--merge_threshold=0.5"]
SILIA = ["--position=mirrored", "--mixer=hydra", "--block=silia", "--norm=bare_rms", "--embedding_norm",
         "--init=pytorch", "--sink_token=<|end|>", "--optimizer=muon", "--schedule=cooldown"]
NAMES = "Lily Tom Mia Ben Anna Max Sara Tim".split()


@pytest.fixture(scope="session")
def small_data(tmp_path_factory):
    """A folder with data/small, made by prepare.py from a few hundred sentences."""
    folder = tmp_path_factory.mktemp("small")
    sentences = [f"{a} gave {b} a ball, {n} times." for a in NAMES for b in NAMES for n in (1, 2, 3)]
    (folder / "text.txt").write_text("<|endoftext|>\n".join(sentences), encoding="utf-8")
    command = [ROOT / "prepare.py", *"--name small --input text.txt --vocab_size 300 --workers 1".split()]
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def here(small_data, tmp_path, monkeypatch):
    """An empty working directory with its own copy of the data."""
    shutil.copytree(small_data / "data", tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch, *words):
    """train.py in this process; the exit code, or None."""
    monkeypatch.setattr(sys, "argv", ["train.py", *SMALL, *words])
    try:
        train.main()
    except SystemExit as exit:
        return exit.code


def start(*words, stderr=subprocess.PIPE, **options):
    """train.py as a process of its own, at its work."""
    return subprocess.Popen([sys.executable, ROOT / "train.py", *SMALL, *words], stdout=subprocess.PIPE,
                            stderr=stderr, text=True, encoding="utf-8", **options)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def load(path="out/run/ckpt.pt"):
    return load_checkpoint(Path(path))


def log_rows(path="out/run/log.csv"):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def assert_same_state(a, b):
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    assert a["optimizer"].keys() == b["optimizer"].keys()
    for name in a["optimizer"]:
        for i, state in a["optimizer"][name]["state"].items():
            assert all(torch.equal(state[key], b["optimizer"][name]["state"][i][key]) for key in state)


# --------------------------------------------------------------------------------------- schedule, optimizer


@pytest.mark.parametrize("max_steps", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("warmup", [0.0, 0.001, 0.05, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("min_lr", [0.0, 1e-4, 1e-3])
def test_learning_rate_is_finite_and_never_zero(max_steps, warmup, min_lr):
    config = TrainConfig(max_steps=max_steps, warmup=warmup, lr=1e-3, min_lr=min_lr)
    rates = [train.learning_rate(step, config) for step in range(max_steps)]
    assert all(0 < rate <= 1e-3 for rate in rates)
    top = rates.index(max(rates))
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)


def test_learning_rate_is_warm_up_then_cosine():
    config = TrainConfig(max_steps=1000, warmup=0.1, lr=1.0, min_lr=0.0)
    assert train.learning_rate(0, config) == pytest.approx(0.01)
    assert train.learning_rate(49, config) == pytest.approx(0.5)
    assert train.learning_rate(99, config) == train.learning_rate(100, config) == pytest.approx(1.0)
    assert train.learning_rate(550, config) == pytest.approx(0.5)
    assert train.learning_rate(999, config) == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "cooldown"])
def test_the_learning_rate_stays_at_its_end_value(schedule):
    config = TrainConfig(max_steps=100, lr=1.0, min_lr=0.25, schedule=schedule)
    assert [train.learning_rate(step, config) for step in (100, 101, 150, 10_000)] == [0.25] * 4


@pytest.mark.parametrize("settings, word", [
    ({"warmup": 1.5}, "warmup"), ({"lr": 0.0}, "lr"), ({"min_lr": 1.0}, "min_lr"),
    ({"beta2": 1.0}, "beta2"),
    ({"batch_size": 6, "grad_accum": 4}, "grad_accum"), ({"grad_accum": 0}, "grad_accum"),
    ({"max_steps": -1}, "max_steps"), ({"eval_every": 0}, "eval_every"), ({"compile": "maybe"}, "compile"),
    ({"seed": -1}, "seed"),
    ({"optimizer": "moun"}, "optimizer"),
    ({"schedule": "linear"}, "schedule"), ({"cooldown": 1.5}, "cooldown"),
])
def test_impossible_settings_are_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        TrainConfig(**settings)


def test_an_overflow_in_one_optimizer_holds_back_the_other(here, monkeypatch):
    """Guards against half a step: GradScaler looks at each optimizer's gradients alone, clipping at all."""
    before = {}

    def overflow(parameters, max_norm):
        parameters = list(parameters)
        before.update(enumerate(p.detach().clone() for p in parameters))
        parameters[-1].grad.fill_(math.nan)
        return torch.tensor(math.nan)

    def save(checkpoint, path):
        if checkpoint["step"] == 1:
            assert all(torch.equal(x, y) for x, y in zip(checkpoint["model"].values(), before.values()))
            raise KeyboardInterrupt

    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: scaler(device, enabled=True))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", overflow)
    monkeypatch.setattr(checkpoint_module, "save_checkpoint", save)
    assert run(monkeypatch, *SILIA, "--max_steps=1", "--eval_every=1") == 130 and before


def test_every_parameter_is_in_exactly_one_group():
    model = LanguageModel(ModelConfig(vocab_size=50, n_layer=2, d_model=16, n_head=2, d_ff=24))
    optimizers = train.make_optimizers(model, TrainConfig(weight_decay=0.1))
    assert list(optimizers) == ["AdamW"]
    decayed, plain = optimizers["AdamW"].param_groups
    ids = [id(p) for group in (decayed, plain) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters()) and len(set(ids)) == len(ids)
    assert decayed["weight_decay"] == 0.1 and all(p.dim() == 2 for p in decayed["params"])
    assert plain["weight_decay"] == 0.0 and all(p.dim() == 1 for p in plain["params"])
    assert any(p is model.embedding.weight for p in decayed["params"])


# --------------------------------------------------------------------------------------------------- batches


def test_batches_depend_on_seed_and_step_alone_and_reach_the_last_token():
    ids, config = np.arange(30, dtype="<u2"), TrainConfig(batch_size=64, seed=3)
    x, y = train.get_batch(ids, 5, config, 8)
    assert x.shape == y.shape == (64, 8) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(train.get_batch(ids, 5, config, 8)[0], x)
    assert not torch.equal(train.get_batch(ids, 6, config, 8)[0], x)
    assert not torch.equal(train.get_batch(ids, 5, TrainConfig(batch_size=64, seed=4), 8)[0], x)
    assert x.min() == 0 and y.max() == 29
    assert torch.equal(train.get_batch(ids[:9], 0, config, 8)[1][0], torch.arange(1, 9))  # exactly one window


def test_evaluation_predicts_every_token_once(small_data, monkeypatch):
    monkeypatch.chdir(small_data)
    config = ModelConfig(vocab_size=300, context=16, n_layer=1, d_model=16, n_head=2, d_ff=24)
    (_, ids), tokenizer, meta = open_data("small", config)
    model, off = LanguageModel(config), torch.autocast("cpu", enabled=False)
    stream = torch.tensor([tokenizer.end_of_text, *ids.tolist()])
    nats = 0.0
    for i in range(len(ids)):  # one token at a time, each with what its window holds before it
        logits, _ = model(stream[None, i // 16 * 16: i + 1])
        nats -= logits[0, -1].log_softmax(-1)[stream[i + 1]].item()
    assert len(ids) % 16 != 0, "the test should have a last, shorter window"
    for batch_size in (1, 3, 1000):
        loss, bits = train.evaluate(model, ids, tokenizer, batch_size, off)
        assert loss == pytest.approx(nats / len(ids), rel=1e-5)
        assert bits == pytest.approx(nats / math.log(2) / meta["val"]["bytes"], rel=1e-5)
    assert train.evaluate(model, ids, tokenizer, 4, off) == train.evaluate(model, ids, tokenizer, 4, off)


def documents(*lengths):
    """A stream of documents: 1, 2, 3, ... and 99, the end-of-text."""
    return np.array([id for n in lengths for id in [*range(1, n), 99]], dtype="<u2")


def test_training_windows_begin_where_a_document_does_if_that_is_within_a_window():
    config = TrainConfig(batch_size=500, windows="documents")
    ids = documents(*[5, 8, 3] * 10)
    x, y = train.get_batch(ids, 0, config, 8, end_of_text=99)
    first = set(zip(x[:, 0].tolist(), y[:, 0].tolist()))
    assert first == {(99, 1), (1, 2)}  # the second where nothing stands before: at the beginning of the stream
    assert torch.equal(x[:, 1:], y[:, :-1]) and len(set(map(tuple, y.tolist()))) == 4
    with_sink, same = train.get_batch(ids, 0, config, 8, sink=7, end_of_text=99)
    assert (with_sink[:, 0] == 7).all() and torch.equal(with_sink[:, 1:], x[:, 1:]) and torch.equal(same, y)
    # In a document of 100 tokens: from its beginning for the first 8, and anywhere in what follows
    ids = np.arange(1000, 1100, dtype="<u2")
    firsts = set(train.get_batch(ids, 0, config, 8, end_of_text=99)[0][:, 0].tolist())
    assert firsts <= {1000, *range(1009, 1092)} and len(firsts) > 60


@pytest.mark.parametrize("lengths", [(5, 3, 8, 2), (8, 8), (20, 4), (3, 33, 1, 1, 1), (9,), (1,), (16, 17)])
def test_evaluation_by_documents_counts_each_token_once_behind_its_document(lengths):
    ids, context, at = documents(*lengths), 8, 0
    # How much of its document must be seen before each token: all, or half a window in a longer one
    before = [i if n <= context else min(i, context // 2) for n in lengths for i in range(n)]
    for x, y in train.validation_batches(ids, 99, context, 2, windows="documents"):
        assert x.shape == y.shape and x.size(1) <= context
        for inputs, targets in zip(x.tolist(), y.tolist()):
            for i, target in enumerate(targets):
                if target != -100:
                    assert target == ids[at] and i >= before[at]
                    assert inputs[i + 1 - before[at]: i + 1] == ids[at - before[at]: at].tolist()
                    at += 1
    assert at == len(ids)


def test_a_window_holds_whole_documents_while_they_fit_and_half_of_a_longer_ones_past():
    ids = documents(5, 3, 8, 20, 2, 2)
    assert list(train.document_windows(ids, 99, 8)) == [
        (0, 0, 8), (8, 8, 16), (16, 16, 24), (20, 24, 28), (24, 28, 32), (28, 32, 36), (36, 36, 40)]


def test_a_split_shorter_than_the_context_is_evaluated(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=1", "--eval_tokens=7") is None
    assert math.isfinite(load()["best_val_loss"])


def test_accumulated_gradients_are_those_of_the_full_batch(here, monkeypatch):
    for parts in (1, 2, 4):
        assert run(monkeypatch, "--max_steps=3", f"--grad_accum={parts}", f"--out=parts{parts}") is None
    whole, *others = (load(f"out/parts{n}/ckpt.pt")["model"] for n in (1, 2, 4))
    for other in others:
        assert all(torch.allclose(whole[name], other[name], atol=1e-5) for name in whole)
    norms = [[float(row["grad_norm"]) for row in log_rows(f"out/parts{n}/log.csv")[1:]] for n in (1, 2, 4)]
    for other in norms[1:]:  # AdamW and clipping would hide gradients that are all four times too large
        assert other == pytest.approx(norms[0], rel=1e-4)


# --------------------------------------------------------------------------------------------- conversations

ROLES = {"<|user|>": 1, "<|assistant|>": 2, "<|end|>": 3}
CHAT = ["--data=chat", "--windows=documents", "--max_steps=6", "--eval_every=3", "--log_every=1"]


def make_chat(n=200, question="What is {}?", name="chat"):
    """data/NAME: n conversations of four turns."""
    lines = []
    for i in range(n):
        turns = [question.format(i), f"It is {NAMES[i % 8]}.", "Really?", f"Yes, {NAMES[i % 8]}."]
        messages = [{"role": ("user", "assistant")[j % 2], "content": turn} for j, turn in enumerate(turns)]
        lines.append(json.dumps({"messages": messages}) + "\n")
    Path(f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return prepare.from_files(name, [f"{name}.jsonl"], vocab_size=300)


def test_what_the_assistant_says_counts_and_the_end_of_its_turn():
    #                user          assistant        user     end of text, assistant
    stream = torch.tensor([0, 1, 7, 3, 9, 2, 5, 6, 3, 9, 1, 8, 3, 0, 2, 3, 0])
    x, y = stream[None, :-1], stream[None, 1:]
    assert train.assistant_targets(x, y, ROLES).tolist() == [
        [-100, -100, -100, -100, -100, 5, 6, 3, -100, -100, -100, -100, -100, -100, 3, -100]]
    # From the middle of a turn: whose it is nobody knows, up to the first mark
    cut = train.assistant_targets(x[:, 6:], y[:, 6:], ROLES)
    assert cut.tolist() == [[-100, -100, -100, -100, -100, -100, -100, -100, 3, -100]]
    x, y = (torch.stack([row[0, :6], row[0, 5:11]]) for row in (x, y))
    rows = train.assistant_targets(x, y, ROLES)
    assert rows.tolist() == [[-100] * 5 + [5], [5, 6, 3, -100, -100, -100]]


def test_training_and_evaluation_count_the_same_tokens():
    """Each token of the assistant once, from windows of either kind, also where a sink hides the first."""
    rng = np.random.default_rng(0)
    turns = [[1, *rng.integers(10, 99, rng.integers(9)), 3, 9, 2, *rng.integers(10, 99, n), 3, 0]
             for n in rng.integers(0, 12, 40)]
    ids = np.concatenate(turns).astype("<u2")
    wanted = [id for turn in turns for id in turn[turn.index(2) + 1:-1]]
    for windows in ("stream", "documents"):
        counted = [y[y != -100].tolist() for _, y in
                   train.validation_batches(ids, 0, 8, 3, 7, windows, ROLES)]
        assert [id for part in counted for id in part] == wanted
    config = TrainConfig(batch_size=200, windows="documents")
    plain = train.get_batch(ids, 0, config, 8, sink=7, end_of_text=0)
    x, y = train.get_batch(ids, 0, config, 8, sink=7, end_of_text=0, roles=ROLES)
    assert torch.equal(x, plain[0]) and torch.equal(y[y != -100], plain[1][y != -100])
    assert (y[x == 2] != -100).all() and (y[(x == 3) | (x == 1)] == -100).all()


class KnowsTheConversations(torch.nn.Module):
    """A model with the true probability of what the assistant says, given all before."""

    def __init__(self, tokenizer, known):
        super().__init__()
        self.config = ModelConfig(vocab_size=400, context=800)
        self.tokenizer, self.known, self.weight = tokenizer, known, torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, y):
        nats, counted = 0.0, (y != -100).sum().item()
        for row in x.tolist():
            for text in self.tokenizer.decode(row).split("<|endoftext|>"):
                nats -= self.known.pop(text, 0.0)
        return None, torch.tensor(nats / counted, dtype=torch.float64)


def test_the_floor_is_reached_by_a_model_that_knows_the_grammar(here, monkeypatch, capsys):
    folder = prepare.storybook("storybook_chat", 400, train=20, val=8, seed=3)
    val = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["val"]
    floor = f"{val['floor_nats_per_assistant_token']:.4f}"
    assert f"{floor} nats on the {val['assistant_tokens']:,}" in capsys.readouterr().out
    (_, ids), tokenizer, _ = open_data("storybook_chat", ModelConfig(vocab_size=400, context=800))
    known = {}
    for turns, _, log_prob in storybook.conversations(8, 7):
        roles = ("<|user|>", "<|assistant|>") * 4
        known[" ".join(f"{role}{turn}<|end|>" for role, turn in zip(roles, turns))] = log_prob
    model = KnowsTheConversations(tokenizer, known)
    off = torch.autocast("cpu", enabled=False)
    loss, bits = train.evaluate(model, ids, tokenizer, 3, off, "documents", chat_roles(tokenizer))
    assert loss == pytest.approx(val["floor_nats_per_assistant_token"], abs=1e-12) and not known
    size = sum(len(turn) for turns, _, _ in storybook.conversations(8, 7) for turn in turns[1::2])
    assert bits == pytest.approx(loss * val["assistant_tokens"] / math.log(2) / size)
    words = ["--data=storybook_chat", "--vocab_size=400", "--context=600", "--max_steps=1"]
    assert run(monkeypatch, *CHAT, *words) is None
    out = capsys.readouterr().out
    assert f"{val['assistant_tokens']:,} of the assistant to validate on" in out
    assert f"(on {val['assistant_tokens']:,} tokens of the assistant)" in out and "--chat" in out
    assert f"above the entropy floor of {floor}" in out


def test_a_chat_trains_on_the_assistants_tokens_and_resumes_exactly(here, monkeypatch, capsys):
    """The same with and without a break, and in parts of which some have nothing that counts."""
    make_chat()
    assert run(monkeypatch, *CHAT) is None
    whole = load()
    assert whole["chat"] and "tokens of the assistant" in capsys.readouterr().out
    save = checkpoint_module.save_checkpoint

    def save_and_die(checkpoint, path):
        save(checkpoint, path)
        if checkpoint["step"] == 3 and path.name == "ckpt.pt":
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "save_checkpoint", save_and_die)
    assert run(monkeypatch, *CHAT, "--out=broken") == 130
    monkeypatch.setattr(checkpoint_module, "save_checkpoint", save)
    assert run(monkeypatch, *CHAT, "--out=broken", "--resume") is None
    assert_same_state(whole, load("out/broken/ckpt.pt"))
    capsys.readouterr()
    assert run(monkeypatch, *CHAT, "--out=all", "--assistant_only=false") is None
    assert "tokens of the assistant" not in capsys.readouterr().out
    other = load("out/all/ckpt.pt")
    assert any(not torch.equal(x, y) for x, y in zip(whole["model"].values(), other["model"].values()))
    assert other["chat"]  # it has learned to talk, too
    capsys.readouterr()
    assert run(monkeypatch, *CHAT, "--out=broken", "--resume", "--assistant_only=false", "--max_steps=7") is None
    out = capsys.readouterr().out
    assert "now assistant_only=False" in out and "validation is another one from now on" in out
    norms = {}
    for parts in (1, 4):
        words = ["--windows=stream", "--context=6", f"--grad_accum={parts}", f"--out=p{parts}"]
        assert run(monkeypatch, *CHAT, *words) is None
        norms[parts] = [float(row["grad_norm"]) for row in log_rows(f"out/p{parts}/log.csv")[1:]]
    assert norms[1] == pytest.approx(norms[4], rel=1e-4)


def test_windows_in_which_nothing_counts_have_a_loss_and_a_gradient_of_0(here, monkeypatch):
    make_chat(30, "What is it? " * 8)
    words = [*CHAT, "--windows=stream", "--batch_size=1", "--eval_every=10"]
    assert run(monkeypatch, *words, "--max_steps=20") is None
    rows = log_rows()
    idle = [float(row["train_loss"]) == float(row["grad_norm"]) == 0 for row in rows[1:]]
    assert any(idle) and math.isfinite(load()["best_val_loss"])
    assert not all(idle)
    assert "raise eval_tokens" in run(monkeypatch, *words, "--eval_tokens=9")


# -------------------------------------------------------------------------------------------- runs, resuming


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_exactly_so_many_steps(here, monkeypatch, steps):
    assert run(monkeypatch, f"--max_steps={steps}") is None
    assert load()["step"] == steps
    assert [int(row["step"]) for row in log_rows()] == [s for s in range(steps + 1) if s in (0, 2, steps)]
    moments = load()["optimizer"]["AdamW"]["state"]
    assert (not moments) if steps == 0 else all(state["step"].item() == steps for state in moments.values())


@pytest.mark.parametrize("model", [[], HELIX, SILIA], ids=["nano", "helix", "silia"])
def test_resume_is_exact_to_the_last_bit(here, monkeypatch, model):
    """20 steps = 10 + 10, with an evaluation (and its sample) before, at and after the break."""
    words = ["--max_steps=20", "--eval_every=5", *model]
    assert run(monkeypatch, *words) is None
    whole, whole_best, whole_log = load(), load("out/run/best.pt"), log_rows()
    save = checkpoint_module.save_checkpoint

    def save_and_die(checkpoint, path):
        save(checkpoint, path)
        if checkpoint["step"] == 10 and path.name == "ckpt.pt":
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module, "save_checkpoint", save_and_die)
    assert run(monkeypatch, *words, "--out=broken") == 130
    monkeypatch.setattr(checkpoint_module, "save_checkpoint", save)
    assert load("out/broken/ckpt.pt")["step"] == 10
    assert run(monkeypatch, *words, "--out=broken", "--resume") is None
    assert_same_state(whole, load("out/broken/ckpt.pt"))
    assert_same_state(whole_best, load("out/broken/best.pt"))

    def comparable(rows):  # all but the speed, and row 10: it died before that was written
        return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in rows if r["step"] != "10"]

    assert comparable(log_rows("out/broken/log.csv")) == comparable(whole_log)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on_exactly(here, monkeypatch, number):
    words = ["--max_steps=300", "--eval_every=1000"]
    process = start(*words)
    wait_for(lambda: Path("out/run/log.csv").exists() and len(log_rows()) > 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "out/run/ckpt.pt" in out and "--resume" in out
    assert "Traceback" not in err and "stopping after this step; again to quit at once\n" in err
    step = load()["step"]
    assert 0 < step < 300
    assert run(monkeypatch, *words, "--resume") is None
    assert run(monkeypatch, *words, "--out=whole") is None
    assert_same_state(load("out/whole/ckpt.pt"), load())
    steps = [int(row["step"]) for row in log_rows()]
    assert steps == sorted(set(steps)) and step in steps


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_kill_9_at_any_moment_leaves_a_loadable_checkpoint(here):
    often = ["--max_steps=100000", "--eval_every=1", "--eval_tokens=16", "--sample_tokens=0"]
    processes = {f"out/k{i}": start(*often, f"--out=k{i}") for i in range(2)}
    for wait, (folder, process) in enumerate(processes.items()):
        wait_for(Path(folder, "ckpt.pt").exists)
        time.sleep(0.07 * wait)
        process.kill()
        process.communicate()
        load_model(load(folder + "/ckpt.pt"))
        load_model(load(folder + "/best.pt"))


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals and terminals")
def test_a_closed_terminal_does_not_end_a_run_that_ignores_its_signal(here):
    """Guards against a run under nohup that ends with its terminal, and against lines that come late."""
    import pty

    def ignore():
        for number in (signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    ours, theirs = pty.openpty()
    process = start("--max_steps=200", "--eval_every=1000", preexec_fn=ignore, stderr=theirs,
                    env=os.environ | {"PYTHONUNBUFFERED": ""})
    os.close(theirs)
    while not process.stdout.readline().startswith("step 0: val"):
        assert process.poll() is None
    assert int(log_rows()[-1]["step"]) < 200  # the line came long before the end
    wait_for(lambda: len(log_rows()) > 3)
    for number in (signal.SIGHUP, signal.SIGINT) * 2:
        process.send_signal(number)
    os.close(ours)  # nobody reads stderr any more
    process.stdout.close()  # nor stdout, as in `... | head`
    assert process.wait(60) == 0 and load()["step"] == 200 == int(log_rows()[-1]["step"])


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_signals_in_training(capfd):
    """The first interrupt says that it has come, the second quits; a closed terminal may say so twice."""
    before = signal.getsignal(signal.SIGHUP)
    with interruptible() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
    assert stop == [signal.SIGHUP] * 2 and signal.getsignal(signal.SIGHUP) == before
    with pytest.raises(KeyboardInterrupt):
        with interruptible():
            os.kill(os.getpid(), signal.SIGINT)
            assert capfd.readouterr().err == "\nstopping after this step; again to quit at once\n"
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell")
def test_training_does_not_need_its_outputs(here):
    """Guards against a run that stops, or prints into its own files, because its outputs were closed."""
    shell = '"$@" --max_steps=4 --eval_every=2 <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", shell, "", sys.executable, ROOT / "train.py", *SMALL])
    assert done.returncode == 0 and load()["step"] == 4
    assert [int(row["step"]) for row in log_rows()] == [0, 2, 4]


def test_outputs_that_may_end_and_those_that_may_not(capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

        def fileno(self):
            return null

    null = os.open(os.devnull, os.O_WRONLY)
    Output(Full(), may_end=True).write("x")
    with pytest.raises(OSError):
        Output(Full(), may_end=False).write("x")
    os.close(null)


def test_a_dumb_terminal_gets_no_moving_bar_and_no_colours(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for term, dumb in (("dumb", True), ("xterm", False)):
        monkeypatch.setenv("TERM", term)
        assert Output(Terminal(), may_end=True).isatty() != dumb  # what asks for colours, and all other bars
        assert Progress(0, 9, 1).bar.disable == dumb


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_temporary_files_of_killed_runs_are_cleared(here, monkeypatch):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert run(monkeypatch, "--max_steps=2") is None
    for words, folder in ((["--resume", "--max_steps=4"], "run"), (["--max_steps=2"], "run.1")):
        for number in (gone.pid, os.getppid()):
            Path(f"out/run/ckpt.pt.{number}.tmp").write_bytes(b"half")
        Path("out/run/notes.tmp").write_bytes(b"mine")
        assert run(monkeypatch, *words) is None
        names = ["best.pt", "ckpt.pt", f"ckpt.pt.{os.getppid()}.tmp", "log.csv", "notes.tmp"]
        assert sorted(path.name for path in Path("out", folder).iterdir()) == names


def test_another_number_of_threads_is_told(here, monkeypatch, capsys):
    """Sums are taken in another order then, so that no resume can be exact."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    try:
        run(monkeypatch, "--max_steps=1", "--threads=3")
        assert "device      cpu, computing in float32 with 3 thread(s)\n" in capsys.readouterr().out
        run(monkeypatch, "--max_steps=2", "--threads=3", "--resume")
        assert "last bits" not in capsys.readouterr().out
        run(monkeypatch, "--max_steps=3", "--threads=2", "--resume")
        assert "it had 3 thread(s) and has 2 now, so numbers will" in capsys.readouterr().out
        assert load()["threads"] == 2
    finally:
        torch.set_num_threads(1)


def test_a_new_run_keeps_the_earlier_one(here, monkeypatch, capsys):
    for steps in (1, 2, 3):
        assert run(monkeypatch, f"--max_steps={steps}") is None
    assert [load(f"out/{name}/ckpt.pt")["step"] for name in ("run.1", "run.2", "run")] == [1, 2, 3]
    assert "out/run.2" in capsys.readouterr().out.replace("\\", "/")


def test_best_alone_is_kept_too(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=1") is None
    Path("out/run/ckpt.pt").unlink()
    assert run(monkeypatch, "--max_steps=2") is None
    assert load("out/run.1/best.pt")["step"] == 1


def at_step(monkeypatch, step, action):
    """Call action() once, when a checkpoint of this step has its temporary file."""
    torch_save = torch.save
    todo = [action]

    def save(checkpoint, file):
        torch_save(checkpoint, file)
        if checkpoint["step"] == step and todo:
            todo.pop()()

    monkeypatch.setattr(torch, "save", save)


@pytest.mark.skipif(os.name == "nt", reason="Windows renames no folder that is in use")
@pytest.mark.parametrize("words", [["--max_steps=1"], ["--max_steps=7", "--resume"]])
def test_a_run_whose_name_is_taken_loses_nothing(here, monkeypatch, capsys, words):
    """Guards against a run that may not save any more, and two that write into one folder by turns."""
    others = []

    def other_run():
        assert run(monkeypatch, *words) is None
        others.append(load())

    at_step(monkeypatch, 4, other_run)
    assert run(monkeypatch, "--max_steps=6", "--eval_every=2") is None
    assert load("out/run.1/ckpt.pt")["step"] == 6
    assert [int(row["step"]) for row in log_rows("out/run.1/log.csv")] == [0, 2, 4, 6]
    assert "this run goes on in out/run.1\n" in capsys.readouterr().out
    assert_same_state(load(), others[0])
    for folder in ("out/run", "out/run.1"):
        assert sorted(path.name for path in Path(folder).iterdir()) == ["best.pt", "ckpt.pt", "log.csv"]


@pytest.mark.skipif(os.name == "nt", reason="Windows renames no folder that is in use")
@pytest.mark.parametrize("action, folder", [
    (lambda: Path("out/run").rename("out/elsewhere"), "out/elsewhere"),
    (lambda: shutil.rmtree("out"), "out/run")])
def test_a_folder_that_goes_away_loses_nothing(here, monkeypatch, action, folder):
    at_step(monkeypatch, 4, action)
    assert run(monkeypatch, "--max_steps=6", "--eval_every=2") is None
    assert load(folder + "/ckpt.pt")["step"] == 6
    assert [int(row["step"]) for row in log_rows(folder + "/log.csv")] == [0, 2, 4, 6]
    assert [path.name for path in Path("out").iterdir()] == [Path(folder).name]


def test_losses_on_other_tokens_are_not_compared(here, monkeypatch, capsys):
    words = ["--eval_every=2", "--resume"]
    assert run(monkeypatch, "--max_steps=2", "--eval_every=2", "--eval_tokens=3") is None
    few = load("out/run/best.pt")
    few["best_val_loss"] = 0.5  # by luck
    torch.save(few, "out/run/best.pt")
    torch.save(few, "out/run/ckpt.pt")
    assert run(monkeypatch, "--max_steps=2", *words) is None  # no step: nothing to compare
    assert load("out/run/best.pt")["best_val_loss"] == 0.5 and "anew" not in capsys.readouterr().out
    assert run(monkeypatch, "--max_steps=4", *words) is None
    assert "the comparison for best.pt starts anew" in capsys.readouterr().out
    best, losses = load("out/run/best.pt"), [float(row["val_loss"]) for row in log_rows()]
    assert best["step"] == 4 and best["best_val_loss"] == pytest.approx(losses[-1], rel=1e-5)
    assert load("out/run/best.pt.1")["best_val_loss"] == 0.5
    assert run(monkeypatch, "--max_steps=6", *words) is None
    assert "anew" not in capsys.readouterr().out
    assert run(monkeypatch, "--max_steps=8", "--windows=documents", *words) is None
    assert "anew" in capsys.readouterr().out


def test_init_from_starts_a_new_run_from_weights(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=3") is None
    assert run(monkeypatch, "--max_steps=0", "--init_from=out/run/ckpt.pt", "--out=second") is None
    second = load("out/second/ckpt.pt")
    assert second["step"] == 0 and not second["optimizer"]["AdamW"]["state"]
    assert all(torch.equal(second["model"][k], v) for k, v in load()["model"].items())
    assert "n_layer" in run(monkeypatch, "--init_from=out/run/ckpt.pt", "--n_layer=3")
    assert run(monkeypatch, "--max_steps=1", "--init_from=out/run/ckpt.pt", "--context=24", "--out=long") is None
    assert load("out/long/ckpt.pt")["model_config"]["context"] == 24  # no weight depends on it
    words = ["--init_from=out/run/ckpt.pt", "--out=second", "--resume"]  # a config file may name init_from
    assert run(monkeypatch, "--max_steps=1", *words) is None and load("out/second/ckpt.pt")["step"] == 1
    assert "no checkpoint nowhere.pt" in run(monkeypatch, "--init_from=nowhere.pt")
    torch.save(second | {"tokenizer": ""}, "bare.pt")
    assert "bare.pt has no tokenizer: import it again" in run(monkeypatch, "--init_from=bare.pt")


def test_checkpoints_from_before_a_field_or_an_optimizer_was_there_go_on(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=4") is None
    old = load()
    for name in ("lookback", "embedding_norm", "init"):
        del old["model_config"][name]
    old["optimizer"] = old["optimizer"]["AdamW"]
    torch.save(old, "out/run/ckpt.pt")
    assert run(monkeypatch, "--max_steps=6", "--resume") is None
    assert load()["step"] == 6 and load()["optimizer"]["AdamW"]["state"][0]["step"] == 6


def test_a_run_that_begins_from_weights_may_merge_otherwise(here, monkeypatch, capsys):
    assert run(monkeypatch, *HELIX, "--max_steps=2") is None
    words = [*HELIX, "--max_steps=2", "--token_merging=off", "--phi=0"]
    assert run(monkeypatch, *words, "--init_from=out/run/ckpt.pt", "--out=second") is None
    assert "phi=-3.0, this run 0.0" in run(monkeypatch, *words, "--resume")


def test_resume_says_what_changed_and_refuses_another_model(here, monkeypatch, capsys):
    assert "no checkpoint" in run(monkeypatch, "--resume")
    assert run(monkeypatch, "--max_steps=2") is None
    assert "d_ff" in run(monkeypatch, "--resume", "--d_ff=32")
    assert "2 steps already" in run(monkeypatch, "--resume", "--max_steps=1")
    capsys.readouterr()
    assert run(monkeypatch, "--resume", "--max_steps=4", "--lr=0.005") is None
    assert "max_steps=4" in (out := capsys.readouterr().out) and "lr=0.005" in out
    assert load()["step"] == 4
    assert run(monkeypatch, "--resume", "--max_steps=5", "--weight_decay=0.7", "--beta2=0.9") is None
    decayed = load()["optimizer"]["AdamW"]["param_groups"][0]
    assert decayed["weight_decay"] == 0.7 and decayed["betas"] == (0.9, 0.9)  # said, and done


def test_a_nan_stops_the_run_and_replaces_nothing(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=4") is None
    good = Path("out/run/ckpt.pt").read_bytes()
    code = run(monkeypatch, "--max_steps=60", "--eval_every=1000", "--resume", "--lr=1e38", "--warmup=0")
    assert "after 5 steps" in code and "lower lr" in code
    monkeypatch.setattr(train, "evaluate", lambda *_: (math.nan, math.nan))
    assert "validation loss is nan after 6 steps" in run(monkeypatch, "--max_steps=6", "--resume")
    bad = load()
    bad["model"]["norm.weight"][3] = math.inf
    with pytest.raises(ValueError, match="not written"):
        save_checkpoint(bad, Path("out/run/ckpt.pt"))
    assert Path("out/run/ckpt.pt").read_bytes() == good
    assert sorted(p.name for p in Path("out/run").iterdir()) == ["best.pt", "ckpt.pt", "log.csv"]


def test_the_log_has_what_the_readme_says(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=6", "--eval_every=3") is None
    rows = log_rows()
    assert list(rows[0]) == LOG_COLUMNS
    assert [int(row["step"]) for row in rows] == [0, 2, 3, 4, 6]
    assert [bool(row["val_loss"]) for row in rows] == [True, False, True, False, True]
    assert all(int(row["tokens"]) == int(row["step"]) * 4 * 16 for row in rows)
    assert all(float(row["train_loss"]) > 0 and float(row["tokens_per_second"]) > 0 for row in rows[1:])
    assert float(rows[0]["val_loss"]) == pytest.approx(math.log(300), abs=0.1)
    assert float(rows[-1]["val_loss"]) < float(rows[0]["val_loss"])


def test_the_log_tells_how_many_tokens_merge_and_what_that_saves(here, monkeypatch, capsys):
    assert run(monkeypatch, *HELIX, "--max_steps=6", "--eval_every=3") is None
    ratios = [row["merge_ratio"] for row in log_rows()]
    assert ratios[0] == "" and all(0 < float(ratio) <= 0.5 for ratio in ratios[1:])
    last = float(ratios[-1])
    assert f"merged {last:.1%} of the tokens in 1 of 3 layers, which saves " in capsys.readouterr().out
    assert run(monkeypatch, "--max_steps=2") is None
    assert {row["merge_ratio"] for row in log_rows()} == {""}  # nothing merges
    steps = iter((0.01, 0.03, 0.1, 0.2, 0.3, 0.5))
    monkeypatch.setattr(LanguageModel, "merge_ratio", lambda self: next(steps))
    assert run(monkeypatch, *HELIX, "--max_steps=6", "--eval_every=3") is None
    assert [row["merge_ratio"] for row in log_rows()] == ["", "0.02", "0.1", "0.2", "0.4"]


def test_the_start_tells_sizes_and_the_expected_loss(here, monkeypatch, capsys):
    assert run(monkeypatch, "--max_steps=0") is None
    out = capsys.readouterr().out
    for words in ("ln 300 = 5.704, the first loss to expect", "mixer.gate", "float32",
                   "4 x 16 = 64 tokens", "per byte", "4,096 bytes"):
        assert words in out, words


@pytest.mark.parametrize("model", [[], HELIX, SILIA], ids=["nano", "helix", "silia"])
def test_bfloat16_and_checkpointing_run_on_cpu(here, monkeypatch, model):
    assert run(monkeypatch, "--max_steps=4", "--dtype=bfloat16", "--gradient_checkpointing", *model) is None
    assert all(w.dtype == torch.float32 for w in load()["model"].values())


def test_the_chunked_loss_trains_alike(here, monkeypatch):
    losses = []
    for words in ([], ["--chunked_loss"]):
        assert run(monkeypatch, "--max_steps=6", *words) is None
        losses.append([float(row["train_loss"]) for row in log_rows()[1:]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_failing_compiler_is_a_warning(here, monkeypatch, capsys):
    def fail(model):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", fail)
    assert run(monkeypatch, "--max_steps=2", "--compile=on") is None
    assert "no compiler here" in capsys.readouterr().err
    assert run(monkeypatch, "--max_steps=2", "--out=plain") is None
    assert_same_state(load(), load("out/plain/ckpt.pt"))


# ----------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_are_plain_and_self_contained(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=1") is None
    checkpoint = torch.load("out/run/ckpt.pt", weights_only=True)

    def leaves(x):
        if isinstance(x, dict):
            return [leaf for key, value in x.items() for leaf in (key, *leaves(value))]
        return [leaf for value in x for leaf in leaves(value)] if isinstance(x, (list, tuple)) else [x]

    assert {type(x) for x in leaves(checkpoint)} <= {torch.Tensor, int, float, str, bool, type(None)}
    assert checkpoint["tokenizer"] == Path("data/small/tokenizer.json").read_text(encoding="utf-8")
    assert set(checkpoint["model"]) == set(load_model(checkpoint).state_dict())


@pytest.mark.skipif(os.name == "nt", reason="POSIX limits")
def test_a_full_disk_is_one_sentence_and_leaves_the_old_checkpoint(here, monkeypatch):
    """A limit on the size of files stands in for the full disk: the same error, from the same call."""
    assert run(monkeypatch, "--max_steps=2") is None
    before = Path("out/run/ckpt.pt").read_bytes()
    limited = ("import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); "
               "sys.argv = sys.argv[1:]; sys.path.insert(0, sys.argv[1]); del sys.argv[1]; "
               "runpy.run_path(sys.argv[0], run_name='__main__')")
    words = [ROOT / "train.py", ROOT, *SMALL, "--resume", "--max_steps=4"]
    done = subprocess.run([sys.executable, "-c", limited, *words], capture_output=True, encoding="utf-8")
    assert done.returncode == 1 and "error: cannot write" in done.stderr and "Traceback" not in done.stderr
    assert "out/run/best.pt: File too large.\n" in done.stderr  # not PyTorch's "unexpected pos 704 vs 598"
    assert Path("out/run/ckpt.pt").read_bytes() == before
    assert sorted(p.name for p in Path("out/run").iterdir()) == ["best.pt", "ckpt.pt", "log.csv"]


def test_files_that_are_no_checkpoints_are_refused_and_run_nothing(here, monkeypatch):
    class Evil:
        def __reduce__(self):
            return Path.touch, (Path("owned"),)

    assert run(monkeypatch, "--max_steps=0") is None
    whole = Path("out/run/ckpt.pt").read_bytes()
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    Path("empty.pt").write_bytes(b"")
    Path("noise.pt").write_bytes(bytes(range(256)) * 9)
    Path("evil.pt").write_bytes(pickle.dumps(Evil()))
    torch.save({"model": Evil()}, "evil2.pt")
    torch.save({"model": {}}, "other.pt")
    torch.save([1, 2], "list.pt")
    for name in ("cut", "empty", "noise", "evil", "evil2", "other", "list"):
        with pytest.raises(ValueError, match=f"{name}.pt"):
            load(f"{name}.pt")
    with pytest.raises(ValueError, match="cannot read"):
        load("data")
    assert not Path("owned").exists()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1  # one bit, in some weight
    Path("flipped.pt").write_bytes(flipped)
    with pytest.raises(ValueError, match="damaged"):
        load("flipped.pt")


@pytest.mark.parametrize("spoil", [
    lambda c: c["optimizer"]["AdamW"]["state"][0].update(exp_avg=torch.zeros(3)),  # would crash the kernel
    lambda c: c["optimizer"]["AdamW"]["state"][0].update(exp_avg="x"),
    lambda c: c["optimizer"]["AdamW"]["state"][0].update(exp_avg=torch.tensor(1.0)),  # so would this
    lambda c: c["optimizer"]["AdamW"]["state"][0].pop("exp_avg_sq"),
    lambda c: c["optimizer"]["AdamW"].pop("state"), lambda c: c["optimizer"].clear(),
    lambda c: c.update(step="3"), lambda c: c.pop("best_val_loss"), lambda c: c.update(model_config=None),
    lambda c: c["model_config"].update(n_layer=10**7), lambda c: c["model_config"].update(d_model=2**40),
    lambda c: c["model_config"].update(alpha="x"), lambda c: c.update(tokenizer="{}"),
])
def test_a_spoilt_checkpoint_is_one_sentence(here, monkeypatch, spoil):
    assert run(monkeypatch, "--max_steps=2") is None
    checkpoint = load()
    spoil(checkpoint)
    torch.save(checkpoint, "out/run/ckpt.pt")
    code = run(monkeypatch, "--max_steps=4", "--resume")
    assert code.startswith("error: ") and "\n" not in code
    if "optimizer" in code:
        return  # the model itself is sound
    monkeypatch.setattr(sys, "argv", ["sample.py", "--prompt=x", "--max_new_tokens=1"])
    with pytest.raises(SystemExit, match="error: "):
        sample.main()


def test_a_checkpoint_of_another_model_file_is_refused(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=0") is None
    for spoil in (lambda c: c["model_config"].update(wings=2), lambda c: c["model"].pop("norm.weight"),
                  lambda c: c["model_config"].update(n_layer=7)):
        checkpoint = load()
        spoil(checkpoint)
        with pytest.raises(ValueError):
            load_model(checkpoint)


def test_prefixes_of_wrapped_models_are_dropped(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=2") is None
    checkpoint, weights = load(), load()["model"]
    for prefix in ("_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."):
        checkpoint["model"] = {prefix + name: w for name, w in weights.items()}
        loaded = load_model(checkpoint).state_dict()
        assert all(torch.equal(loaded[name], w) for name, w in weights.items())
    torch.save(checkpoint, "out/run/ckpt.pt")
    assert run(monkeypatch, "--max_steps=4", "--resume") is None
    assert load()["model"].keys() == weights.keys()
    checkpoint["model"] |= weights
    with pytest.raises(ValueError, match="there twice"):
        load_model(checkpoint)


def test_a_misfit_names_the_tensors(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=0") is None
    checkpoint = load()
    weights = checkpoint["model"]
    weights["wing.weight"] = weights.pop("norm.weight")
    weights["embedding.weight"] = weights["embedding.weight"][:, :8]
    weights["blocks.0.mixer.out.weight"][0] = math.nan
    with pytest.raises(ValueError) as error:
        load_model(checkpoint)
    assert str(error.value) == (
        "the checkpoint does not fit this model.py: missing: norm.weight; unexpected: wing.weight; "
        "of another shape: embedding.weight (300, 8) instead of (300, 16); "
        "not finite: blocks.0.mixer.out.weight.")
    checkpoint = load()
    checkpoint["model"] = {name: w for name, w in checkpoint["model"].items() if "blocks.1." not in name}
    with pytest.raises(ValueError, match=r"missing: blocks\.1\.\S+, .* and \d more\.$"):
        load_model(checkpoint)


@pytest.mark.parametrize("where", ["clip_and_step", "load_model", "LanguageModel.float"])
def test_out_of_memory_on_a_cpu_is_a_sentence(here, monkeypatch, where):
    assert run(monkeypatch, "--max_steps=2") is None

    def fail(*arguments, **options):
        torch.empty(2**50)  # PyTorch's own error: a RuntimeError, on a CPU

    monkeypatch.setattr(*{"clip_and_step": (train, "clip_and_step"), "load_model": (torch, "load"),
                          "LanguageModel.float": (LanguageModel, "float")}[where], fail)
    code = run(monkeypatch, "--max_steps=4", "--resume")
    assert code == "error: out of memory; try a larger grad_accum or a smaller batch_size."


# ----------------------------------------------------------------------------------------------- the log


def spreadsheet(text):
    """What spreadsheets and crashes make of a log.csv: {name: text}."""
    return {
        "byte order mark": "\ufeff" + text,
        "CRLF": "\ufeff" + text.replace("\n", "\r\n"),
        "bare CR": text.replace("\n", "\r"),
        "quotes": "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in text.splitlines()),
        "zeros after a crash": text + 300 * "\0",
    }


@pytest.mark.parametrize("kind", spreadsheet(""))
def test_a_log_that_a_spreadsheet_saved_keeps_its_rows(tmp_path, kind):
    path = tmp_path / "log.csv"
    Log(path, [{"step": step, "lr": 3e-4, "val_loss": 5.5} for step in (0, 2, 4)]).file.close()
    before = log_rows(path)
    path.write_bytes(spreadsheet(path.read_text(encoding="utf-8"))[kind].encode())
    assert read_log(path, 4) == before and read_log(path, 3) == before[:2]
    assert [file.name for file in tmp_path.iterdir()] == ["log.csv"]


@pytest.mark.parametrize("addition", ["1,64", "seen by Lily\n", "4,9,,,,,,,,a note\n", 200_000 * "x", '8,"'])
def test_what_is_no_row_of_a_log_is_kept_beside_it(tmp_path, capsys, addition):
    path = tmp_path / "log.csv"
    Log(path, [{"step": 0}, {"step": 2}]).file.close()
    data = path.read_bytes() + addition.encode()
    path.write_bytes(data)
    assert [row["step"] for row in read_log(path, 4)] == ["0", "2"]
    assert (tmp_path / "log.csv.1").read_bytes() == data and "log.csv.1" in capsys.readouterr().out


def test_a_torn_log_goes_on(here, monkeypatch):
    assert run(monkeypatch, "--max_steps=4") is None
    with open("out/run/log.csv", "ab") as file:
        file.write(b'6,"38')
    assert run(monkeypatch, "--max_steps=8", "--resume") is None
    assert [int(row["step"]) for row in log_rows()] == [0, 2, 4, 6, 8]


def test_rows_of_the_log_wait_until_they_can_be_written(tmp_path, capsys):
    log = Log(tmp_path / "log.csv")
    with open(tmp_path / "log.csv", "rb") as read_only:
        file, log.file = log.file, read_only
        log.write({"step": 1})
        log.file = file
    assert "warning: cannot write" in capsys.readouterr().err
    log.write({"step": 2})
    file.close()
    assert [row["step"] for row in log_rows(tmp_path / "log.csv")] == ["1", "2"]


# ------------------------------------------------------------------------------------------------------ data


def test_data_that_does_not_match_is_refused(here, monkeypatch):
    folder = Path("data/small")
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    assert "no data in" in run(monkeypatch, "--data=nowhere")
    assert "vocab_size=299" in run(monkeypatch, "--vocab_size=299")
    needed = meta["train"]["tokens"] + 1
    assert f"at least {needed} are needed" in run(monkeypatch, f"--context={needed - 1}")
    val = (folder / "val.bin").read_bytes()
    (folder / "val.bin").write_bytes(val[:-2])
    assert "val.bin" in run(monkeypatch)
    (folder / "val.bin").write_bytes(val)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    assert "tokenizer.json" in run(monkeypatch)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "val.bin").write_bytes(b"\xff\xff" + val[2:])
    assert "does not know" in run(monkeypatch)
    for broken in ({}, [], meta | {"format": 2}, meta | {"train": {"tokens": None}}):
        (folder / "meta.json").write_text(json.dumps(broken), encoding="utf-8")
        assert "damaged" in run(monkeypatch)
    assert not Path("out").exists()


def test_help_and_misspelt_settings_need_no_torch(capsys):
    """They are answered from the outlines of the two dataclasses, and with the very same words."""
    code = """if True:
        import runpy, sys
        sys.modules["torch"] = None
        for word in ("--help", "--batchsize=1", "--lr=fast", "config/nanno.py"):
            sys.argv = ["train.py", word]
            try:
                runpy.run_path("train.py", run_name="__main__")
            except SystemExit as end:
                print(end)"""
    told = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, encoding="utf-8")
    with pytest.raises(SystemExit):
        settings.read_settings(["--help"], train.TrainConfig, ModelConfig)
    words = capsys.readouterr().out.split("\n", 1)[1]  # the first line has the script's name
    assert told.split("\n", 1)[1] == words + """0
error: unknown setting --batchsize; did you mean --batch_size?
error: --lr takes a value of type float, not 'fast'.
error: there is no config file config/nanno.py; did you mean config/nano.py?
"""


def test_a_user_error_is_one_line_and_exit_code_1(here, monkeypatch):
    for out in (".", "..", "a/b", "/tmp/x"):
        assert "one folder" in run(monkeypatch, f"--out={out}")
    assert "memory" in run(monkeypatch, "--d_model=1099511627776")
    assert "seed" in run(monkeypatch, "--seed=1e30")
    for process in [start("--max_step=3"), start("--data=nowhere")]:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1 and err.startswith("error: ") and err.count("\n") == 1, err
    assert "device" in run(monkeypatch, "--device=abacus") and "dtype" in run(monkeypatch, "--dtype=float16")
    assert not Path("out").exists()


@pytest.mark.parametrize("device, dtype, message", [
    ("abacus", "auto", "unknown"), ("cpu", "float16", "float32, bfloat16"), ("cpu", "float8", "choices"),
])
def test_devices_that_do_not_exist_are_refused(device, dtype, message):
    with pytest.raises(ValueError, match=message):
        choose_device(device, dtype)
    assert choose_device("cpu", "auto") == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("capability, expected", [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_precision_follows_the_gpu(monkeypatch, capability, expected):
    """Free cloud GPUs (7.5) have no bfloat16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_device("auto", "auto") == (torch.device("cuda"), expected)
    if expected is torch.float16:
        with pytest.raises(ValueError, match="bfloat16"):
            choose_device("cuda", "bfloat16")
