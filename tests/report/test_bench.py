import re
from dataclasses import replace
from typing import Any

import pytest
from batch_finder.simulated_machines import did_not_fit, fits
from batch_finder.test_results import RESULT
from bench.example_results import example_results
from report.test_page import Page

from finetune.batch_finder.case import Part
from finetune.batch_finder.results import BatchResult
from finetune.events import Trial
from finetune.report.bench import draw_batches, draw_inference, draw_speedups, render_bench
from finetune.report.chart import ANY


def test_the_page_says_what_was_measured_and_what_was_published() -> None:
    html = render_bench(example_results())
    page = Page(html)
    assert page.open_elements == []
    for shown in (
        *("BERT-base on questions, by batch size", "(measured)", "(published)"),
        *("10 (9–12)", "not measured here", "gpu is faster than the CPU from batch 8 on."),
        *("A <fast> chip", "out of memory"),
    ):
        assert shown in page.text, shown
    assert "quick" not in page.text
    assert "stopped" not in page.text
    assert set(re.findall(r"""url\((.)""", html)) <= {"#"}
    assert page.addresses == [one for one in page.addresses if one.startswith("#")]


def test_a_page_of_a_bench_that_was_quick_or_stopped_says_so() -> None:
    page = Page(render_bench(replace(example_results(), is_quick=True, is_complete=False)))
    assert "A quick bench" in page.text
    assert "rows are missing" in page.text


def test_a_chart_shows_from_where_on_a_device_is_faster() -> None:
    [chart] = draw_inference(example_results())
    cpu, gpu, crossover = chart.series
    assert [one.name for one in (cpu, gpu, crossover)] == [
        *("cpu", "gpu", "gpu is faster from 8 on")
    ]
    assert cpu.points == [(1, 10.0), (8, 80.0), (64, 600.0)]
    assert crossover.points == [(8, ANY)]


def test_speedups_are_dots_of_each_network() -> None:
    training, evaluation = draw_speedups(example_results())
    assert training.title == "Training, times as fast as the CPU"
    dots, cpu = evaluation.series
    assert (dots.name, dots.points, cpu.kind) == ("gpu", [(0, 8.0)], "guide")
    assert "gpu: 8 at VGG16" in evaluation.description


def test_without_another_device_there_are_no_speedups() -> None:
    results = example_results()
    cpu = replace(results, rows=tuple(row for row in results.rows if row.device == "cpu"))
    assert draw_speedups(cpu) == []
    assert len(draw_inference(cpu)) == 1


def trial(batch: int, *, part: Part = "whole") -> Trial:
    peak_bytes = 2**28 + batch * 2**20
    return fits(batch, peak_bytes=peak_bytes, examples_per_second=100.0 + batch, part=part)


TOO_BIG = did_not_fit(128, "too_big")


def result(**changed: Any) -> BatchResult:
    return replace(
        RESULT,
        **{
            "mode": "full", "padded_length": 41, "budget_bytes": 2**30, "recommended": 64,
            "trials": (trial(4), trial(96), TOO_BIG, trial(64)),
        } | changed,
    )  # fmt: skip


def test_each_device_and_mode_has_a_line_of_memory_and_of_speed() -> None:
    head = result(mode="head", recommended=32, trials=(trial(8, part="features"), trial(32)))
    memory, speed = draw_batches([result(), head])
    assert {one.name: one.points for one in memory.series} == {
        "cpu, full, 41 tokens": [(4, 0.25390625), (64, 0.3125), (96, 0.34375)],
        "cpu, head, 41 tokens": [(32, 0.28125)],
        "budget on cpu": [(ANY, 1.0)],
    }
    assert {one.name: one.points for one in speed.series} == {
        "cpu, full, 41 tokens": [(4, 104.0), (64, 164.0), (96, 196.0)],
        "cpu, head, 41 tokens": [(32, 132.0)],
        "cpu, full, 41 tokens: 64 is recommended": [(64, ANY)],
        "cpu, head, 41 tokens: 32 is recommended": [(32, ANY)],
    }


@pytest.mark.parametrize(
    "empty",
    [
        result(trials=()),
        result(trials=(TOO_BIG,), recommended=0, budget_bytes=None),
        result(trials=(fits(4, peak_bytes=None),)),
    ],
    ids=["no trial", "nothing fits", "peak not known"],
)
def test_what_is_not_known_is_left_out(empty: BatchResult) -> None:
    for chart in draw_batches([empty]):
        assert chart.title == "Examples a second"
    memory, _ = draw_batches([empty, result(mode="head")])
    assert memory.series[0].name == "cpu, head, 41 tokens"
