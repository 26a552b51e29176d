"""The promise of support/parallel.py: the same steps by two processes, and an end of all that loses nothing.

Processes are slow to start. So one is started once, without torchrun but with the environment that it gives,
and trains one run after the other together with this one; the tests look at what they left.
"""

import contextlib
import csv
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prepare
import train
from support import parallel

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--data=small", "--vocab_size=300", "--context=16", "--n_layer=2", "--d_model=16", "--n_head=2",
         "--d_ff=24", "--batch_size=8", "--device=cpu", "--lr=3e-3", "--sample_tokens=1", "--log_every=2",
         "--eval_every=1000", "--max_steps=20"]
HELIX = ["--n_layer=3", "--position=helix", "--mixer=cross_layer", "--ffn=dual_stream", "--norm=offset_rms",
         "--init=normal", "--token_merging=paper", "--merge_threshold=0.5"]
SILIA = ["--position=mirrored", "--mixer=hydra", "--block=silia", "--norm=bare_rms", "--embedding_norm",
         "--init=pytorch", "--sink_token=<|end|>", "--optimizer=muon", "--schedule=cooldown"]
RUNS = {  # by two processes, in this order
    "nano": ["--grad_accum=2"],
    "helix": HELIX,
    "silia": SILIA,
    "one_two": ["--resume"],  # one process has taken 16 steps
    "two_one": [],  # four steps; one process takes the others
    "uneven": ["--grad_accum=8"],
    "killed": [],
}
SIGNALS = {"two_one": (4, "SIGINT"), "killed": (5, "SIGKILL")}  # to the second process, in that step


def train_run(name, words, monkeypatch, signals=()):
    """train.py in this process, which sends itself a signal during a step; the exit code, or None."""
    set_rates = train.set_rates

    def set_rates_and_send(optimizers, step, config):
        if signals and step + 1 == signals[0]:
            os.kill(os.getpid(), getattr(signal, signals[1]))
        return set_rates(optimizers, step, config)

    with monkeypatch.context() as patch:
        patch.setattr(train, "set_rates", set_rates_and_send)
        patch.setattr(sys, "argv", ["train.py", *SMALL, f"--out={name}", *words])
        try:
            train.main()
        except SystemExit as exit:
            return exit.code


def train_runs(rank, ports):
    """One of two processes in all RUNS, each of which meets at a port of its own. Return the exit codes."""
    codes = {}
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test"}
    with pytest.MonkeyPatch.context() as patch:
        for port, (name, words) in zip(ports, RUNS.items()):
            for variable, value in (environment | {"MASTER_PORT": port}).items():
                patch.setenv(variable, value)
            signals = SIGNALS.get(name, ()) if rank == "1" else ()
            codes[name] = train_run(name, words, patch, signals)
            assert rank == "0" or codes[name] is None, "the second process is to end without a word"
    return codes


