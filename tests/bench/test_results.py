from dataclasses import replace

import pytest
from bench.example_results import a_row, example_results

from finetune.bench.results import crossover_workload, tabulate


def test_published_results_follow_the_results_of_this_machine() -> None:
    tables = tabulate(example_results())
    inference, published, _, others, _ = tables
    assert inference.columns[2:5] == ("rows timed", "cpu, ms per step", "cpu, rows/s")
    assert inference.rows[0][3:] == ("10 (9–12)", "100", "20 (18–24)", "50", "0.5")
    assert published.title == f"{inference.title} (published)"
    cells = ("batch 8", "M1", "8 GB, GPU", "2022", "Briggs", "42.3", "100", "133")
    assert cells in published.rows
    assert any(remark.startswith("Briggs: https://") for remark in published.note.splitlines())
    assert others.rows[0][-3:] == ("0.69", "1", "-")
    [figure, *_] = [
        each for each in example_results().to_json()["published"] if each["group"] == "training"
    ]
    assert (figure["chip"], figure["year"], figure["rows_per_second"]) == ("M1", "2022", 0.69)


@pytest.mark.parametrize(
    ("cpu", "gpu", "missing"),
    [
        ("Apple M1", "Apple M1 GPU, 8.0 GiB unified memory", []),
        ("Apple M9 Pro", "Apple M9 Pro GPU, 48 GiB unified memory", ["M9 Pro"]),
        ("A CPU", "Tesla T4, 14.6 GiB", ["A CPU"]),
    ],
)
def test_chip_without_published_results_is_reported(cpu: str, gpu: str, missing: list[str]) -> None:
    rows = [
        a_row("training", "full, 512 tokens, batch 16", device, 8.0) for device in ("cpu", "gpu")
    ]
    rows += [a_row("training", "full, 512 tokens, batch 1", "cpu", 8.0)]
    results = example_results()
    machine = {"cpu": cpu, "devices": {"cpu": "8 threads", "gpu": gpu}}
    _, published = tabulate(replace(results, machine=machine, rows=rows))
    reported = [remark for remark in published.note.splitlines() if remark.startswith("nobody")]
    assert reported == [
        f"nobody has published these workloads for {chip}: finetune bench --contribute prints rows "
        "to add"
        for chip in missing
    ]


def test_table_shows_the_number_of_rows_timed() -> None:
    row = replace(a_row("apple", "VGG16", "cpu", 4.0, note="slow"), rows=64, timed_rows=1)
    [table] = tabulate(replace(example_results(), rows=(row,)))
    assert table.rows[0][2] == "1"
    assert table.note.splitlines() == ["VGG16, training, cpu: slow"]


def test_crossover_is_the_first_workload_after_which_the_device_stays_faster() -> None:
    seconds = {"1": (1, 0.5), "2": (1, 2), "4": (1, 0.5), "8": (1, 0.5), "16": (1, 0.0)}
    rows = [
        a_row("mlp", name, device, duration)
        for name, pair in seconds.items()
        for device, duration in zip(("cpu", "gpu"), pair, strict=True)
    ]
    assert crossover_workload(rows, "gpu") == "4"
    assert crossover_workload(rows[:4], "gpu") is None
