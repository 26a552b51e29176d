"""How many threads compute: all that have a core of their own, and for one token's decoding as few as do."""

import os

import pytest
import torch

from support import runtime


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of eight cores, idle; a function that changes it. PyTorch's threads are put back."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def change(busy=0.0, allowed=8, quota=float("inf")):
        ticks = iter([[100] * 8, [100 + round(100 * busy), 100, 100, 100 + round(100 * (8 - busy)), *[100] * 4]])
        monkeypatch.setattr(runtime, "processor_times", lambda: next(ticks))
        monkeypatch.setattr(runtime.time, "sleep", lambda seconds: None)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)), raising=False)
        monkeypatch.setattr(runtime, "core_quota", lambda: quota)

    change()
    yield change
    torch.set_num_threads(before)


@pytest.mark.parametrize("busy, allowed, quota, free", [
    (0, 8, 99, 8), (0.4, 8, 99, 8), (1, 8, 99, 7), (3.6, 8, 99, 4), (8, 8, 99, 1),  # what others leave
    (0, 2, 99, 2), (7, 2, 99, 1),  # taskset
    (0, 8, 1, 1), (0, 8, 2.5, 2), (0, 8, 0.5, 1),  # docker --cpus
])
def test_free_cores(machine, busy, allowed, quota, free):
    machine(busy, allowed, quota)
    assert runtime.free_cores() == free


def test_without_proc_the_load_average_tells(monkeypatch):
    def missing():
        raise FileNotFoundError

    monkeypatch.setattr(runtime, "processor_times", missing)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.2, 0, 0), raising=False)
    assert runtime.free_cores() == 5


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux")
def test_the_times_of_this_machine_are_read(monkeypatch):
    monkeypatch.undo()
    assert len(runtime.processor_times()) == 8 and 0 <= runtime.busy_cores(2) <= 2


@pytest.mark.parametrize("files, cores", [
    ({"cpu.max": "150000 100000\n"}, 1.5), ({"cpu.max": "max 100000\n"}, float("inf")), ({}, float("inf")),
    ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 4),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "50000\n"}, float("inf")),
])
def test_quota_of_a_container(monkeypatch, tmp_path, files, cores):
    monkeypatch.undo()
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="ascii")
    assert runtime.core_quota(tmp_path) == cores


def test_training_takes_the_free_cores_unless_told_how_many(machine, monkeypatch):
    machine(busy=6)
    torch.set_num_threads(4)
    runtime.choose_threads()
    assert torch.get_num_threads() == 2
    runtime.choose_threads(3)
    assert torch.get_num_threads() == 3
    machine(busy=0)
    runtime.choose_threads()
    assert torch.get_num_threads() == 3  # never more than PyTorch would take
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    machine(busy=8)
    runtime.choose_threads()
    assert torch.get_num_threads() == 3
    for wanted in (-1, 9):
        with pytest.raises(ValueError, match="between 0 and 8, the cores"):
            runtime.choose_threads(wanted)


@pytest.mark.parametrize("busy, seconds, chosen", [
    (0, {1: 7, 2: 6}, 1), (0, {1: 7, 2: 9}, 1), (0, {1: 7, 2: 5, 4: 4.5}, 2), (0, {1: 8, 2: 5, 4: 3}, 4),
    (7, {1: 7}, 1), (5, {1: 7, 2: 4, 3: 2}, 3),
])
def test_decoding_takes_one_thread_unless_more_are_clearly_faster(machine, monkeypatch, busy, seconds, chosen):
    machine(busy)
    torch.set_num_threads(4)
    monkeypatch.setattr(runtime, "seconds_per_token", lambda *_: seconds[torch.get_num_threads()])
    model = torch.nn.Identity()
    runtime.choose_decoding_threads(model, None)
    assert torch.get_num_threads() == chosen
    for length, threads in ((5, min(4, 8 - busy)), (1, chosen)):  # of a prompt, and of one token
        model(torch.zeros(1, length))
        assert torch.get_num_threads() == threads
    runtime.choose_decoding_threads(None, None, 2)
    assert torch.get_num_threads() == 2
