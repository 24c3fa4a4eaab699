"""Saves a classifier and its tokenizer to a folder, whole or not at all."""

import os
import shutil
from pathlib import Path

from finetune.files import PARTIAL_SUFFIX, flush_to_disk
from finetune.model.load import Classifier


def save_classifier(classifier: Classifier, folder: Path) -> None:
    """Save a classifier as ``save_pretrained`` does; at any moment the folder is whole or absent.

    Args:
        classifier: On any device.
        folder: Where to; its parent exists. A classifier that is there is replaced.
    """
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)
    classifier.model.save_pretrained(partial)
    classifier.tokenizer.save_pretrained(partial)
    # safetensors keeps its files from all other users; Python's files are as the user's umask says.
    permissions = (partial / "config.json").stat().st_mode & 0o777
    for file in partial.iterdir():
        file.chmod(permissions)
        flush_to_disk(file)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(partial, folder)
