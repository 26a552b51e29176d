"""
Is my answer right?

    python exercises/check.py 5 my_05.py

loads the file, puts it through the checks of exercise 5 and says "right", or what is wrong. README.md beside
this file has the exercises. A check is the function `check_NN(my)` below, where `my` is the learner's file as a
module; it raises Wrong with a sentence that says what was expected and what came instead.
"""

import importlib.util
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Wrong(Exception):
    """What is not right yet, as a sentence for the learner."""


def need(my, name):
    """The learner's function or class of this name."""
    if not hasattr(my, name):
        raise Wrong(f"the file has no {name}; the exercise asks for one.")
    return getattr(my, name)


# ----------------------------------------------------------------------------------------------------------
# The checks


# ----------------------------------------------------------------------------------------------------------


def load(path):
    """The file as a module. Its own errors are shown as Python shows them, from the learner's line on."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(arguments):
    checks = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
    if len(arguments) != 2 or arguments[0].zfill(2) not in checks:
        sys.exit("error: say the number of an exercise, 1 to 12, and the file with your answer: "
                 "python exercises/check.py 5 my_05.py")
    number, path = arguments[0].zfill(2), Path(arguments[1])
    if not path.is_file():
        sys.exit(f"error: there is no file {path}.")
    try:
        checks[number](load(path))
    except Wrong as wrong:
        sys.exit(f"not yet: {wrong}")
    except Exception:
        traceback.print_exc()  # an error in the learner's code: the traceback is what helps
        sys.exit("not yet: your code stopped with the error above.")
    print(f"Exercise {int(number)}: right.")


if __name__ == "__main__":
    main(sys.argv[1:])