def free_ports(n):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [str(s.getsockname()[1]) for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(exit codes of the first process's runs, outputs of the first, outputs of the second process)."""
    folder = tmp_path_factory.mktemp("parallel")
    sentences = [f"Mia gave Tom {n} balls and took {m}." for n in range(40) for m in range(5)]
    Path(folder, "text.txt").write_text("<|endoftext|>\n".join(sentences), encoding="utf-8")
    ports = free_ports(len(RUNS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["prepare.py", *"--name small --input text.txt --vocab_size 300 "
                                                   "--workers 1".split()])
        other = subprocess.Popen([sys.executable, __file__, *ports], text=True, encoding="utf-8",
                                 env=os.environ | {"PYTHONPATH": str(ROOT)},
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            prepare.main()
            assert train_run("one_two", [], patch, (16, "SIGINT")) == 130
            assert other.stdout.readline() == "ready\n", other.communicate()
            print("go", file=other.stdin, flush=True)
            with (open("out.txt", "w", encoding="utf-8") as out, contextlib.redirect_stdout(out),
                  open("err.txt", "w", encoding="utf-8") as err, contextlib.redirect_stderr(err)):
                codes = train_runs("0", ports)
            other_outputs = other.communicate(timeout=60)
            assert other.returncode == -signal.SIGKILL, other_outputs
            outputs = [Path(name).read_text(encoding="utf-8") for name in ("out.txt", "err.txt")]
            yield codes, outputs, other_outputs
        finally:
            other.kill()


def load(name):
    return torch.load(f"out/{name}/ckpt.pt", weights_only=True)


def log_rows(name):
    """Rows of the log, as numbers, without the speed."""
    with open(f"out/{name}/log.csv", encoding="utf-8", newline="") as file:
        return [{key: float(x) for key, x in row.items() if x and key != "tokens_per_second"}
                for row in csv.DictReader(file)]


def assert_same_run(one, two):
    a, b = load(one), load(two)
    assert a["step"] == b["step"] == 20
    for name, w in a["model"].items():
        torch.testing.assert_close(b["model"][name], w, rtol=0, atol=1e-6, msg=name)
    assert b["best_val_loss"] == pytest.approx(a["best_val_loss"], abs=1e-6)
    rows, others = log_rows(one), log_rows(two)
    assert len(rows) == len(others)
    for row, other in zip(rows, others):
        assert other == pytest.approx(row, rel=1e-5)  # losses, bits, norms, shares merged


pytestmark = pytest.mark.skipif(os.name == "nt", reason="POSIX signals")


@pytest.mark.parametrize("name, words", [("nano", []), ("helix", HELIX),
                                         ("silia", [*SILIA, "--grad_accum=2"])])
def test_two_processes_take_the_steps_of_one(both, monkeypatch, name, words):
    """Silia is compared with the same parts of a batch, and so to the last bit: Muon rounds its matrices to
    bfloat16, which now and then makes a float32's last bit a difference of 1e-5, in one process as in two."""
    assert both[0][name] is None
    assert train_run(f"one_{name}", words, monkeypatch) is None
    assert_same_run(f"one_{name}", name)


def test_a_run_goes_on_with_another_number_of_processes(both, monkeypatch):
    """Also an interrupt: only the second process was sent one, and both stopped, after the same step."""
    assert both[0]["two_one"] == 143
    assert load("two_one")["step"] == 4 and log_rows("two_one")[-1]["step"] == 4
    assert train_run("two_one", ["--resume"], monkeypatch) is None
    for name in ("two_one", "one_two"):
        assert_same_run("nano", name)


def test_a_signal_that_comes_after_the_question_waits_for_the_next_one(monkeypatch):
    """Else one process would stop a step before the others, which then wait for it."""
    stop = []
    monkeypatch.setattr(parallel, "total", lambda numbers: stop.append(signal.SIGINT) or [0])
    assert not parallel.anyone_stops(stop) and stop == [signal.SIGINT]


def test_a_batch_that_does_not_divide_is_one_sentence(both):
    assert both[0]["uneven"] == ("error: batch_size=8 does not divide among 2 processes with grad_accum=8: "
                                 "take a multiple of 16.")
    assert not Path("out/uneven").exists()


def test_if_a_process_is_killed_the_other_saves_and_ends(both):
    message = both[0]["killed"]
    assert message.startswith("error: another process of this run has ended") and "--resume" in message
    assert load("killed")["step"] == 4
    assert [row["step"] for row in log_rows("killed")] == [0, 2, 4]


def test_only_the_first_process_writes_and_prints(both):
    _, (out, err), other_outputs = both
    assert other_outputs == ("", "")
    assert out.count("processes   2, each with 4 of the 8 windows of a step") == len(RUNS) - 1  # not "uneven"
    assert out.count("step 20: ") == 4  # nano, helix, silia, one_two
    assert "Traceback" not in err
    assert not list(Path("out").glob("*.1")), "a second folder of the same name"
    assert sorted(path.name for path in Path("out/nano").iterdir()) == ["best.pt", "ckpt.pt", "log.csv"]


if __name__ == "__main__":
    print("ready", flush=True)  # all is imported; before the other is, it would wait in vain if that failed
    sys.stdin.readline()
    train_runs("1", sys.argv[1:])
