import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from finetune.files import write_json, write_jsonl
from finetune.report.write import write_report
from finetune.runs.folder import RunFolder

RESULTS = {
    "model": "minilm",
    "data": "trec",
    "mode": "full",
    "device": "cpu",
    "precision": "fp32",
    "train_runtime": 83.2,
    "train_samples_per_second": 176.9,
    "trained_parameters": 770,
    "total_parameters": 22_715_526,
    "eval_accuracy": 0.875,
    "test_accuracy": 0.75,
    "test_macro_f1": 0.7333,
    "class_names": ["DESC", "HUM"],
    "test_per_class": {
        "DESC": {"precision": 0.667, "recall": 1.0, "f1": 0.8, "support": 2},
        "HUM": {"precision": 1.0, "recall": 0.5, "f1": 0.667, "support": 2},
    },
    "test_confusion_matrix": [[2, 0], [1, 1]],
}
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


def report_of(folder: RunFolder) -> Page:
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert page.open_elements == []
    return page


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "trec-minilm-full")
    folder.path.mkdir()
    folder.config_file.write_text("model:\n  model: minilm # <b>\n", encoding="utf-8")
    write_json(folder.environment_file, {"python": "3.11.7", "packages": {"torch": "2.13.0"}})
    write_json(folder.results_file, RESULTS)
    write_jsonl(folder.metrics_file, UPDATES + VALIDATIONS)
    rows = [
        ("What is a tsetse fly ?", "DESC", "DESC", 0.9),
        ("What is an atom ?", "DESC", "DESC", 0.9),
        ("Who was Galileo ?", "HUM", "HUM", 0.8),
        (TEXT, "HUM", "DESC", 0.7),
    ]
    names = ("text", "label", "predicted", "probability")
    write_jsonl(folder.predictions_file, [dict(zip(names, row, strict=True)) for row in rows])
    return folder


def test_report_shows_the_figures_curves_mistakes_and_origin_of_a_run(folder: RunFolder) -> None:
    page = report_of(folder)

    for shown in (
        *("trec-minilm-full", "minilm · trec · full"),
        *("75.0 %", "± 21.7 standard error on 4 rows", "73.3 %", "87.5 %"),
        *("1 min 23 s", "176.9 rows a second", "fp32", "770", "of 22,715,526"),
        *("Loss", "training", "accuracy", "macro F1", "update"),
        *("66.7 %", "1 of 4 test rows are predicted wrong"),
        *("model: minilm", "3.11.7", "torch 2.13.0"),
    ):
        assert shown in page.text


def test_what_users_wrote_is_escaped(folder: RunFolder) -> None:
    page = report_of(folder)

    assert TEXT in page.text
    assert "# <b>" in page.text


def test_page_needs_nothing_from_elsewhere(folder: RunFolder) -> None:
    html = write_report(folder).read_text(encoding="utf-8")

    assert all(address.startswith("#") for address in Page(html).addresses)
    assert set(re.findall(r"""url\((.)""", html)) <= {"#"}
    assert "@import" not in html
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r'https?://[^"<\s]*', html)) <= namespaces


def test_same_run_gives_the_same_page(folder: RunFolder) -> None:
    first = write_report(folder).read_bytes()

    assert write_report(folder).read_bytes() == first


def test_at_most_twenty_mistakes_are_shown_the_most_confident_first(folder: RunFolder) -> None:
    rows = [
        {"text": f"text {n}", "label": "HUM", "predicted": "DESC", "probability": n / 100}
        for n in range(50, 90)
    ]
    write_jsonl(folder.predictions_file, rows)

    page = report_of(folder)

    assert re.findall(r"text (\d+)", page.text) == [str(n) for n in range(89, 69, -1)]
    assert "40 of 40 test rows are predicted wrong; these are the 20" in page.text


def test_run_without_mistakes_says_so(folder: RunFolder) -> None:
    row = {"text": "Who ?", "label": "HUM", "predicted": "HUM", "probability": 0.9}
    write_jsonl(folder.predictions_file, [row])

    assert "None of the 1 test rows is predicted wrong" in report_of(folder).text


@pytest.mark.parametrize(
    ("seconds", "shown"), [(9.53, "9.5 s"), (1453, "24 min 13 s"), (8040, "2 h 14 min")]
)
def test_durations_are_told_in_fitting_units(folder: RunFolder, seconds: float, shown: str) -> None:
    write_json(folder.results_file, RESULTS | {"train_runtime": seconds})

    assert shown in report_of(folder).text


def without(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith(prefix)}


def test_run_without_validation_has_a_report(folder: RunFolder) -> None:
    write_json(folder.results_file, without(RESULTS, "eval_"))
    write_jsonl(folder.metrics_file, UPDATES)

    page = report_of(folder)

    assert "alidation" not in page.text
    assert "75.0 %" in page.text


def test_run_without_test_has_a_report(folder: RunFolder) -> None:
    write_json(folder.results_file, without(RESULTS, "test_"))
    folder.predictions_file.unlink()

    page = report_of(folder)

    assert " Test " not in page.text
    assert "87.5 %" in page.text


def test_folder_without_results_has_a_report(tmp_path: Path) -> None:
    page = report_of(RunFolder(tmp_path))

    assert "no results yet" in page.text


def test_class_that_has_no_test_rows_does_not_break_the_matrix(folder: RunFolder) -> None:
    write_json(folder.results_file, RESULTS | {"test_confusion_matrix": [[4, 0], [0, 0]]})

    assert "Confusion matrix" in report_of(folder).text
