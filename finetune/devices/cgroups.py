"""The memory limits that Linux's control groups put on this process."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class GroupLimit:
    """The memory that a control group may use, of which this process's is a part.

    Args:
        limit_bytes: The most; the kernel kills a process of the group that goes beyond.
        used_bytes: What the group uses now, but for files that the kernel can drop at any time.
    """

    limit_bytes: int
    used_bytes: int


# By version: the files with limits and with the usage, and what of it can be dropped. memory.high
# slows a group down long before memory.max kills.
_FILES = {
    "cgroup2": (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def group_limits(proc: Path = Path("/proc/self")) -> Iterator[GroupLimit]:
    """Yield the limits of this process's group and of each group around it, in both versions.

    None where there is no ``proc``, in which Linux describes the process.
    """
    if not (proc / "cgroup").is_file():
        return
    for version, folder, root in _memory_groups(proc):
        for group in [folder, *folder.parents]:
            if not group.is_relative_to(root):
                break
            yield from _limits_of(group, version)


def _memory_groups(proc: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield version and folder of the process's group in each hierarchy, and its mount."""
    paths = {}
    for line in (proc / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in (proc / "mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            shown, mounted_at = before.split(" ")[3:5]
            root = Path(mounted_at)
            yield kind, root / _below(shown, paths[kind]), root


def _below(shown: str, path: str) -> PurePosixPath:
    """Return a group's path within a mount that shows only a part of the hierarchy.

    In a container the group may lie outside that part, or above it: then the mount's root, which
    is the container's own group, is all that can be seen.
    """
    group = PurePosixPath(path)
    is_shown = group.is_relative_to(shown) and ".." not in group.parts
    return group.relative_to(shown) if is_shown else PurePosixPath()


def _limits_of(group: Path, version: str) -> Iterator[GroupLimit]:
    limits, usage, droppable = _FILES[version]
    # The root of a hierarchy has no files of its own in version 2.
    files = [group / name for name in limits if (group / name).is_file()]
    numbers = [int(text) for file in files if (text := file.read_text().strip()) != "max"]
    if numbers:
        statistics = group / "memory.stat"
        lines = statistics.read_text().splitlines() if statistics.is_file() else []
        droppable_bytes = int(dict(line.split(" ", 1) for line in lines).get(droppable, 0))
        yield GroupLimit(min(numbers), int((group / usage).read_text()) - droppable_bytes)
