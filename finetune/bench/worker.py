"""The child process that times workloads: only it ends by a device that dies.

It reads one line of JSON, a task; it answers with the ``begun`` device before each piece of work,
and with the ``rows`` of each workload.
"""

import dataclasses
from typing import Any

from finetune.batch_finder.worker import end_with_parent, open_answers, read_orders
from finetune.devices.host import keep_freed_memory


def main() -> None:
    """Time the workloads of the parent's task."""
    end_with_parent()
    # As the command does.
    keep_freed_memory()
    orders = read_orders()
    answer = open_answers()
    from finetune.bench.timer import FULL, QUICK, time_workload
    from finetune.bench.workloads import Choice, list_workloads
    from finetune.devices.select import select_device

    task: dict[str, Any] = orders.get()
    choice = Choice(**task["choice"])
    devices = [select_device(name, emit=lambda _: None) for name in task["devices"]]
    for device in devices:
        # So that what does not fit fails, in place of a machine that swaps.
        device.memory.cap(device.memory.budget_bytes(None))
    for index, workload in enumerate(list_workloads(choice)):
        if index < task["first"]:
            continue
        skipped = task["skipped"] if index == task["first"] else []
        rows = time_workload(
            workload,
            [one for one in devices if workload.is_for(one.name) and one.name not in skipped],
            effort=QUICK if choice.is_quick else FULL,
            announce=lambda name: answer({"begun": name}),
        )
        answer({"rows": [dataclasses.asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
