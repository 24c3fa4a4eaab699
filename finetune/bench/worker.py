"""The child process that times workloads: only it ends by a device that dies.

It reads one line of JSON, a task; it answers with the ``begun`` device before each piece of work,
and with the ``rows`` of each workload, some of them again when all were timed.
"""

import dataclasses
from typing import Any

from finetune.batch_finder.child import connect_to_parent


def main() -> None:
    """Time the workloads of the parent's task."""
    orders, answer = connect_to_parent()
    from finetune.bench.timer import time_in_rounds
    from finetune.bench.workloads import AutoTunedOption, list_workloads
    from finetune.devices.select import select_device

    task: dict[str, Any] = orders.get()
    choice = AutoTunedOption(**task["choice"])
    devices = [select_device(name, emit=lambda _: None) for name in task["devices"]]
    workloads = list_workloads(choice)[task["first"] :]
    pairs = [(one, [each for each in devices if one.is_for(each.name)]) for one in workloads]
    first, sound = pairs[0]
    pairs[0] = first, [one for one in sound if one.name not in task["skipped"]]
    for device in devices:
        # So that what does not fit fails, in place of a machine that swaps.
        device.memory.set_memory_limit(device.memory.budget_bytes(None))
    for rows in time_in_rounds(
        pairs,
        effort=choice.effort,
        announce=lambda name: answer({"begun": name}),
        until=task["until"],
    ):
        answer({"rows": [dataclasses.asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
