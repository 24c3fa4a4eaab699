"""The names of the data."""

from pathlib import Path

import pytest

from finetune.data.load import load_table
from finetune.errors import UsageError
from finetune.events import Event, Stage


def test_the_questions_of_the_package_need_nothing_else() -> None:
    told: list[Event] = []
    table = load_table("questions", folder=None, label="label-coarse", tell=told.append)
    assert set(table) == {"train", "test"}
    assert table["train"].column_names == ["text", "label"]
    assert [type(event) for event in told] == [Stage]


def test_trec_is_read_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "train_5500.label").write_text("NUM:date When was paper invented ?\n")
    table = load_table("trec", folder=tmp_path, label="label-fine", tell=lambda event: None)
    assert table["train"]["text"][0] == "When was paper invented ?"


@pytest.mark.parametrize(
    ("name", "guess"), [("TREC", "trec"), ("question", "questions"), ("imdb", "")]
)
def test_an_unknown_name_gets_a_list_and_a_guess(name: str, guess: str) -> None:
    with pytest.raises(UsageError, match=name) as raised:
        load_table(name, folder=None, label="label-coarse", tell=lambda event: None)
    assert "trec or questions" in raised.value.remedy
    assert (f"did you mean {guess}?" in raised.value.remedy) == bool(guess)


def test_the_questions_of_the_package_refuse_options_of_trec(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="folder"):
        load_table("questions", folder=tmp_path, label="label-coarse", tell=lambda event: None)
    with pytest.raises(UsageError, match="label-fine"):
        load_table("questions", folder=None, label="label-fine", tell=lambda event: None)
