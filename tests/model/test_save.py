import os
import stat
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny_model
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from finetune.model.load import TextModel, load_model
from finetune.model.save import save_model
from finetune.tasks.single import Single

NAMES = ["good", "bad"]


def load(folder: Path) -> TextModel:
    return load_model(
        str(folder), revision=None, task=Single(NAMES), from_scratch=False, emit=lambda event: None
    )


@pytest.fixture
def text_model(tmp_path: Path) -> TextModel:
    return load(save_tiny_model(tmp_path / "pretrained"))


def test_a_saved_classifier_comes_back_bit_for_bit(text_model: TextModel, tmp_path: Path) -> None:
    save_model(text_model, tmp_path / "model")

    again = load(tmp_path / "model")

    for name, tensor in text_model.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)
    assert again.tokenizer.get_vocab() == text_model.tokenizer.get_vocab()
    assert again.structure == replace(text_model.structure, new=frozenset())
    assert list(again.task.class_names) == NAMES


def test_saving_and_loading_show_no_bar_and_no_report_and_leave_those_of_others(
    text_model: TextModel, tiny_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    was_enabled, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.set_verbosity_warning()
    for set_progress_bars in (logging.enable_progress_bar, logging.disable_progress_bar):
        set_progress_bars()
        enabled = logging.is_progress_bar_enabled()
        save_model(text_model, tmp_path / "model")
        load(tiny_folder)
        assert logging.is_progress_bar_enabled() == enabled
        assert logging.get_verbosity() == WARNING
    (logging.enable_progress_bar if was_enabled else logging.disable_progress_bar)()
    logging.set_verbosity(level)

    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_files_have_the_permissions_that_the_user_gives_to_files(
    umask: int, text_model: TextModel, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        save_model(text_model, tmp_path / "model")
    finally:
        os.umask(before)

    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "model").iterdir()}
    assert modes == {0o666 & ~umask}


def test_a_failure_halfway_leaves_what_was_there_and_can_be_made_good(
    text_model: TextModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "model"
    save_model(text_model, folder)
    (folder / "README.md").write_text("of the first")
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
        with pytest.raises(OSError, match="No space"):
            save_model(text_model, folder)
    assert (folder / "README.md").read_text() == "of the first"

    save_model(text_model, folder)

    assert not (folder / "README.md").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "pretrained"]
    load(folder)
