import re
from dataclasses import replace

from bench.example_results import example_results
from report.test_page import Page

from finetune.report.bench import draw_inference, render_bench
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
