"""Saves a model and its tokenizer to a folder, whole or not at all."""

from pathlib import Path

from finetune.files import writing_folder
from finetune.model.load import TextModel
from finetune.model.silence import silence_transformers


def save_model(text_model: TextModel, folder: Path) -> None:
    """Save a model as ``save_pretrained`` does; at any moment the folder is whole or absent.

    The folder's parent exists. A model that is there is replaced.
    """
    text_model.task.configure(text_model.model.config)
    with writing_folder(folder) as partial:
        with silence_transformers():
            text_model.model.save_pretrained(partial)
        text_model.tokenizer.save_pretrained(partial)
        # safetensors keeps its files from all other users; Python's are as the user's umask says.
        permissions = (partial / "config.json").stat().st_mode & 0o777
        for file in partial.iterdir():
            file.chmod(permissions)
