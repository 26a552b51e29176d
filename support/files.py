"""Files that are whole or absent, and the names that are free for them."""

import contextlib
import os
import re
from pathlib import Path


@contextlib.contextmanager
def atomic_write(path):
    """Yield a binary file beside `path`, flushed to disk and renamed when all is written.

    Whatever happens, `path` is the old file or the new one. OSError, naming `path`, if it cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # a full disk is either, from Python or from PyTorch's writer
        raise OSError(f"cannot write {path}: {reason(error)}.") from None
    finally:
        temporary.unlink(missing_ok=True)


def reason(error):
    """Return in a few words why a file cannot be written.

    PyTorch's writer makes a RuntimeError about positions in the file of the system's error; what the system
    said is the context of that.
    """
    for said in (error, error.__context__):
        if isinstance(said, OSError) and said.strerror:
            return said.strerror
    return str(error).splitlines()[0]


def is_running(process):
    """Return whether there is a process of this number."""
    try:
        return os.name == "nt" or os.kill(process, 0) is None  # on Windows, that is no question but a kill
    except OSError as error:
        return isinstance(error, PermissionError)


def leftovers(folder):
    """Yield (path, the name that it was to get) of what killed processes left half-written in a folder.

    It is called NAME.PROCESS.tmp, and there is no such process any more.
    """
    for path in folder.glob("*.tmp"):
        match = re.fullmatch(r"(.+)\.(\d+)\.tmp", path.name)
        if match and not is_running(int(match[2])):
            yield path, match[1]


def free_name(path):
    """Return `path`, or, if there is something of that name, the same with the first free number behind."""
    n = 0
    free = path
    while os.path.lexists(free):
        n += 1
        free = path.with_name(f"{path.name}.{n}")
    return free
