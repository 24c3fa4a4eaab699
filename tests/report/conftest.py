"""Invented results of a run."""

import pytest
from report.example_run import example_results

from finetune.runs.results import RunResults


@pytest.fixture
def results() -> RunResults:
    """Results with two classes and four test rows, one of them misclassified."""
    return example_results()
