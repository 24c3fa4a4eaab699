"""The decisive words of test rows and classes, in the results and the report of a run."""

from pathlib import Path

import pytest
from tiny_runs import run_tiny

from finetune.files import read_json, read_jsonl


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_tiny(folder, model=tiny_folder, max_steps=2)
    return folder


def test_mistakes_are_explained_and_highlighted_in_the_report(run: Path) -> None:
    rows = read_jsonl(run / "predictions.jsonl")
    explained = [row for row in rows if "explanation" in row]
    assert any(row["predicted"] != row["label"] for row in explained)
    assert {*explained[0]["explanation"][0]} == {"word", "change"}
    assert "Decisive words by class" in (run / "report.html").read_text()


def test_class_words_occur_in_explained_rows_of_the_class(run: Path) -> None:
    words = read_json(run / "all_results.json")["details"]["class_words"]
    rows = [row for row in read_jsonl(run / "predictions.jsonl") if "explanation" in row]
    for name, of_class in words.items():
        texts = [row["text"].lower() for row in rows if row["predicted"] == name]
        assert 0 < of_class["rows"] <= len(texts)
        for word in of_class["words"]:
            assert word["change"] < 0
            assert 0 < word["rows"] <= sum(word["word"] in text for text in texts)


def test_private_texts_are_not_explained(tiny_folder: Path, tmp_path: Path) -> None:
    run_tiny(tmp_path / "run", model=tiny_folder, max_steps=2, private_data=True)
    assert not any("explanation" in row for row in read_jsonl(tmp_path / "run/predictions.jsonl"))
    assert "Decisive words by class" not in (tmp_path / "run/report.html").read_text()
