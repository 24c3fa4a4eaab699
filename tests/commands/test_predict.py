"""``finetune.predict`` and ``finetune predict``."""

import copy
import datetime
import io
import json
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas
import pyarrow as pa
import pytest
from datasets import Dataset
from tiny_runs import TEXTS, Command, Outcome, run_tiny

import finetune
from finetune.commands.predict import load
from finetune.config.schema import DataConfig
from finetune.data.read import read_source
from finetune.data.stream import Texts
from finetune.events import Event, WarningMessage
from finetune.files import read_json, read_jsonl, write_json, write_sums

MISSING = [None, "Who wrote Faust ?", "  "]


@pytest.mark.parametrize(
    "texts",
    [
        MISSING,
        (text for text in MISSING),
        [float("nan"), *MISSING[1:]],
        pandas.DataFrame({"text": MISSING, "id": [1, 2, 3]}),
        pa.array(MISSING, "string_view"),
        pa.table({"text": MISSING}),
        [{"text": text} for text in MISSING],
        {"text": MISSING},
        Dataset.from_dict({"text": MISSING})["text"],
    ],
    ids=lambda texts: type(texts).__name__,
)
def test_missing_texts_keep_their_rows_without_a_label(texts: Any, finished_run: Path) -> None:
    with pytest.warns(UserWarning, match="2 of 3 texts are missing: their labels are empty"):
        found = finetune.predict(finished_run, texts, device="cpu", all_scores=True)
    [prediction] = finetune.predict(finished_run, "Who wrote Faust ?", device="cpu")
    assert [one.label for one in found] == [None, prediction.label, None]
    assert found[0].probability is None
    assert {*found[2].probabilities.values()} == {None}
    assert len(found.to_pandas()) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_loaded_model_can_be_copied_and_pickled(copied: Any, finished_run: Path) -> None:
    model = load(finished_run, device="cpu")
    expected = model.predict(TEXTS)
    assert copied(model).predict(TEXTS) == copied(expected) == expected


@pytest.fixture
def run_with_confidences(finished_run: Path, tmp_path: Path) -> Path:
    """A run whose validation rows support a precision of 0.95 for all classes except one."""
    run = shutil.copytree(finished_run, tmp_path / "run")
    content = read_json(run / "model/confidences.json")
    names = list(content["classes"])
    assert sum(len(one["is_right"]) for one in content["classes"].values()) == 81
    for name in names:
        content["classes"][name] = {"probabilities": [0.0] * 100, "is_right": [True] * 100}
    content["classes"][names[1]] = {"probabilities": [0.9] * 18, "is_right": [True] * 18}
    write_json(run / "model/confidences.json", content)
    write_sums(run / "model")
    return run


def test_model_abstains_on_classes_below_the_target_precision(run_with_confidences: Path) -> None:
    emitted: list[Event] = []
    run = run_with_confidences
    texts = [row["text"] for row in read_jsonl(run / "predictions.jsonl")]
    whole = finetune.predict(run, texts, device="cpu")
    missed = list(read_json(run / "model/confidences.json")["classes"])[1]

    found = finetune.predict(run, texts, device="cpu", target_precision=0.95, emit=emitted.append)

    labels = [None if prediction.label == missed else prediction.label for prediction in whole]
    assert [prediction.label for prediction in found] == labels
    assert any(
        f"always abstains from: {missed} (18 rows)" in event.message
        for event in emitted
        if isinstance(event, WarningMessage)
    )
    easier = finetune.predict(run, texts[:9], device="cpu", target_precision=0.9)
    assert all(one.label is None for one in easier if one.probability < 0.9 and one.label == missed)


