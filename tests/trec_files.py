"""TREC's raw files, which are not part of the package, in the folder ``TREC_DIR``."""

import os
from pathlib import Path

import pytest

TREC_DIR = Path(os.environ.get("TREC_DIR", Path(__file__).parents[2] / "shared" / "trec"))
needs_trec = pytest.mark.skipif(
    not (TREC_DIR / "train_5500.label").is_file(),
    reason="needs TREC's train_5500.label in the folder TREC_DIR",
)
