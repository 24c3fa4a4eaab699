"""``finetune label FILE --suspects`` writes decisions to files that ``finetune run`` reads."""

import csv
from pathlib import Path

import pytest
from click.testing import CliRunner

from finetune.commands.flags import load
from finetune.commands.label import command, review_suspects
from finetune.config.schema import DataConfig
from finetune.data.load import load_data
from finetune.errors import DataError, UsageError
from finetune.web.labeling import LabelBody, LabelingSession, UndoBody

ROWS = [(f"text {number}", "praise" if number % 2 else "refund") for number in range(40)]
ROWS[0], ROWS[5], ROWS[6] = ("text 0", "praise"), ("text 5", "prase"), ("text 6", "refunds")


@pytest.fixture
def audits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an audit of data.csv with four suspects."""
    monkeypatch.chdir(tmp_path)
    with open("data.csv", "w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *ROWS])
    folder = tmp_path / "audits" / "data"
    folder.mkdir(parents=True)
    lines = ["decision,split,row,text,label,suggested,loss,suggested_probability,words"]
    words = "text -0.52|1 -6e-02"
    lines += [f",train,{n + 2},text {n},{ROWS[n][1]},refund,1.5,0.9,{words}" for n in (0, 1, 3, 7)]
    (folder / "suspects.csv").write_text("\n".join([*lines, ""]))
    return folder


def decide(session: LabelingSession, *labels: str | None) -> None:
    for label in labels:
        session.label(LabelBody(row=session.next()["row"], label=label))


def decisions(folder: Path) -> list[str]:
    with (folder / "suspects.csv").open(newline="") as file:
        return [row["decision"] for row in csv.DictReader(file)]


def test_decisions_correct_the_labels_of_a_run(audits: Path) -> None:
    table = Path("data.csv").read_bytes()
    session = review_suspects(load(data="data.csv"))
    assert session.command().endswith("data.csv --corrections audits/data/suspects.csv")
    row = session.next()
    assert (row["text"], row["suggestion"]["label"]) == ("all rows with the label prase", "praise")
    decide(session, "praise", "drop")
    assert session.command().endswith("--label-map audits/data/label_map.csv")
    assert session.next()["suggestion"] == {"label": "refund", "probability": 0.9}
    decide(session, "refund", None, "drop")
    assert decisions(audits) == ["refund", "", "drop", ""]
    again = review_suspects(load(data="data.csv"))
    assert again.next()["text"] == "text 1"  # skipped suspects are shown again
    assert again.mark_words(2)["text"] == [("text", True), (" ", False), ("1", True)]
    decide(again, "praise")
    assert again.next()["text"] == "text 7"
    assert decisions(audits) == ["refund", "keep", "drop", ""]
    assert (audits / "label_map.csv").read_text() == "label,new name\nprase,praise\nrefunds,\n"
    options = DataConfig(
        data="data.csv",
        corrections=str(audits / "suspects.csv"),
        label_map=str(audits / "label_map.csv"),
    )
    loaded = load_data(options)
    assert loaded.task.class_names == ["praise", "refund"]
    rows = {
        row["text"]: row["label"] for part in loaded.splits.values() for row in part.to_pylist()
    }
    assert len(rows) == len(ROWS) - 2
    assert rows["text 0"] == rows["text 2"]
    assert rows["text 5"] == rows["text 1"]
    assert Path("data.csv").read_bytes() == table


def test_undo_keeps_manual_edits(audits: Path) -> None:
    session = review_suspects(load(data="data.csv"))
    decide(session, None, None, "refund", "praise")
    path = audits / "suspects.csv"
    edited = path.read_text().replace(",train,5,", "Keep,train,5,").replace(",", ";")
    path.write_bytes(edited.encode("utf-8-sig"))  # as Excel saves it
    session.undo(UndoBody())
    assert decisions(audits) == ["refund", "", "Keep", ""]
    path.write_text(path.read_text().replace("text 7", "another text"))
    with pytest.raises(DataError, match="has other rows now"):
        decide(session, "refund")
    assert session.status()["labeled"] == 1
    again = review_suspects(load(data="data.csv"))
    assert again.status()["labeled"] == 2


def test_decisions_on_multi_label_suspects_are_saved(audits: Path) -> None:
    lines = ["text,label", *(f"{text},{label}|other" for text, label in ROWS)]
    Path("data.csv").write_text("\n".join([*lines, "a,other", "b,praise", "c,refund"]))
    lines = ["decision,split,row,text,label,suggested,loss"]
    lines += [f",train,{n + 2},text {n},{ROWS[n][1]}|other,refund,1.5" for n in (0, 1, 3)]
    (audits / "suspects.csv").write_text("\n".join([*lines, ""]))
    session = review_suspects(load(data="data.csv"))
    names = [session.next()["row"]]
    session.label(LabelBody(row=names[0], label=None))
    names.append(session.next()["row"])
    session.label(LabelBody(row=names[1], label=None))
    row = session.next()
    assert (row["label"], row["suggestion"]["label"]) == (["praise", "other"], ["refund"])
    for label in (["refund"], ["praise", "other"], ["drop", "other"]):
        session.label(LabelBody(row=session.next()["row"], label=label))
    assert decisions(audits) == ['["refund"]', "keep", "drop"]
    with pytest.raises(DataError, match="prase can become one class only"):
        session.label(LabelBody(row=names[0], label=["praise", "other"]))
    session.label(LabelBody(row=names[0], label=["praise"]))
    assert (audits / "label_map.csv").read_text() == "label,new name\nprase,praise\n"
    session.undo(UndoBody())
    assert (audits / "label_map.csv").read_text() == "label,new name\n"
    assert not load_data(
        DataConfig(data="data.csv", corrections=str(audits / "suspects.csv"))
    ).task.class_names.count("drop")


def test_missing_audit_is_reported_with_its_command(audits: Path) -> None:
    Path("other.csv").write_bytes(Path("data.csv").read_bytes())
    with pytest.raises(UsageError, match="file not found: audits") as error:
        review_suspects(load(data="other.csv"))
    assert "finetune data audit other.csv" in str(error.value.remedy)


def test_regression_suspects_are_rejected(audits: Path) -> None:
    lines = [f"a text {number},{number / 7:.3f}" for number in range(40)]
    Path("data.csv").write_text("\n".join(["text,label", *lines]))
    with pytest.raises(UsageError, match="no classes to choose from"):
        review_suspects(load(data="data.csv"))


@pytest.mark.parametrize("option", [["--classes", "a,b"], ["--multi-label"]])
def test_class_options_are_rejected_with_suspects(option: list[str], audits: Path) -> None:
    result = CliRunner().invoke(command, ["data.csv", "--suspects", *option])
    assert isinstance(result.exception, UsageError)
