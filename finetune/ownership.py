"""Which files are ours: the one rule by which files in a folder are replaced or deleted.

A folder is ours if its ``manifest.json`` names this tool and the folder's kind. Each kind has a
fixed list of the names that we write. Only files of these names are deleted, then folders that are
empty. All other files, and every link, belong to somebody else and stay.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any, Self

from finetune.errors import NotARunError, RunFolderNotEmptyError, UsageError
from finetune.files import TEMPORARY, is_there, locked, read_json, write_json, write_text_atomically

MANIFEST, LOCK = "manifest.json", ".finetune.lock"
# macOS puts .DS_Store into every folder that the Finder has shown.
IGNORED = frozenset({LOCK, ".DS_Store"})
CONTENTS = {
    "run": "a single run",
    "seeds": "runs of several seeds",
    "folds": "the folds of a cross-validation",
    "sweep": "the trials of a sweep",
}
_MODEL = [
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "bpe.codes"),
    *("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"),
    *("config.json", "README.md"),
]
_CHECKPOINT = ["model.safetensors", "optimizer.safetensors", "random.safetensors", "state.json"]
_TABLE = f"table-{'[0-9a-f]' * 8}.parquet"
_SEVERAL = [_TABLE, "predictions.jsonl", "report.html"]
# By the kind of a folder, in the order in which they are written.
NAMES: Mapping[str, list[str]] = {
    "run": [
        *(_TABLE, "config.yaml", "environment.json", "metrics.jsonl", "warnings.jsonl"),
        *("tensorboard/**/events.out.tfevents.*", "tensorboard/**/hparams.yml"),
        *(f"checkpoints/best-[0-9]*/{name}" for name in (*_CHECKPOINT, MANIFEST)),
        *(f"checkpoints/step-[0-9]*/{name}" for name in (*_CHECKPOINT, MANIFEST)),
        *(f"adapter/{name}" for name in ("adapter_model.safetensors", *_MODEL)),
        *("adapter/adapter_config.json", "model/model.safetensors"),
        *(f"model/{name}" for name in ("inference.json", "confidences.json", *_MODEL)),
        *("predictions.jsonl", "report.html", "all_results.json"),
    ],
    "seeds": ["seeds.json", *_SEVERAL],
    "folds": ["folds.json", *_SEVERAL],
    "sweep": ["sweep.json", "best.yaml", *_SEVERAL],
    "onnx": ["model.onnx", "model.onnx.data", "model_quantized.onnx", *_MODEL],
    "audit": ["suspects.csv", "to_label.csv", "audit.html"],
    "bench": ["bench.json", "bench.html"],
    "find-batch": ["find-batch.json"],
}


class OwnFolder:
    """A folder that we make for one kind of files; it need not exist."""

    kind: str

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        self.manifest_file = path / MANIFEST

    @property
    def is_ours(self) -> bool:
        """Whether this tool made the folder, for files of this kind."""
        return _kind_of(self.path) == self.kind

    @property
    def parts(self) -> "list[OwnFolder]":
        """Folders in this one that are deleted with it if they are ours."""
        return []

    def files(self, under: str = "") -> list[Path]:
        """Return our files below a folder, including leftovers of a killed process."""
        root, paths = self.path.resolve(), dict[Path, None]()
        for name in (MANIFEST, *NAMES[self.kind]):
            for pattern in (name, name + TEMPORARY, f"{PurePath(name).parent}/{TEMPORARY}/*"):
                paths |= dict.fromkeys(self.path.glob(pattern))
        paths.pop(self.manifest_file, None)
        return [
            path
            for path in paths
            if path.is_file() and path.is_relative_to(self.path / under)
            if path.resolve() == root / path.relative_to(self.path)  # not through a link
        ]

    def delete(self, under: str = "", *, only_temporary: bool = False) -> None:
        """Delete our files below a folder, the last written first, and folders that are empty."""
        for path in reversed(self.files(under)):
            if not only_temporary or fnmatch(str(path), f"*{TEMPORARY}*"):
                path.unlink(missing_ok=True)
        patterns = {str(folder) for name in NAMES[self.kind] for folder in PurePath(name).parents}
        for pattern in sorted(patterns - {"."}, reverse=True):
            for place in [*self.path.glob(f"{pattern}/{TEMPORARY}"), *self.path.glob(pattern)]:
                with suppress(OSError):
                    place.rmdir()

    def empty(self) -> list[str]:
        """Delete all our files but the manifest; return the relative names of what stays."""
        for part in self.parts:
            if part.is_ours and not part.path.is_symlink() and not part.empty():
                part.manifest_file.unlink()
                with suppress(OSError):
                    part.path.rmdir()
        self.delete()
        files = (path for path in self.path.rglob("*") if path.is_symlink() or not path.is_dir())
        names = {str(path.relative_to(self.path)) for path in files if path.name not in IGNORED}
        return sorted(names - {MANIFEST})

    def check(self) -> bool:
        """Return whether there are files of ours; UsageError unless it is new, empty or ours."""
        another = "choose another folder with --output-dir"
        check_writable(self.path)
        if not is_there(self.path):
            return False
        if (kind := _kind_of(self.path)) == self.kind:
            return bool(self.files())
        if kind:
            contents = CONTENTS.get(kind, f"the files of finetune {kind}")
            raise RunFolderNotEmptyError(f"{self.path} already holds {contents}", remedy=another)
        if not {path.name for path in self.path.iterdir()} <= IGNORED:
            raise RunFolderNotEmptyError(
                f"{self.path} holds files that finetune did not write",
                remedy=f"{another}, or move the files away",
            )
        return False

    @contextmanager
    def make(self, *, exist_ok: bool = True) -> Iterator[Self]:
        """Make the folder and lock it; what stays empty is deleted again."""
        if exist_ok:
            self.check()
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        # One system call, which fails if another process was first.
        self.path.mkdir(parents=True, exist_ok=exist_ok)
        try:
            with self._locked():
                self.check()  # another process may have used it since the first look
                if not self.is_ours:
                    write_json(self.manifest_file, {"tool": "finetune", "kind": self.kind})
                yield self
        finally:
            with suppress(OSError):
                for folder in missing:
                    folder.rmdir()

    @contextmanager
    def lock(self) -> Iterator[Self]:
        """Lock the existing folder for this process."""
        if not self.is_ours:
            raise NotARunError(
                f"{self.manifest_file} does not say that finetune made the folder",
                remedy="restore it, or make the run again",
            )
        with self._locked():
            yield self

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with locked(self.path / LOCK):
            try:
                yield
            finally:
                with suppress(OSError):
                    is_empty = {path.name for path in self.path.iterdir()} <= {*IGNORED, MANIFEST}
                    if is_empty and self.is_ours:
                        self.manifest_file.unlink()

    def write_all(self, files: Mapping[str, str | Mapping[str, Any]]) -> None:
        """Make the folder, and write texts, and mappings as JSON, in place of earlier ones."""
        with self.make():
            for name, content in files.items():
                if isinstance(content, str):
                    write_text_atomically(self.path / name, content)
                else:
                    write_json(self.path / name, content)


def check_writable(path: Path) -> None:
    """Raise ``UsageError`` if a folder can't be created, or written to."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "may not be written to" if existing.is_dir() else "is a file"
        remedy = "choose another folder with --output-dir"
        raise UsageError(f"{existing} {reason}", remedy=remedy)


def check_output_file(path: Path, *, overwrite: bool | None = None) -> None:
    """Raise ``UsageError`` for a file that exists, unless it may be overwritten.

    A file of a run or the like never may. None is for commands without --overwrite.
    """
    if not os.path.lexists(path):
        return
    for folder in path.absolute().parents:
        kind = _kind_of(folder)
        if kind and path.absolute() in (folder / MANIFEST, *OwnFolder(folder, kind).files()):
            raise UsageError(f"{path} is a file of {folder}", remedy="name another file")
    if not path.is_file():
        raise UsageError(f"{path} is not a file", remedy="name a file")
    if not overwrite:
        another = "move it away" if overwrite is None else "replace it with --overwrite"
        remedy = f"name another file, or {another}"
        raise UsageError(f"{path} already exists", remedy=remedy)


def _kind_of(path: Path) -> str | None:
    """Return the kind of a folder that this tool made, None for other folders."""
    try:
        content = read_json(path / MANIFEST)
        kind = content["kind"] if content["tool"] == "finetune" else None
        return kind if kind in NAMES else None
    except (OSError, ValueError, LookupError, TypeError):
        return None
