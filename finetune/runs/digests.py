"""Digests of the files of a finished run, in its manifest, by which edits are noticed."""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from finetune.errors import DataDiffers
from finetune.files import STRICT_JSON, file_sha256, read_json, write_text_atomically

if TYPE_CHECKING:
    from concurrent.futures import Future

    from finetune.runs.folder import RunFolder

# More than the header of a model's weights.
HEAD_BYTES = 2**20


def record_files(
    folder: "RunFolder",
    files: Iterable[Path] | None = None,
    *,
    weights_sha256: "Future[str] | None" = None,
) -> None:
    """Write digests of all files of a finished run, or new ones of some, into its manifest.

    That of the model's weights may have been begun in a thread.
    """
    content = folder.read(folder.manifest_file, dict)
    before = {} if files is None else content["files"]
    found = {}
    for file in folder.finished_files if files is None else files:
        known = weights_sha256 if file == folder.weights_file else None
        name = file.relative_to(folder.path).as_posix()
        found[name] = _fingerprint(file, known, in_full=True)
    write_text_atomically(folder.manifest_file, seal({**content, "files": {**before, **found}}))


def check_files(folder: "RunFolder", *, in_full: bool = False) -> None:
    """Raise ``DataDiffers`` if a file of a finished run is not what was recorded.

    Of weights the size and the header are compared, and all bytes only ``in_full``. A copy of a
    run's model and configuration alone has nothing to compare.
    """
    manifest = folder.manifest_file
    content: Any = None
    with suppress(OSError, ValueError):
        content = read_json(manifest)
    is_recorded = isinstance(content, dict) and "files" in content
    if folder.checkpoints or not (folder.has_finished or is_recorded):
        return
    if not is_recorded or manifest.read_text(encoding="utf-8") != seal(content):
        changed = [manifest.name]
    else:
        changed = [
            name
            for name, written in content["files"].items()
            if not _is_as_written(folder, folder.path / name, written, in_full=in_full)
        ]
    if changed:
        raise DataDiffers(
            f"changed since the run in {folder.path} finished: {', '.join(changed)}",
            remedy="restore what was changed, or accept it with finetune report "
            f"{quote(str(folder.path))} --accept-changes",
        )


def _is_as_written(
    folder: "RunFolder", file: Path, written: dict[str, Any], *, in_full: bool
) -> bool:
    # Pages are made from the other files, and a copy may lack hidden ones.
    if file in (folder.report_file, folder.card_file, folder.own.marker) and not file.exists():
        return True
    return file.is_file() and _fingerprint(file, in_full=in_full).items() <= written.items()


def _fingerprint(
    file: Path, sha256: "Future[str] | None" = None, *, in_full: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {"size_bytes": file.stat().st_size}
    if file.suffix == ".safetensors":
        with file.open("rb") as weights:
            found["head_sha256"] = hashlib.sha256(weights.read(HEAD_BYTES)).hexdigest()
        if not in_full:
            return found
    return {**found, "sha256": sha256.result() if sha256 else file_sha256(file)}


def seal(content: dict[str, Any]) -> str:
    """Return JSON that has a digest of itself."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, **STRICT_JSON).encode()).hexdigest()
    return json.dumps({**rest, "sha256": digest}, **STRICT_JSON, indent=2) + "\n"
