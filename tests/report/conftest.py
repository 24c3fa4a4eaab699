"""Invented results of a run."""

import pytest
from report.example_run import example_results

from finetune.runs.results import RunResults


@pytest.fixture
def results() -> RunResults:
    """A run of two classes, one of whose four test rows is misclassified."""
    return example_results()
