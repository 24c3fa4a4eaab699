"""``finetune data audit``, its files and JSON output, and corrections from these files."""

import csv
import json
from pathlib import Path

import pytest
from tiny_runs import Command

WORDS = {
    "place": ["river", "city", "country", "mountain"],
    "person": ["who", "author", "wrote", "president"],
}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rows.csv"
    lines = []
    for number in range(80):
        label = ("place", "person")[number % 2]
        words = WORDS[label]
        text = f"the {words[number % 4]} of {words[number // 4 % 4]} {number}"
        lines.append(f"{text},{'person' if number == 10 else label}")
    path.write_text("\n".join(["text,label", *lines, lines[3].upper().replace("PERSON", "place")]))
    return path


def test_audit_writes_files_and_applies_corrections_from_them(
    table: Path, tiny_folder: Path, command: Command
) -> None:
    model = ["--model", str(tiny_folder)]
    found = json.loads(command("data", "audit", str(table), *model, "--json").output)
    assert {"schema_version", "suspects", "near_duplicates", "leaks"} <= {*found}
    assert len(found["suspects"]) == 9
    assert found["suspects"][0].keys() >= {"row", "label", "suggested", "loss"}
    places = {one["row"]: one["place"] for one in found["suspects"]}
    assert {12, 82} & {*places}
    [words] = [row["words"] for row in found["suspects"] if row["row"] == 12]
    assert words[0]["word"] == "country"
    assert words[0]["change"] < -0.5
    assert all(place == f"line {row} of {table}" for row, place in places.items())
    [double] = [one for one in found["near_duplicates"] if one["labels"]]
    assert (double["row"], double["of_row"]) == (82, 5)
    folder = Path(found["folder"])
    page = (folder / "audit.html").read_text()
    assert "<script" in page
    assert "the <mark>country</mark> of <mark>country</mark> 10" in page
    suspects = folder / "suspects.csv"
    with suspects.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["words"][:10] for row in rows if row["row"] == "12"] == ["country -0"]
    decisions = {row["row"]: "Keep" for row in rows[1:4]} | {rows[0]["row"]: "drop"}
    with suspects.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(row | {"decision": decisions.get(row["row"], "")} for row in rows)
    corrected = [str(table), *model, "--corrections", str(suspects)]
    assert "1 rows dropped" in command("data", "check", *corrected).errors

    # The next audit lists different rows, and its file contains the earlier decisions.
    again = json.loads(command("data", "audit", *corrected, "--json").output)
    assert again["folder"] == f"{found['folder']}-2"
    assert not {str(row["row"]) for row in again["suspects"]} & decisions.keys()
    with (Path(again["folder"]) / "suspects.csv").open(newline="") as file:
        decided = {row["row"]: row["decision"] for row in csv.DictReader(file) if row["decision"]}
    assert {row: decision.lower() for row, decision in decisions.items()} == decided
    rejected = command("data", "audit", *corrected, "--output-dir", found["folder"])
    assert rejected.code == 2
    assert "contains decisions" in rejected.errors


def test_audit_of_unlabeled_texts_finds_only_duplicates(
    table: Path, tiny_folder: Path, command: Command
) -> None:
    texts = table.with_name("texts.csv")
    texts.write_text("text\n" + "\n".join(f"the old river {number // 2}" for number in range(30)))
    called = command("data", "audit", str(texts), "--model", str(tiny_folder), "--json")
    found = json.loads(called.output)
    assert found["suspects"] == []
    assert len(found["near_duplicates"]) >= 15


def test_audit_runs_on_a_table_without_near_duplicates(
    table: Path, tiny_folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Random weights give all texts similar features.
    monkeypatch.setattr("finetune.audit.duplicates.MAX_COMPARED_ROWS", 0)
    texts = table.with_name("texts.csv")
    texts.write_text("text\na river in the city\nwho wrote this\na high mountain\n")
    called = command("data", "audit", str(texts), "--model", str(tiny_folder), "--json")
    assert called.code == 0, called.errors
    assert json.loads(called.output)["near_duplicates"] == []
