"""Room on the disks that a run writes to."""

import os
import shutil
from pathlib import Path

from finetune.devices.check import ROOM_FOR_BERT_BASE_BYTES, Check


def check_disk(name: str, folder: Path, *, remedy: str) -> Check:
    """Say whether a folder, which may not exist yet, can be written and has room for BERT-base."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        return Check(name, "failure", f"{existing} can't be written", remedy)
    free_bytes = shutil.disk_usage(existing).free
    finding = f"{free_bytes / 1e9:.1f} GB free at {folder}"
    has_room = free_bytes >= ROOM_FOR_BERT_BASE_BYTES
    needed = f"; BERT-base takes up to {ROOM_FOR_BERT_BASE_BYTES / 1e9:.1f} GB"
    return Check.warn_unless(has_room, name, finding + needed * (not has_room), remedy)
