"""A bench's child without torch, that dies on one device, or as its selection's model says."""

import os
import signal

from finetune.batch_finder.child import connect_to_parent


def main() -> None:
    """Reply with rows of one timing; die on ``fragile``."""
    requests, reply = connect_to_parent()
    if requests.get()["selection"]["model"] == "unable":
        raise SystemExit("no such luck")
    reply({})
    while request := requests.get():
        if request["device"] == "fragile":
            os.kill(os.getpid(), signal.SIGABRT)
        rows = request["rows"]
        reply([{**row, "timed_rows": 1, "seconds": [*row["seconds"], 1.0]} for row in rows])


if __name__ == "__main__":
    main()
