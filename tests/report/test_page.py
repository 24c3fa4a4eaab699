import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from finetune.files import write_json, write_jsonl
from finetune.report.page import write_report
from finetune.report.templates import duration
from finetune.runs.folder import RunFolder
from finetune.runs.results import RunResults

UPDATES = [{"kind": "update", "update": step, "loss": 1 / step} for step in (10, 20)]
VALIDATIONS = [
    {"kind": "validation", "update": 20, "eval_accuracy": 0.9, "eval_macro_f1": 0.8},
    {"kind": "validation", "update": 40, "eval_accuracy": 0.9, "eval_macro_f1": 0.8},
]
TEXT = "Who is <script>alert('x')</script> & Co ?"


class Page(HTMLParser):
    """A page's visible text, addresses, and whether its elements are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.addresses: list[str] = []
        self.open_elements: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [values[name] or "" for name in ("src", "href") if name in values]
        if tag not in ("meta", "link", "img"):
            self.open_elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_elements.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_elements and self.open_elements[-1] not in ("style", "script"):
            self.text += f" {data.strip()}"


def report_of(folder: RunFolder, results: RunResults) -> Page:
    page = Page(write_report(folder, results).read_text(encoding="utf-8"))
    assert page.open_elements == []
    return page


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "trec-minilm-full")
    folder.path.mkdir()
    folder.config_file.write_text("model:\n  model: minilm # <b>\n", encoding="utf-8")
    write_json(folder.environment_file, {"python": "3.11.7", "packages": {"torch": "2.13.0"}})
    write_jsonl(folder.metrics_file, UPDATES + VALIDATIONS)
    write_predictions(
        folder,
        ("What is a tsetse fly ?", "DESC", "DESC", 0.9),
        ("What is an atom ?", "DESC", "DESC", 0.9),
        ("Who was Galileo ?", "HUM", "HUM", 0.8),
        (TEXT, "HUM", "DESC", 0.7),
    )
    return folder


def write_predictions(folder: RunFolder, *rows: tuple[str, str, str, float]) -> None:
    names = ("text", "label", "predicted", "probability")
    write_jsonl(folder.predictions_file, [dict(zip(names, row, strict=True)) for row in rows])


def with_test(results: RunResults, **changes: Any) -> RunResults:
    return replace(results, test=replace(results.test, **changes))


def test_report_shows_metrics_curves_mistakes_configuration_and_environment(
    folder: RunFolder, results: RunResults
) -> None:
    page = report_of(folder, results)

    for shown in (
        *("trec-minilm-full", "bert-base-uncased · trec · head"),
        *("75.0 %", "± 21.7 standard error on 4 rows; largest class 50.0 %", "73.3 %", "87.5 %"),
        *("1 min 23 s", "176.9 examples/s", "a slow CPU, fp32", "770", "of 109,483,778"),
        *("Loss", "training", "accuracy", "macro F1", "update"),
        *("66.7 %", "1 of 4 test rows are misclassified"),
        *("model: minilm", "3.11.7", "torch 2.13.0"),
    ):
        assert shown in page.text
    assert "not better" not in page.text


@pytest.mark.parametrize("accuracy", [0.5, 0.4])
def test_a_model_that_does_not_beat_the_baseline_is_marked(
    folder: RunFolder, results: RunResults, accuracy: float
) -> None:
    page = report_of(folder, with_test(results, accuracy=accuracy))

    assert "not better than always answering with the largest class" in page.text


def test_what_users_wrote_is_escaped(folder: RunFolder, results: RunResults) -> None:
    page = report_of(folder, results)

    assert TEXT in page.text
    assert "# <b>" in page.text
    assert "<i>" in page.text


def test_page_needs_nothing_from_elsewhere(folder: RunFolder, results: RunResults) -> None:
    html = write_report(folder, results).read_text(encoding="utf-8")

    assert all(address.startswith("#") for address in Page(html).addresses)
    assert set(re.findall(r"""url\((.)""", html)) <= {"#"}
    assert "@import" not in html
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r'https?://[^"<\s]*', html)) <= namespaces


def test_same_run_gives_the_same_page(folder: RunFolder, results: RunResults) -> None:
    first = write_report(folder, results).read_bytes()

    assert write_report(folder, results).read_bytes() == first


def test_at_most_twenty_mistakes_are_shown_the_most_confident_first(
    folder: RunFolder, results: RunResults
) -> None:
    write_predictions(folder, *((f"text {n}", "HUM", "DESC", n / 100) for n in range(50, 90)))

    page = report_of(folder, results)

    assert re.findall(r"text (\d+)", page.text) == [str(n) for n in range(89, 69, -1)]
    assert "40 of 40 test rows are misclassified; these are the 20" in page.text


def test_run_without_mistakes_says_so(folder: RunFolder, results: RunResults) -> None:
    write_predictions(folder, ("Who ?", "HUM", "HUM", 0.9))

    assert "None of the 1 test rows is misclassified" in report_of(folder, results).text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(9.53, "9.5 s"), (60, "1 min 0 s"), (1453, "24 min 13 s"), (8040, "2 h 14 min")],
)
def test_durations_have_the_units_that_matter(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_run_without_validation_has_a_report(folder: RunFolder, results: RunResults) -> None:
    write_jsonl(folder.metrics_file, UPDATES)

    page = report_of(folder, replace(results, validation=None))

    assert "alidation" not in page.text
    assert "75.0 %" in page.text


def test_class_that_has_no_test_rows_does_not_break_the_matrix(
    folder: RunFolder, results: RunResults
) -> None:
    page = report_of(folder, with_test(results, confusion_matrix=[[4, 0], [0, 0]]))

    assert "Confusion matrix" in page.text
