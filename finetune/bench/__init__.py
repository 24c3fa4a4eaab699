"""Times the devices of a machine on published workloads."""

from typing import Literal, get_args

Group = Literal["mlp", "inference", "training", "apple"]
Phase = Literal["training", "evaluation"]

GROUPS: tuple[Group, ...] = get_args(Group)
