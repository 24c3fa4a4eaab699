"""The groups of workloads, free of torch, for the command line."""

from typing import Literal, get_args

Group = Literal["mlp", "inference", "training", "apple"]

GROUPS: tuple[Group, ...] = get_args(Group)
