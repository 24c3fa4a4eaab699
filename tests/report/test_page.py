import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bench.example_results import example_results as example_bench
from report.example_run import (
    CALIBRATION,
    DETAILS,
    OTHER,
    TEXT,
    UPDATES,
    write_example_run,
    write_predictions,
)

from finetune.files import write_json, write_jsonl
from finetune.report.page import render_bench, write_report
from finetune.runs.folder import RunFolder
from finetune.runs.results import RunResults


class Page(HTMLParser):
    """The visible text and the URLs of a page. Elements must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.urls: list[str] = []
        self.open_elements: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.urls += [values[name] or "" for name in ("src", "href") if name in values]
        if tag not in ("meta", "link", "img"):
            self.open_elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_elements.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_elements and self.open_elements[-1] not in ("style", "script"):
            self.text += f" {data.strip()}"


def parse_report(folder: RunFolder, results: RunResults) -> Page:
    page = Page(write_report(folder, results).read_text(encoding="utf-8"))
    assert page.open_elements == []
    return page


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "trec-minilm-full")
    write_example_run(folder)
    return folder


def test_report_shows_metrics_curves_mistakes_configuration_and_environment(
    folder: RunFolder, results: RunResults
) -> None:
    page = parse_report(folder, results)

    for shown in (
        *("trec-minilm-full", "bert-base-uncased · trec · head"),
        "Accuracy 75% on 4 test rows (95% CI 30–95%), which may be no better than the",
        *("75.0%", "73.3%", "87.5%"),
        *("1 min 23 s", "177 examples/s", "a slow CPU, fp32", "770", "of 109,483,778"),
        *("Loss", "training", "accuracy", "macro F1", "epoch"),
        *("kept (epoch 1)", "early stop (epoch 2)"),
        *("66.7%", "1 of 4 test rows are misclassified"),
        *("3.11.7", "torch: 2.13.0", "finetune run trec-minilm-full", "1,162"),
        *("finetune predict trec-minilm-full FILE", "predict('trec-minilm-full'", ".label)"),
        *(TEXT, "<b>.csv", "<i>"),
    ):
        assert shown in page.text, shown
    for row in (
        *("model.model minilm --model", "data.split_seed 0 default"),
        "training.learning_rate 0.0001 chosen automatically",
    ):
        assert row in " ".join(page.text.split())


def test_local_paths_are_hidden(folder: RunFolder, results: RunResults) -> None:
    secret = "/home/ada l/secret"
    paths = {name: f"{secret}/{name}.csv" for name in ("data", "test_file", "label_names")}
    config = {
        "data": paths | {"data_dir": f"{secret}/trec"},
        "model": {"model": f"{secret}/encoder"},
        "output": {"output_dir": f"{secret}/runs/one"},
        "cache": {"cache_dir": f"{secret}/cache"},
    }
    write_json(folder.config_file, config)
    write_json(folder.environment_file, {"origins": {"data": f"{secret}/my.yaml"}})
    warning = {
        "message": f"the encoding of {secret}/data.csv is a guess",
        "remedy": "see ~/a/b.txt",
    }
    write_jsonl(folder.warnings_file, [warning])
    facts = replace(results.facts, data=paths["data"], model=f"{secret}/encoder")

    page = parse_report(folder, replace(results, facts=facts))

    for shown in ("encoder · data.csv", "my.yaml", "encoding of data.csv is", "See b.txt", "trec"):
        assert shown in page.text, shown
    assert "secret" not in page.text.lower()


def test_page_is_self_contained(folder: RunFolder, results: RunResults) -> None:
    html = write_report(folder, results).read_text(encoding="utf-8")

    assert all(url.startswith("#") for url in Page(html).urls)
    assert set(re.findall(r"""url\((.)""", html)) <= {"#"}
    assert "@import" not in html
    ids = re.findall(r' id="([^"]*)"', html)
    assert len(ids) == len(set(ids))
    assert {url.removeprefix("#") for url in Page(html).urls} <= set(ids)
    namespaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r'https?://[^"<\s]*', html)) <= namespaces


def test_page_lists_the_most_confident_mistakes_and_more_per_cell(
    folder: RunFolder, results: RunResults
) -> None:
    write_predictions(
        folder,
        *((f"text {n}", OTHER, "DESC", n / 100) for n in range(50, 90)),
        *((f"rare {n}", "DESC", OTHER, n / 1000) for n in range(1, 4)),
    )

    html = write_report(folder, results).read_text(encoding="utf-8")

    rows = re.findall(r'<tr class="([^"]*)"><td class="text">(\w+ \d+)', html)
    at_first = [text for groups, text in rows if "more" not in groups.split()]
    assert at_first == [f"text {n}" for n in range(89, 69, -1)]
    alone = [text for groups, text in rows if "cell-0-1" in groups.split()]
    assert alone == ["rare 3", "rare 2", "rare 1"]
    assert "43 of 43 test rows are misclassified; these are the 20" in html
    assert "#cell-0-1:target ~ .wide tbody tr:not(.cell-0-1)" in html
    assert {"#cell-1-0", "#class-0", "#class-1"} <= set(Page(html).urls)


def test_details_warnings_and_calibration_are_shown(folder: RunFolder, results: RunResults) -> None:
    write_jsonl(folder.warnings_file, [{"message": "2 texts are cut", "remedy": "raise it"}] * 2)
    details = replace(DETAILS, names="class names are training rows")
    text = parse_report(folder, replace(results, details=details, calibration=CALIBRATION)).text

    assert text.count("2 texts are cut.") == 1
    for shown in (
        "Few-shot training Class names are training rows",
        "divided by a temperature of 1.7",
        "after scaling 10.00%",
        "before scaling 40.00%",
    ):
        assert shown in " ".join(text.split()), shown


def test_run_without_validation_has_a_report(folder: RunFolder, results: RunResults) -> None:
    write_jsonl(folder.metrics_file, UPDATES)
    # The run also has no mistakes and no rows per class.
    write_predictions(folder, ("Who ?", OTHER, OTHER, 0.9))
    test = replace(results.test, confusion_matrix=[[4, 0], [0, 0]])
    page = parse_report(folder, replace(results, validation=None, test=test))

    assert "alidation" not in page.text.partition("Use the model")[0]
    assert "75.0%" in page.text
    assert "0 of 1 test rows are misclassified." in page.text


def test_bench_page_shows_measured_and_published_results() -> None:
    html = render_bench(example_bench())
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
    assert page.urls == [url for url in page.urls if url.startswith("#")]


def test_bench_page_mentions_quick_and_incomplete_runs() -> None:
    page = Page(render_bench(replace(example_bench(), is_quick=True, is_complete=False)))
    assert "a quick benchmark" in page.text
    assert "rows are missing" in page.text
