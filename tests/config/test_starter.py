from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.config.load import load_config
from finetune.config.schema import SECTION_OF_OPTION, Config
from finetune.config.starter import MAX_LINE, make_starter, write_new_file
from finetune.errors import UsageError

DEFAULTS = {
    option: value for section in asdict(Config()).values() for option, value in section.items()
}


def load(text: str, folder: Path) -> Config:
    file = folder / "starter.yaml"
    file.write_text(text, encoding="utf-8")
    return load_config(file=str(file), environment={}, flags={}, assignments=()).config


def starter(values: dict[str, Any], **notes: str) -> str:
    return make_starter(values, notes=notes, heading="Made for a test.")


def test_what_is_not_the_default_is_loaded(tmp_path: Path) -> None:
    config = load(starter({"data": "mine.csv", "max_length": 64}), tmp_path)
    assert (config.data.data, config.model.max_length) == ("mine.csv", 64)


def test_a_default_is_a_comment_that_loads_once_its_mark_is_gone(tmp_path: Path) -> None:
    text = starter(DEFAULTS)
    assert yaml.safe_load(text) == {section.name: None for section in fields(Config)}
    names = [f"  # {option}: " for option in DEFAULTS]
    active = [
        line.replace("# ", "", 1) if line.startswith(tuple(names)) else line
        for line in text.splitlines()
    ]
    assert yaml.safe_load("\n".join(active)) == asdict(Config())


@pytest.mark.parametrize(
    "name",
    [
        "yes",
        "1",
        "",
        " a",
        "a: b",
        "# a",
        "größe",
        "😀",
        "a\nb",
        "a\u2028b",
        "\x07",
        "a " * 99,
        "'\"",
    ],
)
def test_any_name_of_a_column_is_read_back(name: str, tmp_path: Path) -> None:
    assert load(starter({"text_column": name}), tmp_path).data.text_column == name


def test_each_option_is_explained_by_its_help_and_a_note() -> None:
    lines = starter({"max_length": 64, "seed": 7}, seed="Any number will do.").splitlines()
    comments = " ".join(line.strip(" #") for line in lines)
    assert "Maximum length of a text in tokens; the rest is truncated. max_length: 64" in comments
    assert "order of the examples and dropout. Any number will do. seed: 7" in comments


def test_no_comment_is_longer_than_a_line() -> None:
    text = starter(DEFAULTS, seed="word " * 99)
    assert max(map(len, text.splitlines())) <= MAX_LINE


def test_options_stand_in_the_order_of_the_schema_whatever_the_order_they_come_in() -> None:
    backwards = {option: "other" for option in reversed(SECTION_OF_OPTION)}
    sections = yaml.safe_load(starter(backwards))
    assert [option for options in sections.values() for option in options] == list(
        SECTION_OF_OPTION
    )


def test_a_section_without_options_is_left_out() -> None:
    assert yaml.safe_load(starter({"label": "x"})) == {"data": {"label": "x"}}


def test_a_new_file_holds_the_text(tmp_path: Path) -> None:
    write_new_file(tmp_path / "new.yaml", "# größe\n")
    assert (tmp_path / "new.yaml").read_bytes() == "# größe\n".encode()


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        write_new_file(file, "other")
    assert file.read_text() == "mine"


def test_a_folder_that_is_not_there_is_a_wrong_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be written: No such file or directory"):
        write_new_file(tmp_path / "missing" / "new.yaml", "")
    assert list(tmp_path.iterdir()) == []
