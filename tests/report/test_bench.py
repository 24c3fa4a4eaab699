import re
from dataclasses import replace

from bench.example_results import example_results
from report.test_page import Page

from finetune.report.page import render_bench


def test_the_page_says_what_was_measured_and_what_was_published() -> None:
    html = render_bench(example_results())
    page = Page(html)
    assert page.open_elements == []
    for shown in (
        *("BERT-base on questions, by batch size", "(published)", "Briggs: https://"),
        *("10 (9–12)", "gpu is faster than the CPU from batch 8 on", "--contribute"),
        *("A <fast> chip", "out of memory"),
    ):
        assert shown in page.text, shown
    assert "quick" not in page.text
    assert "stopped" not in page.text
    assert set(re.findall(r"""url\((.)""", html)) <= {"#"}
    assert page.addresses == [one for one in page.addresses if one.startswith("#")]


def test_a_page_of_a_bench_that_was_quick_or_stopped_says_so() -> None:
    page = Page(render_bench(replace(example_results(), is_quick=True, is_complete=False)))
    assert "a quick benchmark" in page.text
    assert "rows are missing" in page.text
