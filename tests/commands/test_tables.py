"""Tables that nobody here laid out train from what ``finetune init`` writes, without an edit."""

import csv
from collections.abc import Iterable
from pathlib import Path

import pytest
from tiny_models import save_tiny_model
from tiny_runs import Command
from trec_files import TREC_DIR, needs_trec

GREETINGS = (
    "صباح الخير", "শুভ সকাল", "Dobré ráno", "Godmorgen", "Schöne Grüße", "Καλημέρα", "Good morning",
    "¡Buenos días!", "Hyvää huomenta", "Ça va bien ?", "בוקר טוב", "सुप्रभात", "おはようございます",
    "좋은 아침입니다", "Dzień dobry", "Доброе утро", "காலை வணக்கம்", "อรุณสวัสดิ์", "Teşekkürler",
    "早上好",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save_tiny_model(tmp_path / "model")


def write_table(
    name: str, header: tuple[str, str], rows: Iterable[tuple[str, object]], *, delimiter: str = ","
) -> Path:
    with Path(name).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return Path(name)


def train_from_init(command: Command, table: Path, model: Path) -> str:
    """Type the two commands, the second quick, and return what the run emitted."""
    started = command("init", table, "--model", model)
    assert started.code == 0, started.errors
    outcome = command(
        "run", "--config", table.with_suffix(".yaml"), "--device", "cpu", "--max-steps", "2"
    )
    assert outcome.code == 0, outcome.errors
    return outcome.errors


@needs_trec
def test_trec_with_fine_labels_as_csv(command: Command, model: Path) -> None:
    lines = (TREC_DIR / "train_5500.label").read_text(encoding="latin-1").splitlines()
    pairs = (line.split(" ", 1) for line in lines)
    table = write_table("trec.csv", ("question", "kind"), ((text, label) for label, text in pairs))
    assert "50 classes" in train_from_init(command, table, model)


def test_texts_of_twenty_languages_with_emoji_and_line_breaks(
    command: Command, model: Path
) -> None:
    rows = (
        (f'{greeting} {emoji}\n"{greeting}", {number}', greeting[:3].strip())
        for greeting in GREETINGS
        for number, emoji in enumerate(("😀", "👩🏽‍🚀", "🇨🇭", "❤️", "🎉", "🌍") * 2)
    )
    table = write_table("greetings.csv", ("what was said", "where"), rows)
    assert "20 classes" in train_from_init(command, table, model)


def test_numbers_with_gaps_as_labels_between_semicolons(command: Command, model: Path) -> None:
    rows = ((f"ticket {number} says what number {number % 3} says", (3, 70, 1000)[number % 3])
            for number in range(60))  # fmt: skip
    table = write_table("tickets.csv", ("description", "queue"), rows, delimiter=";")
    emitted = train_from_init(command, table, model)
    assert "48 train, 6 validation, 6 test rows, 3 classes" in emitted
