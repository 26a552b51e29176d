"""Settings from files and command lines: typed, and misspelt names are refused with the nearest one."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch

from support import settings
from model import LanguageModel, ModelConfig
from train import TrainConfig

CONFIGS = sorted(Path(__file__).resolve().parent.parent.joinpath("config").glob("[!_]*.py"))


@dataclass
class Fruit:
    """A bowl."""

    apples: int = 3  # how many apples
    sugar: float = 0.5  # grams
    name: str = "bowl"  # what it says on it
    ripe: bool = False  # can be eaten


def load(*words):
    return settings.read_settings(list(words), Fruit)[1][0]


@pytest.mark.parametrize("words, expected", [
    ([], Fruit()),
    (["--apples=5", "--sugar", "1e-3"], Fruit(apples=5, sugar=1e-3)),
    (["--apples=1_000"], Fruit(apples=1000)),
    (["--apples=2e3", "--sugar=2"], Fruit(apples=2000, sugar=2.0)),
    (["--sugar", "-1.5"], Fruit(sugar=-1.5)),
    (["--name=a=b"], Fruit(name="a=b")),
    (["--name="], Fruit(name="")),
    (["--ripe"], Fruit(ripe=True)),
    (["--ripe", "--apples=1"], Fruit(ripe=True, apples=1)),
    (["--ripe", "no"], Fruit(ripe=False)),
    (["--ripe=True"], Fruit(ripe=True)),
    (["--apples=1", "--apples=2"], Fruit(apples=2)),
    (["--sugar", "-1e-3"], Fruit(sugar=-1e-3)),  # argparse takes this for an option
], ids=str)
def test_command_line(words, expected):
    result = load(*words)
    assert result == expected and type(result.sugar) is float and type(result.apples) is int


@pytest.mark.parametrize("words, message", [
    (["--aples=5"], "did you mean --apples"),
    (["--zzz=5"], "unknown setting --zzz"),
    (["--apples=many"], "int"), (["--apples=1.5"], "int"), (["--apples"], "needs a value"),
    (["--apples", "--ripe"], "needs a value"), (["--sugar=nan"], "float"), (["--sugar=inf"], "float"),
    (["--ripe=perhaps"], "bool"), (["-x"], "not understood"), (["a.py", "b.py"], "not understood"),
    (["nowhere.py"], "no config file"),
], ids=str)
def test_command_line_errors(words, message):
    with pytest.raises(ValueError, match=message):
        load(*words)


def in_file(tmp_path, text):
    path = tmp_path / "bowl.py"
    path.write_text(text, encoding="utf-8")
    return load(str(path), "--apples=9")


def test_a_file_sets_and_the_command_line_overrides(tmp_path):
    text = '"""A bowl."""\n# with a comment\napples = 4\nsugar = 2  # an int for a float\nripe = True\n'
    bowl = in_file(tmp_path, text)
    assert bowl == Fruit(apples=9, sugar=2.0, ripe=True)


def test_a_flag_before_the_file_does_not_take_it_for_its_value(tmp_path):
    (tmp_path / "bowl.py").write_text("apples = 4", encoding="utf-8")
    assert load("--ripe", str(tmp_path / "bowl.py")) == Fruit(apples=4, ripe=True)


@pytest.mark.parametrize("text, message", [
    ("aples = 4", "line 1: unknown setting aples; did you mean apples"),
    ("\napples = 'x'", "line 2: apples takes a value of type int"),
    ("apples = True", "type int"), ("ripe = 1", "type bool"), ("sugar = 1e999", "type float"),
    ("import os", "assignments"), ("apples = open('x')", "plain number"), ("a = b = 1", "assignments"),
    ("apples =", "cannot read"), ("sugar = 1" + "0" * 400, "type float"),
    ("apples = [] + {}", "plain number"),
])
def test_file_errors_name_the_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        in_file(tmp_path, text)


def test_a_misspelt_file_suggests_the_nearest(tmp_path):
    (tmp_path / "nano.py").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="did you mean .*nano.py"):
        load(str(tmp_path / "nanoo.py"))


def test_help_lists_names_types_values_and_meaning(capsys):
    with pytest.raises(SystemExit) as exit:
        load("--help", "--apples=7")
    text = capsys.readouterr().out
    assert exit.value.code == 0
    assert "--apples=7  (int)\n        how many apples" in text and "--name='bowl'  (str)" in text


def test_every_setting_of_the_project_has_a_meaning(capsys):
    with pytest.raises(SystemExit):
        settings.read_settings(["--help"], TrainConfig, ModelConfig)
    text = capsys.readouterr().out
    for field in (*fields(TrainConfig), *fields(ModelConfig)):
        assert f"\n  --{field.name}=" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_file_loads_and_tells_its_size(path):
    _, (_, model_config) = settings.read_settings([str(path)], TrainConfig, ModelConfig)
    with torch.device("meta"):
        size = sum(p.numel() for p in LanguageModel(model_config).parameters())
    assert f"{size:,} parameters" in path.read_text(encoding="utf-8").splitlines()[0]