TypeIn = Callable[[bytes], None]


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> TypeIn:
    """Return a function that sets the content of standard input."""

    def put(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return put


def predicted_texts(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.errors
    return [json.loads(line)["text"] for line in outcome.output.rstrip("\n").split("\n")]


def test_texts_from_arguments_a_file_and_stdin_give_equal_predictions(
    command: Command, finished_run: Path, tmp_path: Path, type_in: TypeIn
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("".join(f"{text}\n" for text in TEXTS), encoding="utf-8")
    arguments = ("predict", finished_run, "--json", "--device=cpu")
    from_arguments = command(*arguments, *TEXTS)
    assert predicted_texts(from_arguments) == TEXTS
    assert command(*arguments, "--data", file).output == from_arguments.output
    assert command(*arguments, file).output == from_arguments.output
    type_in(file.read_bytes())
    assert command(*arguments).output == from_arguments.output
    # A last line without a newline is in a separate batch, which rounds differently.
    type_in(file.read_bytes().removesuffix(b"\n"))
    assert predicted_texts(command(*arguments)) == TEXTS


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("missing.csv", 3, "file not found: missing.csv"),
        ("data/new", 3, "file not found: data/new"),
        (".", 3, "is a folder"),
        ("empty.txt", 3, "no texts"),
        ("either/or is fine", 0, "either/or"),
        ("e.g.", 0, "e.g."),
        ("-", 0, "Who is it?"),
    ],
)
def test_argument_that_looks_like_a_file_is_read_as_a_file(
    argument: str,
    code: int,
    words: str,
    command: Command,
    finished_run: Path,
    type_in: TypeIn,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    type_in(b"Who is it?\n")
    arguments = ("--data", argument) if argument == "." else (argument,)
    outcome = command("predict", finished_run, *arguments, "--device=cpu")
    assert outcome.code == code
    assert words in outcome.output + outcome.errors
    command("predict", finished_run, "a.csv", "b.csv").assert_rejected(2, "several files")
    type_in(b"")
    command("predict", finished_run).assert_rejected(3, "standard input", "no text")


def test_blank_lines_and_arguments_keep_their_rows(
    command: Command, finished_run: Path, type_in: TypeIn
) -> None:
    type_in(b"Who is it?\n\n  \r\nWho?")
    outcome = command("predict", finished_run, "--json")
    assert predicted_texts(outcome) == ["Who is it?", "", "  ", "Who?"]
    assert "2 of 4 texts are missing" in outcome.errors
    shown = command("predict", finished_run, "", "--all-scores")
    assert shown.output.splitlines()[1].replace("\t", "") == ""
    assert "1 of 1 texts is missing: its label is empty" in shown.errors


QUESTIONS = ["Who wrote Faust ?", 'Where is; "exactly",\nthe Nile ä ?', "   ", None, "Who is it ?"]
FRAME = pandas.DataFrame(
    {
        "id": ["007", "=8", "9", "10", "11"],
        "question": QUESTIONS,
        "label": ["HUM", "LOC", "NUM", "NUM", "HUM"],
        "price": ["98,10", "3", None, "4", "5"],
    }
)


TYPED = FRAME.assign(labels=[["a"], [], None, ["b"], []], when=[datetime.date(2020, 1, 1)] * 5)


def write_table(path: Path, **options: Any) -> Path:
    FRAME.to_csv(path, index=False, **options)
    return path


def read_frame(path: Path, **options: Any) -> pandas.DataFrame:
    """Return a table in which empty cells are None."""
    match path.suffix:
        case ".jsonl" | ".json":
            frame = pandas.read_json(path, lines=path.suffix == ".jsonl", dtype=False)
        case ".parquet":
            return pandas.read_parquet(path)
        case ".xlsx":
            frame = pandas.read_excel(path, dtype=str)
        case _:
            frame = pandas.read_csv(path, dtype=str, **options)
    return frame.astype(object).where(frame.notna(), None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rows.csv", {"sep": ";", "encoding": "utf-8-sig"}),
        ("rows.csv", {"sep": "|", "encoding": "cp1252"}),
        ("rows.tsv", {"sep": "\t", "encoding": "utf-16"}),
        ("rows.jsonl", {}),
        ("rows.json", {}),
        ("rows.parquet", {}),
        ("rows.xlsx", {}),
    ],
)
def test_output_file_is_the_input_with_columns_added(
    name: str, options: dict[str, Any], command: Command, finished_run: Path, tmp_path: Path
) -> None:
    table, output = tmp_path / name, tmp_path / f"predicted-{name}"
    match table.suffix:
        case ".jsonl" | ".json":
            FRAME.to_json(table, orient="records", lines=table.suffix == ".jsonl")
        case ".parquet":
            TYPED.to_parquet(table, index=False)
        case ".xlsx":
            FRAME.replace("   ", None).to_excel(table, index=False)
        case _:
            write_table(table, **options)
    outcome = command("predict", finished_run, table, "--output", output, "--device=cpu")
    assert outcome.code == 0, outcome.errors
    assert outcome.output == f"5 rows → {output}\n"
    assert "2 of 5 texts are missing" in outcome.errors
    before, after = read_frame(table, **options), read_frame(output, **options)
    pandas.testing.assert_frame_equal(after[[*before]], before)
    assert [*after][len(before.columns) :] == ["predicted_label", "probability"]
    assert [*after["predicted_label"].isna()] == [False, False, True, True, False]
    if options:
        has_mark = output.read_bytes().startswith(b"\xef\xbb\xbf")
        assert has_mark == (options["encoding"] == "utf-8-sig")
    assert len(list(tmp_path.iterdir())) == 2


def test_text_column_and_lines_options_select_the_texts(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "t.csv")
    outcome = command("predict", finished_run, "--json", table, "--text-column", "label")
    rows = [json.loads(line) for line in outcome.output.splitlines()]
    assert [row["label"] for row in rows] == [*FRAME["label"]]
    assert all(row["predicted_label"] for row in rows)
    lines = predicted_texts(command("predict", finished_run, "--json", "--data", table, "--lines"))
    assert lines == table.read_text().splitlines()
    outcome = command("predict", finished_run, "--data", table, "--text-column", "qestion")
    outcome.assert_rejected(3, "qestion", "question")


def test_all_scores_adds_the_probabilities_of_all_classes(
    command: Command, finished_run: Path
) -> None:
    outcome = command("predict", finished_run, *TEXTS, "--json", "--all-scores")
    for line in outcome.output.splitlines():
        prediction = json.loads(line)
        assert sum(prediction["probabilities"].values()) == pytest.approx(1)
        assert max(prediction["probabilities"].values()) == prediction["probability"]
        assert prediction["probabilities"][prediction["label"]] == prediction["probability"]
    titles, *rows = command("predict", finished_run, *TEXTS, "--all-scores").output.splitlines()
    assert titles.split() == ["label", "ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM", "text"]
    assert len(rows) == len(TEXTS)


def test_predictions_are_streamed_before_the_input_ends(finished_run: Path) -> None:
    def lines() -> Iterator[Texts]:
        yield Texts(["one ?", "two ?"])
        pytest.fail("waited for more")

    first = next(load(finished_run, device="cpu").stream(lines()))
    assert [prediction.text for prediction in first] == ["one ?", "two ?"]


def test_texts_on_which_the_model_abstains_have_empty_labels(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    arguments = ("predict", finished_run, *TEXTS, "--device=cpu", "--min-confidence", "1")
    shown = command(*arguments)
    assert "the model abstained on 3 of 3 texts" in shown.errors
    header, *lines = shown.output.splitlines()
    assert header.split("\t") == ["label", "probability", "text"]
    assert [line.split("\t")[0] for line in lines] == [""] * 3
    assert command(*arguments, "--output", tmp_path / "rows.jsonl").code == 0
    assert [row["label"] for row in read_jsonl(tmp_path / "rows.jsonl")] == [None] * 3
    rejected = command(*arguments, "--target-precision=0.9", "--output", tmp_path / "none.csv")
    rejected.assert_rejected(2, "--min-confidence")
    assert not list(tmp_path.glob("none*"))


@pytest.fixture(scope="module")
def run_with_numbers(
    tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path
) -> tuple[Path, pandas.DataFrame]:
    """A run whose labels are integers, and its table."""
    frame = pandas.DataFrame(
        {
            "text": [f"{word} {n} ?" for n in range(20) for word in ("who", "where")],
            "stars": [n % 2 + 3 for n in range(40)],
        }
    )
    folder = tmp_path_factory.mktemp("runs") / "numbers"
    run_tiny(folder, model=tiny_folder, data=frame)
    return folder, frame


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet", "a.xlsx", ""])
@pytest.mark.parametrize("blanks", [0, 1])
def test_predicted_labels_have_the_type_of_the_table_labels(
    name: str,
    blanks: int,
    command: Command,
    run_with_numbers: tuple[Path, pandas.DataFrame],
    tmp_path: Path,
) -> None:
    """A missing label makes pandas convert integers to floats, which a CSV stores as 3.0."""
    run, frame = run_with_numbers
    frame = frame.assign(stars=frame["stars"].where(frame.index >= blanks))
    if not name:
        predictions = finetune.predict(run, frame, device="cpu")
        labels, stars = predictions.to_pandas()[["label", "stars"]].T.to_numpy().tolist()
    else:
        table, output = tmp_path / name, tmp_path / f"b-{name}"
        match table.suffix:
            case ".csv" | ".tsv":
                frame.to_csv(table, index=False, sep="," if table.suffix == ".csv" else "\t")
            case ".parquet":
                frame.to_parquet(table)
            case ".xlsx":
                frame.to_excel(table, index=False)
            case _:
                frame.to_json(table, orient="records", lines=table.suffix == ".jsonl")
        assert command("predict", run, table, "--output", output, "--device=cpu").code == 0
        source = read_source(output, DataConfig()).frame
        labels, stars = source["label"].tolist(), source["stars"].tolist()
    known = [*zip(labels, stars, strict=True)][blanks:]
    assert {type(label) for label, _ in known} == {type(star) for _, star in known}
    assert {label for label, _ in known} <= {star for _, star in known}


def test_small_regression_values_keep_their_digits(
    command: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    rows = [{"text": f"is it {n} ?", "label": n * 1.23456e-8} for n in range(40)]
    run_tiny(tmp_path / "run", model=tiny_folder, data=rows, num_train_epochs=1)
    (tmp_path / "a.csv").write_text('text\nis it 7 ?\n" "\n')
    [expected] = finetune.predict(tmp_path / "run", ["is it 7 ?"], device="cpu")
    shown = command("predict", tmp_path / "run", "is it 7 ?").output.split("\t")
    done = command("predict", tmp_path / "run", tmp_path / "a.csv", "--output", tmp_path / "b.csv")
    assert done.code == 0, done.errors
    header, filled, blank = (tmp_path / "b.csv").read_text().splitlines()
    assert (header, blank) == ("text,value", '" ",""')
    for value in (shown[1].split()[-1], filled.split(",")[1]):
        assert float(value) == pytest.approx(expected.value, rel=1e-5)
        assert 0 < abs(float(value)) < 1e-6


def test_explained_change_equals_the_prediction_for_the_changed_text(finished_run: Path) -> None:
    text = "Who wrote the novel Faust ?"
    [prediction] = finetune.predict(finished_run, text, device="cpu", explain=True)
    assert prediction.explanation
    for change in prediction.explanation:
        changed = text.replace(f"{change.word} ", "")
        [without] = finetune.predict(finished_run, changed, device="cpu", all_scores=True)
        probability = without.probabilities[prediction.label]
        assert probability - prediction.probability == pytest.approx(change.change, abs=1e-4)
    assert "novel" in prediction.explanation._repr_html_()
    assert "explanation" in prediction.to_json()


def test_explanations_are_strings_in_tables_and_lists_in_json(
    finished_run: Path, command: Command, tmp_path: Path
) -> None:
    table, output = tmp_path / "texts.csv", tmp_path / "out.csv"
    table.write_text("text\nWho wrote Faust ?\n\n?!\n")
    arguments = ("predict", finished_run, table, "--device", "cpu", "--explain")
    assert command(*arguments, "--output", output).code == 0
    explained = pandas.read_csv(output, keep_default_na=False)["explanation"].tolist()
    assert [*map(bool, explained)] == [True, *[False] * (len(explained) - 1)]
    word, change = explained[0].split("|")[0].split()
    assert (word in "Who wrote Faust", float(change) != 0) == (True, True)
    [first, *_] = map(json.loads, command(*arguments, "--json").output.splitlines())
    assert first["explanation"][0].keys() == {"word", "change"}
    abstained = command(*arguments, "--json", "--min-confidence", "1").output.splitlines()[0]
    assert json.loads(abstained)["explanation"] == []
