"""Find the data that a name stands for."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from datasets import DatasetDict

from finetune.data.files import SUFFIXES
from finetune.data.hub_tables import fetch_splits
from finetune.data.questions import load_questions
from finetune.data.tables import read_tables
from finetune.data.trec import load_trec
from finetune.errors import UsageError
from finetune.events import Emit, Stage

SOURCES = ("trec", "questions")
HUB_PREFIX = "hub:"
OPTIONS_OF_KIND = {
    "trec": ("--data-dir", "--label"),
    "questions": (),
    "a file": ("--validation-file", "--test-file", "--text-column", "--label-column"),
    "a set of the Hub": ("--text-column", "--label-column"),
}


def load_table(
    source: str,
    *,
    folder: Path | None,
    label: str,
    validation_file: Path | None,
    test_file: Path | None,
    text_column: str | None,
    label_column: str | None,
    emit: Emit,
) -> DatasetDict:
    """Return the splits of a source, at least ``train``, with the columns ``text`` and ``label``.

    Args:
        source: ``trec``; ``questions``, which comes with the package; a file; or
            ``hub:owner/name``, maybe with ``@revision``, for a data set of the Hub.
        folder: Where TREC's raw files are; ``None`` to fetch them.
        label: ``label-coarse`` or, for TREC, ``label-fine``.
        validation_file: The validation split of a file.
        test_file: The test split of a file.
        text_column: Column of the texts in files and sets of the Hub; ``None`` to guess it.
        label_column: Column of their classes; ``None`` to guess it.
        emit: Is told what is read.

    Raises:
        UsageError: If the source is unknown or does not know one of the options.
        DataError: If the data is missing, damaged or unreadable.
        HubNotReachable: If it can't be fetched and the cache does not hold it.
    """
    kind = _kind_of(source)
    _refuse_foreign_options(
        {
            "--data-dir": folder,
            "--label": None if label == "label-coarse" else label,
            "--validation-file": validation_file,
            "--test-file": test_file,
            "--text-column": text_column,
            "--label-column": label_column,
        },
        source=source,
        kind=kind,
    )
    match kind:
        case "trec":
            return load_trec(folder=folder, label=label, emit=emit)
        case "questions":
            emit(Stage("reading the questions that come with the package"))
            return load_questions()
        case "a set of the Hub":
            repository, _, revision = source.removeprefix(HUB_PREFIX).partition("@")
            files = fetch_splits(repository, revision=revision or None, emit=emit)
        case _:
            files = _files_of(source, validation_file=validation_file, test_file=test_file)
    return read_tables(
        files,
        text_column=text_column,
        label_column=label_column,
        needs_all_labels=kind == "a file",
        emit=emit,
    )


def source_name(source: str) -> str:
    """Return a short name for a source, fit for a folder.

    >>> source_name("data/reviews.csv"), source_name("hub:owner/name@refs/pr/1")
    ('reviews', 'name')
    """
    if source.startswith(HUB_PREFIX):
        return Path(source.removeprefix(HUB_PREFIX).partition("@")[0]).name
    return Path(source).stem


def _kind_of(source: str) -> str:
    if source in SOURCES:
        return source
    if source.startswith(HUB_PREFIX):
        return "a set of the Hub"
    path = Path(source).expanduser()
    if path.suffix.lower() in SUFFIXES or path.is_file():
        return "a file"
    raise _unknown(source)


def _refuse_foreign_options(options: Mapping[str, object], *, source: str, kind: str) -> None:
    for option, value in options.items():
        if value is not None and option not in OPTIONS_OF_KIND[kind]:
            owners = [owner for owner, taken in OPTIONS_OF_KIND.items() if option in taken]
            raise UsageError(
                f"--data {source} takes no {option} (here {value})",
                remedy=f"leave it out: it goes with {' or '.join(owners)}",
            )


def _files_of(
    source: str, *, validation_file: Path | None, test_file: Path | None
) -> dict[str, list[Path]]:
    given = {"train": Path(source), "validation": validation_file, "test": test_file}
    files = {split: [path.expanduser()] for split, path in given.items() if path is not None}
    if len({path.resolve() for [path] in files.values()}) < len(files):
        raise UsageError(
            "one file is named for two splits",
            remedy="leave out --validation-file or --test-file: rows of --data are held out then",
        )
    return files


def _unknown(source: str) -> UsageError:
    guesses = get_close_matches(source.casefold(), SOURCES, n=1)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@.+)?", source) and not guesses:
        guesses = [HUB_PREFIX + source]
    kinds = f"{', '.join(SOURCES)}, a file ({', '.join(SUFFIXES)}) or {HUB_PREFIX}OWNER/NAME"
    return UsageError(
        f"there is no data {source!r}",
        remedy=(f"did you mean {guesses[0]}? " if guesses else "") + f"--data takes {kinds}",
    )
