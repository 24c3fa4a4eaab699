import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from bench.example_results import example_results
from report.test_page import Page

from finetune.report.bench import PICTURES, render_bench, standalone


def test_the_page_says_what_was_measured_and_what_was_published() -> None:
    html = render_bench(example_results())
    page = Page(html)
    assert page.open_elements == []
    for shown in (
        *("BERT-base on questions, by batch size", "(measured)", "(published)"),
        *("10 (9–12)", "not measured here", "gpu is faster than the CPU from batch 8 on."),
        *("A <fast> chip", "full 4 at 512 tokens", "out of memory"),
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("inference", {"gpu is faster from 8 on", "cpu", "milliseconds a batch"}),
        ("apple", {"8.0", "VGG16", "Training", "Evaluation"}),
    ],
)
def test_pictures_are_of_the_page_or_stand_alone(name: str, words: set[str]) -> None:
    picture = PICTURES[name](example_results())
    texts = {(one.text or "").strip() for one in ElementTree.fromstring(picture).iter()}
    assert words <= texts
    assert "var(--first)" in picture
    assert "var(" not in standalone(picture)


def test_without_another_device_there_are_no_speedups_and_without_rows_no_pictures() -> None:
    results = example_results()
    cpu = replace(results, rows=tuple(row for row in results.rows if row.device == "cpu"))
    assert PICTURES["apple"](cpu) == ""
    assert "faster from" not in PICTURES["inference"](cpu)
    assert PICTURES["inference"](replace(results, rows=())) == ""
