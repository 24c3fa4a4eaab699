"""The data of a run, as its configuration says it."""

from typing import Any

import pytest

from finetune.config.schema import DataConfig
from finetune.errors import UsageError
from finetune.runs.data import data_options


@pytest.mark.parametrize(
    ("source", "options", "flag"),
    [
        ("questions", {"data_dir": "trec"}, "--data-dir"),
        ("questions", {"label": "label-fine"}, "--label"),
        ("questions", {"text_column": "text"}, "--text-column"),
        ("trec", {"encoding": "cp1252"}, "--encoding"),
        ("trec", {"test_file": "test.csv"}, "--test-file"),
        ("trec", {"label_column": "label"}, "--label-column"),
        ("rows.csv", {"data_dir": "trec"}, "--data-dir"),
        ("rows.csv", {"label": "label-fine"}, "--label"),
        ("hub:acme/rows", {"validation_file": "dev.csv"}, "--validation-file"),
        ("hub:acme/rows", {"label": "label-fine"}, "--label"),
    ],
)
def test_an_option_that_the_data_does_not_know_is_refused(
    source: str, options: dict[str, Any], flag: str
) -> None:
    with pytest.raises(UsageError, match=f"{source} takes no {flag}") as raised:
        data_options(DataConfig(data=source, **options))
    assert "leave it out" in raised.value.remedy
