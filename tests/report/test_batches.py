import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from batch_finder.simulated_machines import did_not_fit, fits
from batch_finder.test_results import RESULT

from finetune.batch_finder.case import Part
from finetune.batch_finder.results import BatchResult, PartProbe
from finetune.report.batches import draw_batches


def probe(batch: int, *, part: Part = "whole") -> PartProbe:
    outcome = fits(batch, peak_bytes=2**28 + batch * 2**20, examples_per_second=100.0 + batch)
    return PartProbe(part, outcome)


TOO_BIG = PartProbe("whole", did_not_fit(128, "too_big"))


def result(**changed: Any) -> BatchResult:
    return replace(
        RESULT,
        **{
            "mode": "full", "padded_length": 41, "budget_bytes": 2**30, "recommended": 64,
            "probes": (probe(4), probe(64), probe(96), TOO_BIG),
        } | changed,
    )  # fmt: skip


def texts_of(picture: Path) -> str:
    # Matplotlib draws letters as paths and keeps the text beside them as a comment.
    return picture.read_text(encoding="utf-8")


def test_each_device_and_mode_has_a_line_of_memory_and_of_speed(tmp_path: Path) -> None:
    results = [result(), result(mode="head", probes=(probe(8, part="features"), probe(32)))]
    draw_batches(results, to=tmp_path / "two.svg")
    drawn = texts_of(tmp_path / "two.svg")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    for words in ("cpu, full, 41 tokens", "cpu, head, 41 tokens", "peak memory, GiB", "examples/s"):
        assert words in drawn


@pytest.mark.parametrize(
    "empty",
    [
        result(probes=()),
        result(probes=(TOO_BIG,), recommended=0, budget_bytes=None),
        result(probes=(PartProbe("whole", fits(4, peak_bytes=None)),)),
    ],
    ids=["no probe", "nothing fits", "peak not known"],
)
def test_what_is_not_known_is_left_out(empty: BatchResult, tmp_path: Path) -> None:
    draw_batches([empty], to=tmp_path / "alone.svg")
    draw_batches([empty, result(mode="head")], to=tmp_path / "beside.svg")
    assert "cpu, head" in texts_of(tmp_path / "beside.svg")


def test_the_same_results_make_the_same_picture_but_for_its_ids(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        draw_batches([result()], to=tmp_path / name)
    first, second = ((tmp_path / name).read_text() for name in ("first.svg", "second.svg"))
    assert len(first) == len(second)
    assert "<dc:date>" not in first


def test_the_suffix_of_the_name_says_what_kind_of_picture_it_is(tmp_path: Path) -> None:
    draw_batches([result()], to=tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
