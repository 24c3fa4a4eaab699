"""Find the data that a name stands for."""

from difflib import get_close_matches
from pathlib import Path

from datasets import DatasetDict

from finetune.data.questions import load_questions
from finetune.data.trec import load_trec
from finetune.errors import UsageError
from finetune.events import Stage, Tell

SOURCES = ("trec", "questions")


def load_table(source: str, *, folder: Path | None, label: str, tell: Tell) -> DatasetDict:
    """Return the splits of a source, at least ``train``, with the columns ``text`` and ``label``.

    Args:
        source: ``trec``, or ``questions``, which comes with the package.
        folder: Where TREC's raw files are; ``None`` to fetch them.
        label: ``label-coarse`` or, for TREC, ``label-fine``.
        tell: Is told what is read.

    Raises:
        UsageError: If the source is unknown or does not know the folder or the label.
        DataError: If the data is missing, damaged or unreadable.
        HubNotReachable: If it can't be fetched and the cache does not hold it.
    """
    match source:
        case "trec":
            return load_trec(folder=folder, label=label, tell=tell)
        case "questions":
            _refuse_options_of_trec(folder=folder, label=label)
            tell(Stage("reading the questions that come with the package"))
            return load_questions()
    guesses = get_close_matches(source.casefold(), SOURCES, n=1)
    raise UsageError(
        f"there is no data {source!r}",
        remedy=(f"did you mean {guesses[0]}? " if guesses else "")
        + f"--data takes {' or '.join(SOURCES)}",
    )


def _refuse_options_of_trec(*, folder: Path | None, label: str) -> None:
    if folder is not None:
        raise UsageError(
            "--data questions comes with the package and reads no folder",
            remedy="leave out --data-dir, or take --data trec",
        )
    if label != "label-coarse":
        raise UsageError(
            f"--data questions has no label {label!r}",
            remedy="leave out --label, or take --data trec",
        )
