"""Puts the repository's root on the path, so that tests import the scripts as a reader would run them."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: threads would only wait for each other

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
