"""
Settings: the fields of dataclasses, filled by a file of plain assignments and then by the command line.

    python train.py config/nano.py --lr=1e-3 --max_steps 500 --gate=false --resume

`read_settings` is all that a script needs. A name that no dataclass has is an error that suggests the nearest one, in
the file as on the command line; values are checked against the field's type. `--help` reads the meaning of
each field from the comment behind it, so that it is written once, where the field is.
"""

import ast
import difflib
import inspect
import math
import re
import sys
from dataclasses import fields
from pathlib import Path

WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_settings(arguments, *classes):
    """Make an instance of each dataclass from a command line: [FILE] [--key=value | --key value | --flag] ...

    Returns (path of the config file or None, instances in the order of classes). Prints and exits on --help;
    raises ValueError, a sentence for the user, on anything it does not understand.
    """
    known = {field.name: field for cls in classes for field in fields(cls)}
    file, given, help_wanted = split_command_line(arguments, known)
    values = read_config_file(file, known) if file else {}
    values.update(given)
    if help_wanted:
        print(help_text(classes, values))
        sys.exit(0)
    return file, [cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values}) for cls in classes]


def split_command_line(arguments, known):
    """Split a command line into (config file or None, {name: value}, whether help was asked for)."""
    file, given, help_wanted, rest = None, {}, False, list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            help_wanted = True
        elif word.startswith("--"):
            name, equals, text = word[2:].partition("=")  # at the first "=": values may contain more
            field = find_field(name, known, "--")
            if not equals and field.type is bool and not (rest and rest[0].lower() in WORDS):
                text = "true"  # a bare --flag
            elif not equals:
                if not rest or rest[0].startswith("--"):
                    raise ValueError(f"--{name} needs a value ({field.type.__name__}).")
                text = rest.pop(0)
            given[name] = convert(name, field.type, text)
        elif word.startswith("-") or file is not None:
            raise ValueError(f"{word!r} is not understood: options are --key=value, after one config file.")
        else:
            file = Path(word)
    return file, given, help_wanted


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
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"--{name} takes a value of type {kind.__name__}, not {text!r}.") from None


def check_type(name, kind, value):
    """`value` in the type `kind`: whole floats pass as int, ints as float; nothing else is converted."""
    if kind in (int, float):
        if type(value) in (int, float) and math.isfinite(value) and kind(value) == value:
            return kind(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{name} takes a value of type {kind.__name__}, not {value!r}.")


def read_config_file(path, known):
    """The assignments `name = value` of a config file. Values are literals; nothing in it is executed."""
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
        where = f"{path}, line {node.lineno}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
        if not isinstance(target, ast.Name):
            raise ValueError(f"{where}: a config file holds assignments `name = value` only.")
        name = target.id
        try:
            field = find_field(name, known)
            values[name] = check_type(name, field.type, ast.literal_eval(node.value))
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            plain = "a value is a plain number, string, True or False."
            message = error if type(error) is ValueError and "malformed" not in str(error) else plain
            raise ValueError(f"{where}: {message}") from None
    return values


def help_text(classes, values):
    """The text of --help: each field's name, type, present value, and the comment behind it in the source."""
    lines = [f"usage: python {Path(sys.argv[0]).name} [CONFIG_FILE] [--key=value | --key value | --flag] ..."]
    for cls in classes:
        comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), flags=re.MULTILINE))
        lines += ["", f"{cls.__name__}: {inspect.getdoc(cls).splitlines()[0]}"]
        for field in fields(cls):
            value = values.get(field.name, field.default)
            lines.append(f"  --{field.name}={value!r}  ({field.type.__name__})")
            lines.append(f"        {comments[field.name]}")
    return "\n".join(lines)
