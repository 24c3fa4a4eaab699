import json
from pathlib import Path
from typing import Any

import pytest
from bench.example_results import example_results

from finetune.bench.results import read_results
from finetune.errors import UsageError
from finetune.files import write_json


def test_results_are_read_back_as_they_were(tmp_path: Path) -> None:
    results = example_results()
    write_json(tmp_path / "bench.json", results.to_json())
    assert read_results(tmp_path / "bench.json") == results
    first = json.loads((tmp_path / "bench.json").read_text())["rows"][0]
    assert first["rows_per_second"] == pytest.approx(100)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in example_results().to_json().items() if key != name}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "Invalid JSON"),
        (json.dumps({**without(""), "schema_version": 2}), "schema_version"),
        (json.dumps(without("machine")), "machine"),
        (json.dumps({**without(""), "rows": [{"device": 1}]}), "rows.0"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_with_its_name(
    content: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(UsageError) as caught:
        read_results(file)
    assert str(file) in caught.value.message
    assert words in caught.value.message


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_results(tmp_path / "none.json")
