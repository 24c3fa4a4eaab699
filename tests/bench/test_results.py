import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.example_results import a_row, example_results

from finetune.bench.results import compare, first_faster, read_results, tabulate
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


def test_each_group_has_a_table_and_what_was_published_is_apart_with_its_source() -> None:
    tables = tabulate(example_results())
    assert [(table.group, bool(table.source)) for table in tables] == [
        *(("inference", False), ("inference", True), ("training", False), ("training", True)),
        ("apple", False),
    ]
    inference = tables[0]
    assert inference.columns[:5] == ("workload", "phase", "rows", "cpu, ms a step", "cpu, rows/s")
    assert inference.rows[0][3:] == ("10 (9–12)", "100", "20 (18–24)", "50", "0.5")
    assert tables[3].rows[0] == ["full", "CPU", "32", "0.69", "24 min 13 s"]


def test_remarks_say_where_a_device_is_faster_and_what_failed() -> None:
    inference, _, training, *_ = tabulate(example_results())
    assert inference.remarks == ("gpu is faster than the CPU from batch 8 on",)
    assert training.remarks[0] == "full, 512 tokens, batch 32, training, gpu: out of memory"
    article = training.rows[0]
    assert article[5:] == ("-", "-", "16.67", "-", "-")


def test_a_device_is_faster_from_where_no_larger_workload_is_slower() -> None:
    seconds = {"1": (1, 0.5), "2": (1, 2), "4": (1, 0.5), "8": (1, 0.5), "16": (1, 0.0)}
    rows = [
        a_row("mlp", name, device, one)
        for name, pair in seconds.items()
        for device, one in zip(("cpu", "gpu"), pair, strict=True)
    ]
    assert first_faster(rows, "gpu") == "4"
    assert first_faster(rows[:4], "gpu") is None


def test_nothing_is_said_of_a_device_that_was_never_timed() -> None:
    rows = [a_row("mlp", "small", "cpu", 1.0), a_row("mlp", "small", "gpu", 0.0, note="lost")]
    [table] = tabulate(replace(example_results(), rows=tuple(rows)))
    assert table.remarks == ("small, training, gpu: lost",)


def test_two_machines_stand_side_by_side() -> None:
    table = compare(example_results(), example_results(gpu="other", factor=0.5))
    assert table.columns[2:] == ("A, cpu", "A, gpu", "B, cpu", "B, other", "B ÷ A")
    assert len(table.remarks) == 1
    assert table.rows[0] == ["inference: batch 1", "evaluation", "100", "50", "200", "100", "2"]
    assert table.rows[3] == ["training: full, 512 tokens, batch 32", "training",
                             "1", "-", "1", "-", "1"]  # fmt: skip


def test_two_machines_of_which_one_was_quick_are_compared_with_a_remark() -> None:
    quick = replace(example_results(gpu="other"), is_quick=True)
    assert "B is of a quick bench" in compare(example_results(), quick).remarks[1]


def test_two_runs_on_one_machine_say_how_many_timings_are_close() -> None:
    one = replace(
        example_results(), rows=(a_row("mlp", "a", "cpu", 1.0), a_row("mlp", "b", "cpu", 1.0))
    )
    for factor, close in ((1.05, 2), (1.25, 1)):
        again = replace(one, rows=(a_row("mlp", "a", "cpu", factor), one.rows[1]))
        remark = compare(one, again).remarks[1]
        assert remark == f"on one machine, {close} of 2 are within 10% of each other"
