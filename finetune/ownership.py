"""Decides which files this package may replace or delete.

A folder belongs to this package if its ``manifest.json`` has this tool and the kind of folder. Each
kind has a fixed list of file names. Only files with these names are deleted, and then empty
folders. All other files and all links stay.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, Self

from finetune.errors import NotARunError, UsageError
from finetune.files import (
    PARTIAL_SUFFIX,
    SUMS,
    is_there,
    locked,
    read_bytes,
    write_json,
    write_text_atomically,
)

MANIFEST, LOCK = "manifest.json", ".finetune.lock"
# The Finder of macOS writes .DS_Store into every folder that it shows.
IGNORED = frozenset({LOCK, ".DS_Store"})
CONTENTS = {
    "run": "a single run",
    "seeds": "runs of several seeds",
    "folds": "the folds of a cross-validation",
    "sweep": "the trials of a sweep",
}
# The end of the name of a temporary file or folder.
_TEMPORARY = f".{'[0-9a-f]' * 32}{PARTIAL_SUFFIX}"
_MODEL = [
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "bpe.codes"),
    *("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"),
    *("config.json", "README.md", SUMS),
]
_CHECKPOINT = [
    *(f"{group}.safetensors" for group in ("model", "optimizer", "random", "best")),
    "state.json",
]
_TABLE = f"table-{'[0-9a-f]' * 8}.parquet"
_SEVERAL = [_TABLE, "predictions.jsonl", "report.html", SUMS]
# For each kind of folder, in the order in which they are written.
NAMES: Mapping[str, list[str]] = {
    "run": [
        *(_TABLE, "config.yaml", "environment.json", "metrics.jsonl", "warnings.jsonl"),
        *("tensorboard/**/events.out.tfevents.*", "tensorboard/**/hparams.yml"),
        *(f"checkpoints/step-[0-9]*/{name}" for name in (*_CHECKPOINT, MANIFEST)),
        *(f"adapter/{name}" for name in ("adapter_model.safetensors", *_MODEL)),
        *("adapter/adapter_config.json", "model/model.safetensors"),
        *(f"model/{name}" for name in ("inference.json", "confidences.json", *_MODEL)),
        *("predictions.jsonl", "report.html", "all_results.json", SUMS, "bundle.zip"),
    ],
    "seeds": ["seeds.json", *_SEVERAL],
    "folds": ["folds.json", *_SEVERAL],
    "sweep": ["sweep.json", "best.yaml", *_SEVERAL],
    "onnx": ["model.onnx", "model.onnx.data", "model_quantized.onnx", "verified.json", *_MODEL],
    "bundle": [
        *("model.onnx", "model.onnx.data", "tokenizer.json", "inference.json", "README.md"),
        *("config.json", "config.yaml", "confidences.json", "all_results.json", "verified.json"),
        *("requirements.txt", "Dockerfile", "classify.py", SUMS),
    ],
    "audit": ["suspects.csv", "audit.html"],
    "bench": ["bench.json", "bench.html"],
    "find-batch": ["find-batch.json"],
}


class OwnFolder:
    """An output folder of one kind. It need not exist yet."""

    kind: str

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.manifest_file = path / MANIFEST

    @property
    def is_ours(self) -> bool:
        """Whether this package made the folder, for this kind of files."""
        return _kind_of(self.path) == self.kind

    @property
    def parts(self) -> "list[OwnFolder]":
        """Output folders in this folder, which are deleted with it."""
        return []

    def files(self, under: str = "", *, only_temporary: bool = False) -> list[Path]:
        """Return the files in a subfolder that this package wrote, complete or not."""
        root, names = self.path.resolve(), NAMES[self.kind]
        patterns = [] if only_temporary else [*names]
        for folder in {PurePath(name).parent for name in names}:
            patterns += [f"{folder}/*{_TEMPORARY}", f"{folder}/{_TEMPORARY}/*"]
        return [
            path
            for path in dict.fromkeys(path for name in patterns for path in self.path.glob(name))
            if path.is_file() and path.is_relative_to(self.path / under)
            if path.resolve() == root / path.relative_to(self.path)  # not through a link
        ]

    def delete(self, under: str = "", *, only_temporary: bool = False) -> None:
        """Delete the files of this package in a subfolder, the newest first, and empty folders."""
        for path in reversed(self.files(under, only_temporary=only_temporary)):
            path.unlink(missing_ok=True)
        for folder, _, _ in os.walk(self.path, topdown=False):
            if Path(folder).is_relative_to(self.path / under) and Path(folder) != self.path:
                with suppress(OSError):
                    os.rmdir(folder)

    def empty(self) -> list[str]:
        """Delete all files of this package but the manifest; return the names of other files."""
        for part in self.parts:
            if part.is_ours and not part.path.is_symlink() and not part.empty():
                part.manifest_file.unlink()
        self.delete()
        files = (path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir())
        names = {str(path.relative_to(self.path)) for path in files if path.name not in IGNORED}
        return sorted(names - {MANIFEST})

    def check(self, *, overwrite: bool = True) -> None:
        """Raise ``UsageError`` if files of this kind must not be written to the folder."""
        check_writable(self.path)
        if not is_there(self.path):
            return
        kind, another = _kind_of(self.path), "choose another folder with --output-dir"
        # A process may have been killed while it wrote the manifest.
        others = {*self.path.iterdir()}.difference(self.files(only_temporary=True))
        if kind is None and not {path.name for path in others} <= IGNORED:
            raise UsageError(
                f"{self.path} contains files that finetune did not write",
                remedy=f"{another}, or move the files away",
            )
        if kind not in (None, self.kind) or (kind and not overwrite and self.files()):
            contents = CONTENTS.get(str(kind), f"the files of finetune {kind}")
            remedy = another
            if kind == self.kind:
                remedy = "continue with --resume-from-checkpoint, start over with --overwrite, or "
                remedy += another
            raise UsageError(f"{self.path} already contains {contents}", remedy=remedy)
        for name in NAMES[self.kind]:
            for part in (file := PurePath(name), *file.parents[:-1]):
                path = self.path / part
                if path.is_symlink() or (path.exists() and path.is_dir() == (part == file)):
                    raise UsageError(
                        f"{path} blocks a file of the same name",
                        remedy=f"move it away, or {another}",
                    )

    @contextmanager
    def make(self, *, overwrite: bool = True, exist_ok: bool = True) -> Iterator[Self]:
        """Make the folder and lock it; delete it again if it stays empty."""
        if exist_ok:
            self.check(overwrite=overwrite)
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        # One system call, which fails if another process was first.
        self.path.mkdir(parents=True, exist_ok=exist_ok)
        try:
            with locked(self.path / LOCK):
                # Another process may have used the folder since the first check.
                self.check(overwrite=overwrite)
                self.delete(only_temporary=True)  # of processes that were killed
                if not self.is_ours:
                    write_json(self.manifest_file, {"tool": "finetune", "kind": self.kind})
                try:
                    yield self
                finally:
                    with suppress(OSError):
                        if {path.name for path in self.path.iterdir()} <= {*IGNORED, MANIFEST}:
                            self.manifest_file.unlink()
        finally:
            with suppress(OSError):
                for folder in missing:
                    folder.rmdir()

    @contextmanager
    def lock(self) -> Iterator[Self]:
        """Lock the existing folder for this process."""
        if not self.is_ours:
            raise NotARunError(
                f"{self.manifest_file} does not show that finetune made the folder",
                remedy="restore the file, or train again",
            )
        with locked(self.path / LOCK):
            yield self

    def write_all(self, files: Mapping[str, str | Mapping[str, Any]]) -> None:
        """Make the folder, and write or replace text files and, for mappings, JSON files."""
        with self.make():
            for name, content in files.items():
                write: Any = write_text_atomically if isinstance(content, str) else write_json
                write(self.path / name, content)


def check_writable(path: Path) -> None:
    """Raise ``UsageError`` if a folder can't be created, or can't be written to."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "can't be written to" if existing.is_dir() else "is a file"
        remedy = "choose another folder with --output-dir"
        raise UsageError(f"{existing} {reason}", remedy=remedy)


def check_output_file(path: Path, *, overwrite: bool | None = None) -> None:
    """Raise ``UsageError`` if a file exists and can't be overwritten, such as a file of a run.

    ``overwrite`` is None for commands without this option.
    """
    if not os.path.lexists(path):
        return
    for folder in path.absolute().parents:
        kind = _kind_of(folder)
        if kind and path.absolute() in (folder / MANIFEST, *OwnFolder(folder, kind).files()):
            raise UsageError(f"{path} is a file of {folder}", remedy="choose another file")
    if not path.is_file():
        raise UsageError(f"{path} is not a file", remedy="choose the name of a file")
    if not overwrite:
        remedy = "choose another file"
        if overwrite is False:
            remedy += ", or replace it with --overwrite"
        raise UsageError(f"{path} already exists", remedy=remedy)


def _kind_of(path: Path) -> str | None:
    """Return the kind of a folder that this tool made, or None for other folders."""
    try:
        file = path / MANIFEST
        content = json.loads(read_bytes(file)) if file.is_file() else {}
        kind = content["kind"] if content["tool"] == "finetune" else None
        return kind if kind in NAMES else None
    except (ValueError, LookupError, TypeError):
        return None
