"""The promises of extras/bench.py: rounds that alternate, a busy neighbour, a table that it writes itself."""

import contextlib
import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "extras"))
import bench


@pytest.fixture
def measured(monkeypatch):
    """What is measured, in order; nothing is, in fact: each number is 100 more than the one before."""
    log, busy = [], []

    class Neighbour:
        def __init__(self, command):
            busy.append(command)

        def kill(self):
            busy.clear()

        def wait(self):
            pass

    def section(**options):
        log.append((options["label"], bool(busy)))
        return 100 * len(log), "tokens/s"

    def run(command, **options):
        """Do in this process what the command's would"""
        section_name, label, options, conditions = json.loads(command[-1])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            bench.measure_here(section_name, label, options | {"label": label}, conditions)
        return subprocess.CompletedProcess(command, 0, out.getvalue(), "")

    def peak(process):
        size = (5e8 + len(log) * 1e6) / (1 if sys.platform == "darwin" else 1024)
        return SimpleNamespace(ru_maxrss=size)

    monkeypatch.setattr(resource, "getrusage", peak)
    monkeypatch.setattr(bench, "SECTIONS", dict.fromkeys(bench.SECTIONS, section))
    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(bench.subprocess, "Popen", Neighbour)
    return log


def test_quick_measures_eight_rows_idle_and_beside_a_busy_process(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: name == "wiola13m")
    monkeypatch.setattr(bench.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--quick", "--out", str(tmp_path / "a.md")])
    bench.main()
    labels = [label for label, _ in measured[:16:2]]
    assert set(labels) == {label for _, label in bench.QUICK}
    assert measured == 3 * [(label, busy) for label in labels for busy in (False, True)]
    lines = (tmp_path / "a.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "## Quick" and "with wiola13m 1.0." in lines[2] and len(lines) == 6 + 8
    assert lines[4] == "| what | which | idle | beside a busy process | peak memory | rounds |"
    assert lines[6] == ("| train | nano, float32 | 1,700 (100 to 3,300) tokens/s | "
                        "1,800 (200 to 3,400) tokens/s | 534 MB | 3 |")
    assert capsys.readouterr().out.splitlines() == lines[2:]


def test_each_condition_starts_with_all_of_pytorchs_threads(monkeypatch, capsys):
    before, seen = torch.get_num_threads(), []

    def section():
        seen.append(torch.get_num_threads())
        torch.set_num_threads(1)
        return 1.0, "tokens/s"

    monkeypatch.setitem(bench.SECTIONS, "decode", section)
    try:
        torch.set_num_threads(3)
        bench.measure_here("decode", "", {}, [False, False])
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 3]


def test_its_section_of_a_file_is_replaced_and_nothing_else(tmp_path):
    path = tmp_path / "b.md"
    path.write_text("# Speed\n\nWords.\n\n## Quick\n\nold\n\n## All rows\n\nkept\n", encoding="utf-8")
    bench.write_section(path, "Quick", ["new", "lines"])
    bench.write_section(path, "Section decode", ["more"])
    assert path.read_text(encoding="utf-8") == (
        "# Speed\n\nWords.\n\n## Quick\n\nnew\nlines\n\n## All rows\n\nkept\n\n## Section decode\n\nmore\n")


def test_the_neighbour_is_busy_and_ends(monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(bench.subprocess, "Popen", lambda *args: started.append(popen(*args)) or started[-1])
    with pytest.raises(KeyboardInterrupt), bench.neighbour(True):
        assert started[0].poll() is None
        raise KeyboardInterrupt
    assert started[0].poll() is not None
    with bench.neighbour(False):
        assert len(started) == 1
