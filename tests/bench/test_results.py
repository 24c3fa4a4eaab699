from dataclasses import replace

import pytest
from bench.example_results import a_row, example_results

from finetune.bench.results import crossover_workload, tabulate


def test_the_json_has_the_rows_a_second_of_each_row() -> None:
    first = example_results().to_json()["rows"][0]
    assert first["rows_per_second"] == pytest.approx(100)


def test_each_group_has_a_table_and_what_was_published_is_apart_with_its_source() -> None:
    tables = tabulate(example_results())
    assert [(table.group, bool(table.source)) for table in tables] == [
        *(("inference", False), ("inference", True), ("training", False), ("training", True)),
        ("apple", False),
    ]
    inference = tables[0]
    assert inference.columns[2:5] == ("rows timed", "cpu, ms a step", "cpu, rows/s")
    assert inference.rows[0][3:] == ("10 (9–12)", "100", "20 (18–24)", "50", "0.5")
    assert tables[3].rows[0] == ["full", "CPU", "32", "0.69", "24 min 13 s"]


def test_the_rows_of_a_table_are_those_that_were_timed() -> None:
    row = replace(a_row("apple", "VGG16", "cpu", 4.0, note="slow"), rows=64, timed_rows=1)
    [table] = tabulate(replace(example_results(), rows=(row,)))
    assert table.rows[0][2] == "1"
    assert table.remarks == ("VGG16, training, cpu: slow; published are 64 rows",)


def test_a_device_is_faster_from_where_no_larger_workload_is_slower() -> None:
    seconds = {"1": (1, 0.5), "2": (1, 2), "4": (1, 0.5), "8": (1, 0.5), "16": (1, 0.0)}
    rows = [
        a_row("mlp", name, device, one)
        for name, pair in seconds.items()
        for device, one in zip(("cpu", "gpu"), pair, strict=True)
    ]
    assert crossover_workload(rows, "gpu") == "4"
    assert crossover_workload(rows[:4], "gpu") is None
