"""The promises of extras/ablate.py: equal sizes, runs that are resumed or left alone, honest intervals."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import prepare
import train
from model import LanguageModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "extras"))
import ablate

TINY = dict(context=16, d_model=16, n_layer=3, n_head=4)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with data/small."""
    monkeypatch.chdir(tmp_path)
    names = "Lily Tom Mia Ben Anna Max Sara Tim".split()
    text = [f"{a} gave {b} a ball, {n} times." for a in names for b in names for n in (1, 2, 3)]
    Path("text.txt").write_text("<|endoftext|>\n".join(text), encoding="utf-8")
    prepare.main("--name small --input text.txt --vocab_size 300 --workers 1".split())
    Path("out").mkdir()
    return tmp_path


def command(monkeypatch, *words):
    """ablate.py in this process -> what it exits with."""
    monkeypatch.setattr(sys, "argv", ["ablate.py", *words])
    with pytest.raises(SystemExit) as exit:
        ablate.main()
    return exit.value.code


def test_all_variants_are_as_large_as_nano():
    some = ("helix", "silia")
    for vocab_size, size, variants in ((1024, 722_392, ablate.VARIANTS), (4096, 1_115_608, some)):
        assert ablate.count(ablate.plan("storybook", "nano", 9, vocab_size)) == size  # 1024: config/tiny.py
        for variant in variants:
            n = ablate.count(ablate.plan("storybook", variant, 9, vocab_size))
            assert abs(n / size - 1) < 0.005, variant


def test_idle_parameters_do_not_count():
    """The lowest layer of a helix has nothing below it: its W_K', W_V' and phi are idle."""
    for variant, idle_layers in (("nano", 0), ("helix", 1), ("helix-no-summaries", 3)):
        options = ablate.plan("storybook", variant, 9, 1024)
        config = ablate.configs(options)[1]
        total = sum(p.numel() for p in LanguageModel(config).parameters())
        idle = 2 * config.d_model * config.n_kv_head * config.d_head + 1
        assert ablate.count(options) == total - idle_layers * idle


def test_variants_differ_from_nano_in_what_they_say():
    """In the part itself, the width that follows from it, and nothing else: the same tokens and rates."""
    nano = ablate.plan("storybook", "nano", 9, 1024)
    for variant, part in (("alpha-0", {"alpha"}), ("no-gate", {"gate"}), ("late-gate", {"gate_after_rotary"}),
                          ("swiglu", {"ffn", "d_ff"}), ("baseline", {"mixer", "alpha", "ffn", "d_ff"})):
        options = ablate.plan("storybook", variant, 9, 1024)
        assert {name for name in options if options[name] != nano.get(name)} == part
    for variant, changes in ablate.VARIANTS.items():
        assert not {"data", "context", "batch_size", "max_steps", "n_layer"} & changes.keys()
        assert variant == "silia" or "lr" not in changes


@pytest.mark.parametrize("variant", ["helix-merge-0.3", "silia"])
def test_a_killed_run_goes_on_exactly(here, monkeypatch, variant):
    """Killed after its first checkpoint, it ends with the row of a run that was not, but for the speed."""
    monkeypatch.setattr(ablate, "BASE", ablate.BASE | TINY)
    shape = dict(d_model=16, d_head=16) if variant == "silia" else {}
    monkeypatch.setitem(ablate.VARIANTS, variant, ablate.VARIANTS[variant] | shape)
    options = ablate.plan("small", variant, 6, 300)
    ablate.run(Path("whole.csv"), options, variant, "1")
    folder = Path(f"out/ablate-small-{variant}-{options['lr']:g}-1")
    assert not list(folder.glob("*.pt"))  # the weights go, the log stays

    batch, steps = train.get_batch, []

    def killed(ids, step, *rest):
        steps.append(step)
        if step == 4 and steps.count(0):
            raise MemoryError
        return batch(ids, step, *rest)

    monkeypatch.setattr(train, "get_batch", killed)
    with pytest.raises(MemoryError):
        ablate.run(Path("killed.csv"), options, variant, "1")
    assert not Path("killed.csv").exists()  # no row for half a run
    steps.clear()
    ablate.run(Path("killed.csv"), options, variant, "1")
    assert min(steps) == 3  # step 3 of 6 had a checkpoint

    rows = [next(csv.reader(Path(name).open(encoding="utf-8"))) for name in ("whole.csv", "killed.csv")]
    rows = [dict(zip(ablate.COLUMNS, row)) | {"tokens_per_core_second": ""} for row in rows]
    assert rows[0] == rows[1] and int(rows[0]["tokens"]) == 6 * 2 * 16


def test_a_checkpoint_with_other_settings_is_not_continued(here, monkeypatch):
    monkeypatch.setattr(ablate, "BASE", ablate.BASE | TINY)
    options = ablate.plan("small", "nano", 2, 300)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # the weights stay
    ablate.run(Path("a.csv"), options, "nano", "1")
    ablate.run(Path("b.csv"), options | dict(gate=False), "nano", "1")
    first, second = (next(csv.reader(Path(name).open(encoding="utf-8"))) for name in ("a.csv", "b.csv"))
    assert first[4] != second[4] and Path("out/ablate-small-nano-0.003-1.1").exists()


