"""``finetune predict``, as a function and as a command."""

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from tiny_runs import TEXTS, Command, Outcome

import finetune
from finetune.commands.predict import load
from finetune.data.stream import Row
from finetune.errors import DataError, NotARun, UsageError
from finetune.events import Event, Info, WarningMessage, ignore
from finetune.files import read_json, read_jsonl, write_json


def test_predict_labels_the_test_split_as_the_run_did(finished_run: Path) -> None:
    lines = (finished_run / "predictions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    predictions = finetune.predict(finished_run, [row["text"] for row in rows], device="cpu")
    assert [prediction.text for prediction in predictions] == [row["text"] for row in rows]
    assert [prediction.label for prediction in predictions] == [row["predicted"] for row in rows]
    for prediction, row in zip(predictions, rows, strict=True):
        assert prediction.probability == pytest.approx(row["probability"], abs=1e-6)


@pytest.mark.parametrize(
    "texts",
    ["Who wrote Faust?", b"Who?", None, {"Who?": 1}, [None], [7.0]],
    ids=lambda texts: type(texts).__name__,
)
def test_what_is_not_a_list_of_texts_is_refused_and_not_taken_apart(
    texts: Any, finished_run: Path
) -> None:
    with pytest.raises(UsageError, match="text"):
        finetune.predict(finished_run, texts, device="cpu")


def test_a_text_with_half_a_surrogate_pair_is_refused(finished_run: Path) -> None:
    with pytest.raises(DataError, match="UTF-8: surrogates not allowed"):
        finetune.predict(finished_run, ["a\ud800"], device="cpu")


def test_a_run_keeps_its_model_when_its_data_has_gone(finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "model", tmp_path / "model")
    shutil.copy(finished_run / "config.yaml", tmp_path)
    assert len(finetune.predict(tmp_path, TEXTS, device="cpu")) == 3


def test_less_sure_predictions_are_left_out_and_counted(finished_run: Path) -> None:
    emitted: list[Event] = []
    texts = [row["text"] for row in read_jsonl(finished_run / "predictions.jsonl")[:40]]
    whole = finetune.predict(finished_run, texts, device="cpu", all_scores=True)
    limit = sorted(prediction.probability for prediction in whole)[25]

    found = finetune.predict(
        finished_run, texts, device="cpu", all_scores=True, min_confidence=limit,
        emit=emitted.append,
    )  # fmt: skip

    for prediction, before in zip(found, whole, strict=True):
        assert prediction.label == (before.label if before.probability >= limit else None)
        assert (prediction.probability, prediction.probabilities) == (
            before.probability, before.probabilities,
        )  # fmt: skip
    assert emitted[-1] == Info("25 of 40 texts have no prediction")


@pytest.fixture
def run_with_confidences(finished_run: Path, tmp_path: Path) -> Path:
    """A run whose validation rows let every prediction through of one class, none of another."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    content = read_json(run / "model/confidences.json")
    names = list(content["classes"])
    assert sum(len(one["is_right"]) for one in content["classes"].values()) == 81
    for name in names:
        content["classes"][name] = {"probabilities": [0.0] * 100, "is_right": [True] * 100}
    content["classes"][names[1]] = {"probabilities": [0.9] * 18, "is_right": [True] * 18}
    write_json(run / "model/confidences.json", content)
    return run


def test_classes_without_the_precision_are_never_predicted(run_with_confidences: Path) -> None:
    emitted: list[Event] = []
    run = run_with_confidences
    texts = [row["text"] for row in read_jsonl(run / "predictions.jsonl")]
    whole = finetune.predict(run, texts, device="cpu")
    missed = list(read_json(run / "model/confidences.json")["classes"])[1]

    found = finetune.predict(run, texts, device="cpu", target_precision=0.95, emit=emitted.append)

    labels = [None if prediction.label == missed else prediction.label for prediction in whole]
    assert [prediction.label for prediction in found] == labels
    assert any(
        f"always abstains: {missed} (18 rows)" in event.message
        for event in emitted
        if isinstance(event, WarningMessage)
    )
    easier = finetune.predict(run, texts[:9], device="cpu", target_precision=0.9)
    assert all(one.label is None for one in easier if one.probability < 0.9 and one.label == missed)


@pytest.mark.parametrize(
    ("content", "error", "expected"),
    [
        (None, UsageError, "no confidences of validation"),
        ('{"classes": {}}', NotARun, "can't be read"),
    ],
)
def test_a_target_needs_the_confidences_of_the_run(
    content: str | None, error: type[Exception], expected: str, run_with_confidences: Path
) -> None:
    file = run_with_confidences / "model/confidences.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert finetune.predict(run_with_confidences, TEXTS, device="cpu", min_confidence=0)
    with pytest.raises(error, match=expected):
        finetune.predict(run_with_confidences, TEXTS, device="cpu", target_precision=0.9)


TypeIn = Callable[[bytes], None]


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> TypeIn:
    """Return a function that puts bytes on standard input."""

    def put(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return put


def predicted_texts(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.errors
    return [json.loads(line)["text"] for line in outcome.output.rstrip("\n").split("\n")]


def test_the_predictions_are_those_of_the_python_api_in_the_order_of_the_texts(
    command: Command, finished_run: Path
) -> None:
    outcome = command("predict", finished_run, *TEXTS, "--device=cpu", "--json")
    assert outcome.code == 0, outcome.errors
    predictions = [json.loads(line) for line in outcome.output.splitlines()]
    assert predictions == [
        one.to_json() for one in finetune.predict(finished_run, TEXTS, device="cpu")
    ]
    assert [prediction["text"] for prediction in predictions] == TEXTS
    assert all(prediction.keys() == {"text", "label", "probability"} for prediction in predictions)


def test_a_terminal_that_is_waited_for_is_said_to_be(
    command: Command, finished_run: Path, type_in: TypeIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(b"Who is it?\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    outcome = command("predict", finished_run)
    assert outcome.code == 0, outcome.errors
    assert "Ctrl-D" in outcome.errors
    assert "Ctrl-D" not in command("predict", finished_run, "Who is it?").errors


def test_a_table_is_shown_with_each_text_as_it_is(command: Command, finished_run: Path) -> None:
    texts = ["[bold]x[/]", "[red]", ":smile:", "Ä 漢字 ☃", "a | b"]
    outcome = command("predict", finished_run, *texts)
    assert outcome.code == 0, outcome.errors
    header, *lines = outcome.output.splitlines()
    assert header.split() == ["label", "probability", "text"]
    for text, line in zip(texts, lines, strict=True):
        assert line.rstrip().endswith(text)
        assert line.split()[0] in {"ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"}
    assert "\x1b" not in outcome.output


def test_texts_come_from_arguments_a_file_or_standard_input_alike(
    command: Command, finished_run: Path, tmp_path: Path, type_in: TypeIn
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(TEXTS), encoding="utf-8")
    arguments = ("predict", finished_run, "--json", "--device=cpu")
    from_arguments = command(*arguments, *TEXTS)
    assert predicted_texts(from_arguments) == TEXTS
    assert command(*arguments, "--data", file).output == from_arguments.output
    assert command(*arguments, file).output == from_arguments.output
    type_in(file.read_bytes())
    assert command(*arguments).output == from_arguments.output


def test_an_input_without_texts_is_refused(
    command: Command, finished_run: Path, tmp_path: Path, type_in: TypeIn
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text(" \n\n")
    command("predict", finished_run, "--data", file).assert_refused(3, str(file), "no text")
    command("predict", finished_run, "--data", tmp_path).assert_refused(3, str(tmp_path))
    command("predict", finished_run, "--data", tmp_path / "missing").assert_refused(3, "missing")
    type_in(b"")
    command("predict", finished_run).assert_refused(3, "standard input", "no text")


ROWS = [
    {"id": 1, "question": "Who wrote Faust ?", "label": "HUM"},
    {"id": 2, "question": 'Where is, "exactly",\nthe Nile ?', "label": "LOC"},
    {"id": 3, "question": "   ", "label": "NUM"},
    {"id": 4, "question": "What does NASA stand for ?", "label": "ABBR"},
]


def write_table(path: Path) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(
                file, ROWS[0], dialect="excel-tab" if path.suffix == ".tsv" else "excel"
            )
            writer.writeheader()
            writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_table_is_read_as_a_table_and_its_other_columns_are_carried_along(
    suffix: str, command: Command, finished_run: Path, tmp_path: Path
) -> None:
    outcome = command(
        "predict", finished_run, "--json", "--data", write_table(tmp_path / f"t{suffix}")
    )
    assert outcome.code == 0, outcome.errors
    predictions = [json.loads(line) for line in outcome.output.splitlines()]
    assert [one["text"] for one in predictions] == [
        ROWS[0]["question"],
        ROWS[1]["question"],
        ROWS[3]["question"],
    ]
    assert [int(one["id"]) for one in predictions] == [1, 2, 4]
    assert [one["input_label"] for one in predictions] == ["HUM", "LOC", "ABBR"]
    assert "1 rows" in outcome.errors
    assert "empty text" in outcome.errors


def test_the_text_column_can_be_named_and_lines_can_be_asked_for(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "t.csv")
    outcome = command("predict", finished_run, "--json", "--data", table, "--text-column", "label")
    assert predicted_texts(outcome) == ["HUM", "LOC", "NUM", "ABBR"]
    lines = predicted_texts(command("predict", finished_run, "--json", "--data", table, "--lines"))
    assert lines == [line for line in table.read_text().splitlines() if line.strip()]
    outcome = command("predict", finished_run, "--data", table, "--text-column", "qestion")
    outcome.assert_refused(3, "qestion", "question")


def test_all_scores_are_the_probabilities_of_all_classes(
    command: Command, finished_run: Path
) -> None:
    outcome = command("predict", finished_run, *TEXTS, "--json", "--all-scores")
    for line in outcome.output.splitlines():
        prediction = json.loads(line)
        assert len(prediction["probabilities"]) == 6
        assert sum(prediction["probabilities"].values()) == pytest.approx(1)
        assert max(prediction["probabilities"].values()) == prediction["probability"]
        assert prediction["probabilities"][prediction["label"]] == prediction["probability"]
    titles, *rows = command("predict", finished_run, *TEXTS, "--all-scores").output.splitlines()
    assert titles.split() == ["label", "ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM", "text"]
    assert len(rows) == len(TEXTS)


def read_output(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="") as file:
        return [row | {"probability": float(row["probability"])} for row in csv.DictReader(file)]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_predictions_are_written_to_a_file(
    suffix: str, command: Command, finished_run: Path, tmp_path: Path
) -> None:
    table, output = write_table(tmp_path / "t.csv"), tmp_path / f"predictions{suffix}"
    outcome = command("predict", finished_run, "--data", table, "--output", output)
    assert (outcome.code, outcome.output) == (0, f"3 rows → {output}\n"), outcome.errors
    printed = command("predict", finished_run, "--data", table, "--json").output.splitlines()
    assert read_output(output) == list(map(json.loads, printed))
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([output.name, "t.csv"])


@pytest.mark.parametrize(
    ("output", "word"),
    [("predictions.xlsx", ".jsonl"), ("t.csv", "--output"), ("no/a.csv", "folder")],
)
def test_an_output_that_can_not_be_written_is_refused_at_once(
    output: str, word: str, command: Command, finished_run: Path, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "t.csv")
    outcome = command("predict", finished_run, "--data", table, "--output", tmp_path / output)
    outcome.assert_refused(2, word)


def test_predictions_appear_while_more_lines_may_come(finished_run: Path) -> None:
    def lines() -> Iterator[list[Row]]:
        yield [Row("one ?"), Row("two ?")]
        pytest.fail("waited for more")

    first = next(load(finished_run, device="cpu").stream(lines(), emit=ignore))
    assert [prediction.text for prediction in first] == ["one ?", "two ?"]


def test_the_first_pieces_are_small(finished_run: Path) -> None:
    rows = [Row(f"what is {number} ?") for number in range(100)]
    pieces = list(load(finished_run, device="cpu").stream([rows[:60], rows[60:]], emit=ignore))
    assert [len(piece) for piece in pieces] == [16, 32, 12, 40]
    assert [one.text for piece in pieces for one in piece] == [row.text for row in rows]


def test_texts_without_a_prediction_have_no_label(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    arguments = ("predict", finished_run, *TEXTS, "--device=cpu", "--min-confidence", "1")
    shown = command(*arguments)
    assert "3 of 3 texts have no prediction" in shown.errors
    header, *lines = shown.output.splitlines()
    assert header.split("\t") == ["label", "probability", "text"]
    assert [line.split("\t")[0] for line in lines] == [""] * 3
    for suffix, label in ((".csv", ""), (".jsonl", None), (".parquet", None)):
        output = tmp_path / f"predictions{suffix}"
        assert command(*arguments, "--output", output).code == 0
        assert [row["label"] for row in read_output(output)] == [label] * 3
    refused = command(*arguments, "--target-precision=0.9", "--output", tmp_path / "none.csv")
    refused.assert_refused(2, "--min-confidence")
    assert not list(tmp_path.glob("none*"))
