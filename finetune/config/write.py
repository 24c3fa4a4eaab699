"""New configuration files."""

from pathlib import Path

from finetune.errors import UsageError


def write_new_file(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        UsageError: If there is one of that name, or it can't be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} is already there", remedy="name another file") from error
    except OSError as error:
        raise UsageError(
            f"{path} can't be written: {error.strerror}",
            remedy="name a file in a folder that is there and may be written",
        ) from error