def test_finished_runs_are_not_repeated(here, monkeypatch, capsys):
    """The whole command: one run, one row; then nothing is left to do. With other settings it is another."""
    words = "--data small --variants nano --lr_factors 1 --seeds 1 --max_steps 1".split()
    assert command(monkeypatch, *words) == 0
    written = Path("out/ablate-small.csv").read_text(encoding="utf-8")
    assert written.count("\n") == 2
    monkeypatch.setattr(subprocess, "run", None)  # no run can begin
    assert command(monkeypatch, *words) == 0
    *_, line, empty, note = capsys.readouterr().out.splitlines()
    assert line.startswith("| nano | 1 | ") and "±" not in line and "Fewer than three seeds" in note
    assert command(monkeypatch, *words, "--table", "--seeds", "2") == 0
    assert "no run on data/small" in command(monkeypatch, *words[:-1], "2", "--table")
    assert Path("out/ablate-small.csv").read_text(encoding="utf-8") == written


def test_the_best_learning_rate_is_the_one_that_counts(here, monkeypatch, capsys):
    """Of three rates with seed 1; the other seeds have that one only."""
    made = ["variant,seed,parameters,tokens,val_loss,bits_per_byte,tokens_per_core_second,settings"]
    options = ablate.plan("small", "nano", 1, 300)
    for lr, seed, loss in ((0.0015, 1, 3.0), (0.003, 1, 2.0), (0.006, 1, 4.0), (0.003, 2, 2.5)):
        settings = " ".join(ablate.words(options | dict(lr=lr)))
        made.append(f"nano,{seed},9,9,{loss},1.0,5,{settings}")
    Path("out/ablate-small.csv").write_text("\n".join(made), encoding="utf-8")
    words = "--data small --variants nano --seeds 2 --max_steps 1 --table".split()
    assert command(monkeypatch, *words) == 0
    assert "| nano | 2 | 9 | 0.003 | 2.250 |" in capsys.readouterr().out


def test_intervals_are_students_over_at_least_three_seeds():
    assert ablate.show([1.0, 2.0]) == "1.500"
    assert ablate.show([1.0, 2.0, 3.0]) == "2.000 ± 2.484"  # 4.303 x 1 / sqrt(3)
    assert ablate.show([0.0, 0.0, 0.0, 4.0], "+") == "+1.000 ± 3.182"  # 3.182 x 2 / sqrt(4)


def test_the_difference_is_taken_seed_by_seed():
    """A seed that is hard for all does not widen the interval, and one that Nano lacks does not count."""
    def rows(losses):
        return {str(seed): dict(parameters="9", tokens="9", val_loss=str(x), bits_per_byte="1",
                                settings="--lr=0.1", tokens_per_core_second="5") for seed, x in losses.items()}

    text = ablate.table({"nano": rows({1: 1.0, 2: 2.0, 3: 3.0}),
                         "swiglu": rows({1: 1.1, 2: 2.1, 3: 3.1, 4: 50.0})}, "small")
    assert "| +0.100 ± 0.000 |" in text and "Fewer" not in text


def test_a_variant_is_compared_with_nano_the_baseline_and_the_helix():
    loss = {"nano": 2.0, "baseline": 1.75, "silia": 2.5, "helix": 1.0}
    rows = {name: {"1": dict(parameters="9", tokens="9", val_loss=str(x), bits_per_byte="1", settings="--lr=0.1",
                             tokens_per_core_second="5")} for name, x in loss.items()}
    titles, _, *lines = [line.strip("| ").split(" | ") for line in ablate.table(rows, "small").splitlines()[:6]]
    found = {line[0]: dict(zip(titles, line)) for line in lines}
    columns = ["loss minus Nano's", "minus the baseline's", "minus helix's"]
    assert [found["silia"][title] for title in columns] == ["+0.500", "+0.750", "+1.500"]
    assert [found["helix"][title].strip() for title in columns] == ["-1.000", "-0.750", ""]
    assert titles == ["variant", "seeds", "parameters", "learning rate", "loss", "bits per byte", *columns,
                      "tokens/core-second"]
    del rows["nano"]
    assert columns[0] not in ablate.table(rows, "small") and columns[1] in ablate.table(rows, "small")


@pytest.mark.parametrize("words, sentence", [
    (["--variants", "nanoo"], "invalid choice: 'nanoo'"),
    (["--seeds", "0"], "must be at least 1"),
    (["--data", "nowhere", "--variants", "nano"], "there is no data in data"),
    (["--data", "../x"], "data is the name of one folder"),
])
def test_mistakes_are_told_in_a_sentence(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    said = command(monkeypatch, *words)
    assert said.startswith("error: ") and sentence in said and "\n" not in said
    assert not list(tmp_path.iterdir())
