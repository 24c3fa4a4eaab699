"""A bench's child without torch, that dies as its task's model says."""

import os
import signal

from finetune.batch_finder.child import connect_to_parent


def main() -> None:
    """Answer with a row of each device for each of two workloads; die on ``fragile``."""
    orders, answer = connect_to_parent()
    task = orders.get()
    if task["selection"]["model"] == "unable":
        raise SystemExit("no such luck")
    for index in range(task["first"], 2):
        skipped = task["skipped"] if index == task["first"] else []
        rows = []
        for device in task["devices"]:
            if device not in skipped:
                answer({"begins": device})
                if device == "fragile":
                    os.kill(os.getpid(), signal.SIGABRT)
                fields = {"group": "mlp", "phase": "training", "rows": 1, "timed_rows": 1}
                rows.append({**fields, "workload": f"{index}", "device": device, "seconds": [1.0]})
        answer({"rows": rows})


if __name__ == "__main__":
    main()
