"""Puts the repository's root on the path, so that tests import the scripts as a reader would run them."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for each other

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# Signals that are ignored stay ignored, here and in all that the tests start; and whoever runs the tests in
# the background, or under nohup, hands them down ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("SIGTERM", "SIGHUP"):
    if hasattr(signal, name):
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def pytest_collection_finish(session):
    """Let the README's commands run beside the other tests: two cores, half the time."""
    for item in session.items:
        if item.name == "test_every_command_runs":
            item.module.start()
