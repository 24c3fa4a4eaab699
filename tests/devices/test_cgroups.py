"""Trees of files as the kernel shows them, one for each way that groups are mounted."""

from pathlib import Path

import pytest

from finetune.devices.cgroups import GroupLimit, group_limits

MIB = 2**20


def write_process(folder: Path, *, groups: str, mounts: list[str]) -> Path:
    """Describe a process by its groups and by where they are mounted, below a folder."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    lines = [
        line.replace("@", str(folder)) for line in ["24 1 8:1 / / rw - ext4 /dev/sda rw", *mounts]
    ]
    (proc / "mountinfo").write_text("\n".join(lines) + "\n")
    return proc


def write_group_v2(
    folder: Path, *, limit: str, usage: int, droppable: int = 0, high: str = "max"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.high").write_text(f"{high}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {droppable}\nslab 3\n")


def write_group_v1(folder: Path, *, limit: int, usage: int, droppable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(
        f"cache 1\ninactive_file 2\ntotal_inactive_file {droppable}\n"
    )


V2_MOUNT = "30 24 0:26 / @/fs rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / @/fs/memory rw,relatime shared:9 - cgroup cgroup rw,memory"


def test_every_group_around_the_process_counts_in_version_2(tmp_path: Path) -> None:
    proc = write_process(tmp_path, groups="0::/user.slice/session/job\n", mounts=[V2_MOUNT])
    root = tmp_path / "fs"
    write_group_v2(root / "user.slice", limit=str(4096 * MIB), usage=900 * MIB)
    write_group_v2(root / "user.slice/session", limit="max", usage=800 * MIB)
    write_group_v2(
        root / "user.slice/session/job", limit=str(512 * MIB), usage=300 * MIB, droppable=100 * MIB
    )
    assert list(group_limits(proc)) == [
        GroupLimit(512 * MIB, 200 * MIB),
        GroupLimit(4096 * MIB, 900 * MIB),
    ]


def test_a_group_is_slowed_down_before_it_is_full(tmp_path: Path) -> None:
    proc = write_process(tmp_path, groups="0::/job\n", mounts=[V2_MOUNT])
    write_group_v2(tmp_path / "fs/job", limit=str(512 * MIB), usage=0, high=str(256 * MIB))
    assert list(group_limits(proc)) == [GroupLimit(256 * MIB, 0)]


def test_every_group_around_the_process_counts_in_version_1(tmp_path: Path) -> None:
    proc = write_process(
        tmp_path,
        groups="5:devices:/\n4:memory:/outer/inner\n1:cpu,cpuacct:/other\n0::/\n",
        mounts=[
            "34 31 0:31 / @/fs/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct",
            V1_MOUNT,
        ],
    )
    root = tmp_path / "fs/memory"
    write_group_v1(root, limit=2**63 - 4096, usage=3000 * MIB)
    write_group_v1(root / "outer", limit=1024 * MIB, usage=500 * MIB, droppable=50 * MIB)
    write_group_v1(root / "outer/inner", limit=2048 * MIB, usage=100 * MIB)
    assert list(group_limits(proc)) == [
        GroupLimit(2048 * MIB, 100 * MIB),
        GroupLimit(1024 * MIB, 450 * MIB),
        GroupLimit(2**63 - 4096, 3000 * MIB),
    ]


@pytest.mark.parametrize(
    ("groups", "mount"),
    [
        # A container with namespaces of its own sees itself as the root.
        ("0::/\n", V2_MOUNT),
        # One without sees the machine's path, of which only its own part is mounted.
        ("0::/docker/0a1b\n", V2_MOUNT.replace(" / @", " /docker/0a1b @")),
        # One that was moved sees a path above its root.
        ("0::/../elsewhere\n", V2_MOUNT),
        ("0::/elsewhere\n", V2_MOUNT.replace(" / @", " /docker/0a1b @")),
    ],
)
def test_a_container_is_limited_by_its_own_group(tmp_path: Path, groups: str, mount: str) -> None:
    proc = write_process(tmp_path, groups=groups, mounts=[mount])
    write_group_v2(tmp_path / "fs", limit=str(512 * MIB), usage=MIB)
    assert list(group_limits(proc)) == [GroupLimit(512 * MIB, MIB)]


def test_a_group_whose_kernel_has_no_statistics_is_limited_too(tmp_path: Path) -> None:
    """That of gVisor has none."""
    proc = write_process(tmp_path, groups="4:memory:/\n", mounts=[V1_MOUNT])
    write_group_v1(tmp_path / "fs/memory", limit=512 * MIB, usage=MIB)
    (tmp_path / "fs/memory/memory.stat").unlink()
    assert list(group_limits(proc)) == [GroupLimit(512 * MIB, MIB)]


def test_a_machine_without_limits_has_none(tmp_path: Path) -> None:
    proc = write_process(tmp_path, groups="0::/\n", mounts=[V2_MOUNT])
    (tmp_path / "fs").mkdir()
    assert list(group_limits(proc)) == []


def test_a_system_without_groups_has_none(tmp_path: Path) -> None:
    assert list(group_limits(tmp_path)) == []


def test_this_machine_is_understood() -> None:
    for group in group_limits():
        assert group.limit_bytes > 0
        assert group.used_bytes >= 0
