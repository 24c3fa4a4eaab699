from dataclasses import replace
from typing import Any

import pytest
from batch_finder.simulated_machines import did_not_fit, fits
from batch_finder.test_results import RESULT

from finetune.batch_finder.case import Part
from finetune.batch_finder.results import BatchResult
from finetune.events import Trial
from finetune.report.batches import draw_batches
from finetune.report.chart import ANY


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
