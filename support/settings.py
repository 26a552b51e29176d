"""
Settings: the fields of dataclasses, filled by a file of plain assignments and then by the command line.

    python train.py config/nano.py --lr=1e-3 --max_steps 500 --gate=false --resume

`read_settings` is all that train.py needs. A name that no dataclass has is an error that suggests the nearest
one, in the file as on the command line; values are checked against the field's type. `--help` reads the
meaning of each field from the comment behind it, so that it is written once, where the field is. `outlines`
are the dataclasses of a file that takes seconds to import. The scripts with a few options of their own use
`CommandLine`.
"""

import argparse
import ast
import difflib
import inspect
import os
import re
import sys
from dataclasses import fields, make_dataclass
from pathlib import Path

from support import need

TYPES = {"bool": bool, "int": int, "float": float, "str": str}
WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class CommandLine(argparse.ArgumentParser):
    """argparse without abbreviations; a mistake is a ValueError, of which `run_main` makes a sentence."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        # argparse takes what begins with "-" for an option, never for a value
        option = re.search(r"(--\w+): expected .*argument", message)
        if option:
            message += f'; one that begins with "-" is written {option[1]}="-x"'
        elif "are required: " in message and any(word[:1] == "-" for word in sys.argv[1:]):
            message += '; one that begins with "-" goes behind "--", as in -- "-x"'
        raise ValueError(message)


def read_settings(arguments, *classes):
    """Make an instance of each dataclass from a command line: [FILE] [--key=value | --key value | --flag] ...

    Return (path of the config file or None, instances in the order of classes). Print and exit on --help;
    raise ValueError, a sentence for the user, on anything that is not understood.
    """
    known = {field.name: field for cls in classes for field in fields(cls)}
    file, given, help_wanted = split_command_line(arguments, known)
    values = read_config_file(file, known) if file else {}
    values.update(given)
    if help_wanted:
        print(help_text(classes, values))
        sys.exit(0)
    return file, [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in classes]


def answer_early(*names):
    """Answer --help and refuse what is misspelt, before the files that have the settings can be imported.

    Not under torchrun: one of the processes is to answer, and they do not know each other yet.
    """
    if "RANK" not in os.environ:
        read_settings(sys.argv[1:], *outlines(*names))


def outlines(*names):
    """Return the dataclasses in the repository's files of these names: their fields; nothing is imported."""
    found = []
    texts = [(Path(__file__).parent.parent / name).read_text(encoding="utf-8") for name in names]
    for text, node in [(text, node) for text in texts for node in ast.parse(text).body]:
        if isinstance(node, ast.ClassDef) and "dataclass" in [ast.unparse(d) for d in node.decorator_list]:
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            values = [(line.target.id, TYPES[line.annotation.id], ast.literal_eval(line.value))
                      for line in lines]
            facts = {"__doc__": ast.get_docstring(node), "source": ast.get_source_segment(text, node)}
            found.append(make_dataclass(node.name, values, namespace=facts))
    return found


def split_command_line(arguments, known):
    """Split a command line into (config file or None, {name: value}, whether help was asked for).

    argparse would not do: in `--resume config/tiny.py` it takes the file for the value of the flag, and in
    `--phi -1e-3` the number for an option.
    """
    file = None
    given = {}
    help_wanted = False
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            help_wanted = True
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")  # at the first "=": values may contain more
            field = find_field(name, known, "--")
            given[name] = convert(name, field.type, text if equals else next_value(field, rest))
        else:
            need(not word.startswith("-") and file is None,
                 f"{word!r} is not understood: options are --key=value, after one config file.")
            file = Path(word)
    return file, given, help_wanted


def next_value(field, rest):
    """Take the value of a `--name` without "=" from the words that follow it. A flag may do without."""
    if field.type is bool and not (rest and rest[0].lower() in WORDS):
        return "true"
    need(rest and not rest[0].startswith("--"), f"--{field.name} needs a value ({field.type.__name__}).")
    return rest.pop(0)


def find_field(name, known, prefix=""):
    """The field called `name`, or a ValueError with the nearest name."""
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {prefix}{close[0]}?" if close else "--help lists all names."
    raise ValueError(f"unknown setting {prefix}{name}; {hint}")


def convert(name, kind, text):
    """The value of a command-line word, in the field's type."""
    try:
        if kind is bool:
            return WORDS[text.lower()]
        if kind is int:
            return check_type(name, int, int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text))
        return check_type(name, kind, kind(text))
    except (KeyError, ValueError):
        raise ValueError(f"--{name} takes a value of type {kind.__name__}, not {text!r}.") from None


def check_type(name, kind, value):
    """`value` in the type `kind`: whole floats pass as int, ints as float; nothing else is converted."""
    if kind in (int, float):
        # Not math.isfinite, which stumbles over integers beyond every float.
        if type(value) in (int, float) and abs(value) <= sys.float_info.max and kind(value) == value:
            return kind(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{name} takes a value of type {kind.__name__}, not {value!r}.")


def read_config_file(path, known):
    """Read the assignments `name = value` of a config file. Values are literals; nothing is executed."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        close = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {path.with_name(close[0])}?" if close else "."
        raise ValueError(f"there is no config file {path}{hint}") from None
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot read the config file {path}: {error}") from None
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        try:
            name, value = read_assignment(node, known)
        except ValueError as error:
            raise ValueError(f"{path}, line {node.lineno}: {error}") from None
        values[name] = value
    return values


def read_assignment(node, known):
    """A syntax tree of `name = value` -> (name, value), the value in the type of its field."""
    target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
    need(isinstance(target, ast.Name), "a config file holds assignments `name = value` only.")
    field = find_field(target.id, known)
    try:
        value = ast.literal_eval(node.value)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError("a value is a plain number, string, True or False.") from None
    return field.name, check_type(field.name, field.type, value)


def help_text(classes, values):
    """The text of --help: each field's name, type, present value, and the comment behind it in the source."""
    lines = [f"usage: python {Path(sys.argv[0]).name} [CONFIG_FILE] [--key=value | --key value | --flag] ..."]
    for cls in classes:
        source = getattr(cls, "source", None) or inspect.getsource(cls)  # an outline has it with it
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, flags=re.MULTILINE))
        lines += ["", f"{cls.__name__}: {inspect.getdoc(cls).splitlines()[0]}"]
        for field in fields(cls):
            value = values.get(field.name, field.default)
            lines.append(f"  --{field.name}={value!r}  ({field.type.__name__})")
            lines.append(f"        {comments[field.name]}")
    return "\n".join(lines)
