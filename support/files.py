"""Files that are whole or absent."""

import contextlib
import os
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
        raise OSError(f"cannot write {path}: {error}".splitlines()[0]) from None
    finally:
        temporary.unlink(missing_ok=True)
