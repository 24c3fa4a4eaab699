"""Loads datasets on the Hub that consist of table files; scripts are never run."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from finetune import hub
from finetune.config.schema import HUB_PREFIX, DataConfig
from finetune.data.dataset import DataSource, LoadedData
from finetune.data.read import SUFFIXES
from finetune.data.tables import read_tables
from finetune.data.words import SPLIT_BY_WORD
from finetune.errors import DataError, DataNotFoundError, HubNotReachableError
from finetune.events import Info, emit

# In this branch the Hub keeps a Parquet copy of most datasets, including datasets with a script.
CONVERTED_BRANCH = "refs/convert/parquet"
PARQUET = ".parquet"
# If several folders have the same splits, one of these names contains the whole dataset.
MAIN_FOLDERS = ("", "data", "default")


def load_from_hub(options: DataConfig) -> LoadedData:
    """Load a dataset on the Hub, or a part of it: ``hub:OWNER/NAME:PART@REVISION``.

    Parquet files come first: original files, then files that the Hub converted.
    """
    source, _, revision = options.data.removeprefix(HUB_PREFIX).partition("@")
    name, _, part = source.partition(":")
    emit(Info(f"loading {name} from the Hub"))
    repositories, unreachable = [], None
    branches = [revision] if revision else [None, CONVERTED_BRANCH]
    for branch in branches:
        try:
            repositories.append(hub.resolve("dataset", name, revision=branch))
            unreachable = unreachable or repositories[-1].unreachable
        except HubNotReachableError as error:
            unreachable = error  # the cache may hold the files of another branch
        except DataNotFoundError:
            if branch == branches[0]:
                raise
    for suffix, repository in product((PARQUET, *SUFFIXES), repositories):
        if splits := find_splits(repository.files, part or None, suffix=suffix):
            break
    else:
        raise unreachable or DataNotFoundError(
            f"the dataset {name!r} has no complete training split in one of the formats"
            f" {', '.join(SUFFIXES)}",
            remedy="choose another; if it is made by a script, which is never run, save its rows"
            " as a file and name that as --data",
        )
    # The training split comes last, so that a cache that holds it holds everything.
    repository.fetch(file for split in splits.keys() - {"train"} for file in splits[split])
    folder = repository.fetch(splits["train"])
    paths = {split: [folder / file for file in files] for split, files in splits.items()}
    loaded = read_tables(paths, options)
    return replace(loaded, sources=(DataSource(HUB_PREFIX + source, commit=repository.commit),))


def find_splits(
    names: Iterable[str], part: str | None = None, *, suffix: str
) -> dict[str, list[str]]:
    """Return the files of each split, in their order, or nothing if ``train`` is not complete.

    The name of the file or of its folder determines the split: ``train.csv``,
    ``data/train-00000-of-00002.parquet``, ``default/train/0000.parquet``.
    """
    pattern = re.compile(
        rf"(?:(.*)/)?({'|'.join(SPLIT_BY_WORD)})(?:[-_.]?\d[^/]*|/[^/]+)?{re.escape(suffix)}"
    )
    folders: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(names):
        if match := pattern.fullmatch(name):
            folder, word = match.groups()
            folders[folder or ""][SPLIT_BY_WORD[word]].append(name)
    whole = {
        folder: {split: files for split, files in splits.items() if _is_complete(files)}
        for folder, splits in folders.items()
    }
    candidates = {folder: splits for folder, splits in whole.items() if "train" in splits}
    parts = {Path(folder).name: folder for folder in candidates}
    if part in parts:
        return candidates[parts[part]]
    if candidates and part is not None:
        raise DataNotFoundError(
            f"the repository holds no dataset {part!r}, but {', '.join(parts)}",
            remedy="name one of them as --data hub:OWNER/NAME:PART",
        )
    if len(candidates) > 1 and not candidates.keys() & set(MAIN_FOLDERS):
        raise DataError(
            f"the repository holds several datasets: {', '.join(parts)}",
            remedy=f"name one, such as --data hub:OWNER/NAME:{min(parts)}",
        )
    main = min(candidates, key=lambda folder: folder not in MAIN_FOLDERS, default="")
    return candidates.get(main, {})


def _is_complete(files: Sequence[str]) -> bool:
    """Return whether all numbered parts of a split are present; numbers start at 0."""
    numbers = (re.search(r"(\d+)-of-(\d+)|/(\d+)\.\w+$", name) for name in files)
    parts = list(filter(None, numbers))
    counts = {int(part[2]) for part in parts if part[2]} or {len(files)}
    return not parts or {int(part[1] or part[3]) for part in parts} == set(range(max(counts)))
