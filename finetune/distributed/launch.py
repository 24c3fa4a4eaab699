"""What a launcher, such as torchrun, has set for this process; free of torch."""

import os
import sys
from dataclasses import dataclass

from finetune.errors import UsageError

# Without one of these, processes can't find each other.
_NEEDED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# torchrun's variables. With one of them left, a child would wait for the group.
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_GROUP_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_", "MASTER_")
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Launch:
    """The rank of this process among those of all hosts, and among those of this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return self.rank == 0


def read_launch() -> Launch:
    """Return what the launcher has set; one process if a variable of a launch is missing."""
    if not all(map(os.environ.get, _NEEDED_VARIABLES)):
        return Launch()
    ranks = {name: value for name in _RANK_VARIABLES if (value := os.environ.get(name))}
    try:
        launch = Launch(**{name.lower(): int(value) for name, value in ranks.items()})
        is_valid = 0 <= launch.local_rank <= launch.rank < launch.world_size
    except ValueError:
        is_valid = False
    if not is_valid:
        values = " ".join(f"{name}={value}" for name, value in ranks.items())
        remedy = "unset these variables, or start processes with torchrun"
        raise UsageError(f"these are not the ranks of a launch: {values}", remedy=remedy)
    return launch


def describe_ignored_variables() -> str | None:
    """Return a warning if some variables of a launch are set, and others are missing."""
    present = [name for name in _NEEDED_VARIABLES if os.environ.get(name)]
    missing = [name for name in _NEEDED_VARIABLES if name not in present]
    if not (present and missing):
        return None
    return f"{', '.join(present)} ignored: a launcher also sets {', '.join(missing)}"


def module_command(module: str) -> list[str]:
    """Return a command that runs a module in another process, with ``import_environment``."""
    return [sys.executable, "-P", "-m", module]


def import_environment() -> dict[str, str]:
    """Return the variables with which another process imports what this one does."""
    return {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def environment_outside_group() -> dict[str, str]:
    """Return the environment for a child that does not join the group and has the same GPU."""
    launch = read_launch()
    if launch.world_size == 1:
        return dict(os.environ)
    outside = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_GROUP_PREFIXES)
    }
    visible = outside.get(_VISIBLE_GPUS, "")
    gpus = visible.split(",") if visible else list(map(str, range(launch.local_world_size)))
    return outside | {_VISIBLE_GPUS: gpus[launch.local_rank % len(gpus)]}
