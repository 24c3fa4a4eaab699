"""Saves a classifier and its tokenizer to a folder, whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils import logging

from finetune.files import writing_folder
from finetune.model.load import Classifier


def save_classifier(classifier: Classifier, folder: Path) -> None:
    """Save a classifier as ``save_pretrained`` does; at any moment the folder is whole or absent.

    The folder's parent exists. A classifier that is there is replaced.
    """
    classifier.task.configure(classifier.model.config)
    with writing_folder(folder) as partial:
        with _no_progress_bar():
            classifier.model.save_pretrained(partial)
        classifier.tokenizer.save_pretrained(partial)
        # safetensors keeps its files from all other users; Python's are as the user's umask says.
        permissions = (partial / "config.json").stat().st_mode & 0o777
        for file in partial.iterdir():
            file.chmod(permissions)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
