"""How fast the devices of a machine are, by workloads that others have published."""

from typing import Literal, get_args

Group = Literal["mlp", "inference", "training", "apple"]
Phase = Literal["training", "evaluation"]

GROUPS: tuple[Group, ...] = get_args(Group)
