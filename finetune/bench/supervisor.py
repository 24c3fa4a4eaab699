"""Has a child process time workloads, and goes on with another where a device ends it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from finetune.batch_finder.child import Child, ChildEnded
from finetune.bench.results import Row
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from finetune.bench.workload import Workload
    from finetune.bench.workloads import AutoTunedOption

WORKER = "finetune.bench.worker"
_WAIT_SECONDS = 1.0


class Supervisor:
    """A context, at whose end no child is left.

    Made before PyTorch is imported, it saves the child's seconds for that.

    Args:
        worker: The module that the child runs.
    """

    def __init__(self, *, worker: str = WORKER) -> None:
        self._worker = worker
        self._child = Child(worker)

    def __enter__(self) -> "Supervisor":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()

    def time_all(
        self,
        choice: "AutoTunedOption",
        workloads: Sequence["Workload"],
        devices: Sequence[str],
        *,
        until: float,
    ) -> Iterator[list[Row]]:
        """Yield the rows of each workload in order; then some again, with more timings.

        Args:
            choice: From which the child makes the workloads as well.
            workloads: Those of the choice.
            devices: Their names.
            until: When, as ``time.time`` returns it, nothing is to be timed again.

        Raises:
            FinetuneError: If the child ends without a device that is at work.
        """
        done = 0
        lost: list[Row] = []
        while done < len(workloads):
            running: str | None = None
            skipped = [row.device for row in lost]
            self._child.send(
                {"choice": asdict(choice), "devices": devices, "first": done, "skipped": skipped,
                 "until": until}
            )  # fmt: skip
            try:
                while True:
                    answer = self._child.receive(seconds=_WAIT_SECONDS) or {}
                    running = answer.get("begun", running)
                    if "rows" in answer:
                        done, running = done + 1, None
                        yield lost + [_read_row(fields) for fields in answer["rows"]]
                        lost = []
            except ChildEnded:
                if done >= len(workloads):
                    return
                ending = f"the process {self._child.exit_status()}"
                if running is None or any(row.device == running for row in lost):
                    raise FinetuneError(
                        self._child.describe_end(),
                        remedy="see what finetune doctor says of the machine",
                    ) from None
                workload = workloads[done]
                lost += [workload.row(phase, running, note=ending) for phase in workload.phases]
                self._child.kill()
                self._child = Child(self._worker)


def _read_row(fields: dict[str, object]) -> Row:
    return Row(**fields | {"seconds": tuple(fields["seconds"])})  # type: ignore[arg-type]
