"""``finetune data check``, and the ways in which a table can be wrong, through the command."""

import json
import shutil
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from hub_server import HubServer, hub_client
from tiny_runs import Command
from trec_files import TREC_DIR, needs_trec


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, content: str) -> str:
    Path(name).write_text(content, encoding="utf-8")
    return name


def table_of(*rows: str, header: str = "text,label", name: str = "rows.csv") -> str:
    """Write a few rows of two classes and those given."""
    plain = [f"the river {number},{'xy'[number % 2]}" for number in range(40)]
    return write(name, "\n".join([header, *plain, *rows]))


def lines_of(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines()]


def test_check_shows_rows_classes_lengths_and_what_to_change(
    command: Command, tiny_folder: Path
) -> None:
    data = table_of("the [red] river,x", "the [red] river,x", ",x")
    test = write("test.csv", "text,label\nthe RIVER 2,y\na new one,x\n")
    outcome = command(
        "data", "check", "--data", data, "--test-file", test,
        "--model", tiny_folder, "--max-length", "4",
    )  # fmt: skip
    assert outcome.code == 0, outcome.errors
    shown = lines_of(outcome.output)
    for line in (
        "class train test",
        "x 22 1",
        "all rows 42 2",
        "rows of a run: 38 train, 4 validation, 2 test",
        "duplicates of an earlier row 1 0",
        "texts with contradictory labels 0 0",
        "rows whose text is in train too 1",
        "x in train, y in test the RIVER 2",
        "duplicate in train the [red] river",
    ):
        assert line in shown
    assert any(line.startswith("tokens of a text mean p50 p95 p99 max over 4") for line in shown)
    assert any(line.startswith("try: --max-length") for line in shown)
    assert "encoding utf-8, delimiter comma" in outcome.errors
    assert "texts from column 'text' (its name says so), labels from 'label' (its" in outcome.errors
    assert "1 of 43 rows skipped" in outcome.errors


def test_check_prints_one_json_object(command: Command, tiny_folder: Path) -> None:
    outcome = command("data", "check", "--data", table_of(), "--model", tiny_folder, "--json", "-q")
    assert outcome.errors == ""
    found = json.loads(outcome.output)
    assert found["schema_version"] == 1
    assert found["data"] == "rows.csv"
    assert found["classes"] == {"train": {"x": 20, "y": 20}}
    assert found["lengths"]["splits"]["train"]["cut_rows"] == 0
    assert found["suggestions"] == []


def test_check_without_a_tokenizer_says_that_lengths_are_missing(command: Command) -> None:
    outcome = command("data", "check", "--data", "questions", "--model", "acme/unknown")
    assert outcome.code == 0
    assert "warning: the lengths of the texts are missing" in outcome.errors
    assert "all rows 810 270" in lines_of(outcome.output)
    assert "tokens of a text" not in outcome.output


def test_check_takes_a_recipe_and_variables_as_run_does(
    command: Command, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FINETUNE_VALIDATION_FRACTION", "0.2")
    outcome = command("data", "check", "-c", "offline", "--model", tiny_folder, "--json")
    assert json.loads(outcome.output)["rows_of_a_run"]["validation"] == 162


@needs_trec
def test_check_finds_what_is_known_of_trec(command: Command, tiny_folder: Path) -> None:
    Path("trec").mkdir()
    shutil.copy(TREC_DIR / "train_5500.label", "trec")
    write("trec/TREC_10.label", "LOC:other What are the Twin Cities ?\n")
    outcome = command("data", "check", "--data-dir", "trec", "--model", tiny_folder)
    assert outcome.code == 0, outcome.errors
    shown = lines_of(outcome.output)
    for line in (
        "duplicates of an earlier row 71 0",
        "texts with duplicates 63 0",
        "rows that have another label there 1",
        "DESC in train, LOC in test What are the Twin Cities ?",
        "ENTY has 14.5 times the training rows of ABBR",
        "try: --class-weights balanced",
    ):
        assert line in shown


def test_a_set_of_the_hub_is_checked_by_its_name(
    command: Command, tmp_path: Path, tiny_folder: Path
) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["zebra", "ant"])})
    rows = {"text": [f"animal {n}" for n in range(40)], "label": [n % 2 for n in range(40)]}
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    Dataset.from_dict(rows, features=features).to_parquet(folder / "train-00000-of-00001.parquet")
    with (
        HubServer(datasets={"acme/rows": folder.parent}) as hub,
        hub_client(endpoint=hub.endpoint, home=tmp_path / "home"),
    ):
        outcome = command("data", "check", "--data", "hub:acme/rows", "--model", tiny_folder)
        assert outcome.code == 0, outcome.errors
        command("data", "check", "--data", "hub:acme/raws").assert_refused(3, "acme/raws")
    assert {"zebra 20", "ant 20", "all rows 40"} <= set(lines_of(outcome.output))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["rows.csv is empty"]),
        ("text,label\n", ["no rows"]),
        ("text,label\ngood,x\nbad, bad,y\n", ["line 3", "rows.csv", "'bad, bad,y'", "quotes"]),
        ('text,label\n"good,x\nbad,y\n', ["line 2", "rows.csv", "quotes"]),
        ("text,label\ngood,x\nbad,x\n", ["'x'", "--label-column"]),
        ("text,label\ngood,x\ngood,y\n", ["same text", "--text-column"]),
        ("review,title,label\na,b,x\nc,d,y\n", ["'review', 'title'", "--text-column"]),
        ("id,text\n1,good\n2,bad\n", ["rows.csv", "--label-column"]),
        ("text,label\n,\n,\n", ["no row"]),
    ],
)
def test_a_table_that_is_wrong_ends_with_what_and_where(
    command: Command, content: str, words: list[str]
) -> None:
    write("rows.csv", content)
    command("data", "check", "--data", "rows.csv").assert_refused(3, *words)


def test_other_ways_to_be_wrong_have_their_exit_codes(command: Command) -> None:
    data = table_of()
    check = ("data", "check", "--data")
    command(*check, "nothing.csv").assert_refused(3, "nothing.csv")
    command(*check, data, "--label-column", "Labl").assert_refused(
        3, "'Labl'", "did you mean 'label'?", "'text', 'label'"
    )
    test = write("test.csv", "text,label\na,x\nb,z\n")
    command(*check, data, "--test-file", test).assert_refused(3, "'z'", "line 3 of test.csv")
    lines = write("rows.jsonl", '{"text": "a", "label": "x"}\n{"text": \n')
    command(*check, lines).assert_refused(3, "line 2 of rows.jsonl", "not JSON")
    command(*check, write("rows.xlsx", "PK")).assert_refused(3, "rows.xlsx", ".csv")
    Path("rows.parquet").write_bytes(b"PAR1")
    command(*check, "rows.parquet").assert_refused(3, "rows.parquet")
    command(*check, data, "--label", "label-fine").assert_refused(2, "--label")
    command(*check, "questions", "--test-file", test).assert_refused(2, "--test-file")
    command(*check, "imdb").assert_refused(2, "imdb", "hub:")
    command(*check, "hub:acme/rows").assert_refused(6, "acme/rows")


def test_a_run_on_a_table_that_is_wrong_ends_as_the_check_does(command: Command) -> None:
    data = write("rows.csv", "text,label\ngood,x\nbad, bad,y\n")
    command("run", "--data", data, "--device", "cpu").assert_refused(3, "line 3 of rows.csv")
