"""Has a child process time workloads, and goes on with another where a device ends it."""

from collections.abc import Generator, Sequence
from dataclasses import asdict

from finetune.batch_finder.child import Child, ChildEnded
from finetune.bench.results import Row
from finetune.bench.workload import Workload
from finetune.bench.workloads import Choice
from finetune.errors import FinetuneError

WORKER = "finetune.bench.worker"
_WAIT_SECONDS = 1.0


def time_all(
    choice: Choice,
    workloads: Sequence[Workload],
    devices: Sequence[str],
    *,
    worker: str = WORKER,
) -> Generator[list[Row]]:
    """Yield the rows of each workload, one after the other.

    Args:
        choice: What is timed.
        workloads: Those of the choice.
        devices: Names of the devices.
        worker: The module that the child runs.

    Raises:
        FinetuneError: If the child ends without a device that is at work.
    """
    done = 0
    lost: list[Row] = []
    while done < len(workloads):
        running = None
        child = Child(worker)
        skipped = [row.device for row in lost]
        child.send(
            {"choice": asdict(choice), "devices": devices, "first": done, "skipped": skipped}
        )
        try:
            while done < len(workloads):
                answer = child.receive(seconds=_WAIT_SECONDS) or {}
                running = answer.get("begun", running)
                if "rows" in answer:
                    rows = [_read_row(fields) for fields in answer["rows"]]
                    done, running = done + 1, None
                    yield lost + rows
                    lost = []
        except ChildEnded:
            ending = f"the process {child.ending()}"
            if running is None or any(row.device == running for row in lost):
                lines = child.error_lines() or ["it wrote no error"]
                raise FinetuneError(
                    f"{ending}: {lines[-1]}", remedy="see what finetune doctor says of the machine"
                ) from None
            lost += _lost_rows(workloads[done], running, note=ending)
        finally:
            child.kill()


def _read_row(fields: dict[str, object]) -> Row:
    return Row(**fields | {"seconds": tuple(fields["seconds"])})  # type: ignore[arg-type]


def _lost_rows(workload: Workload, device: str, *, note: str) -> list[Row]:
    return [
        Row(
            group=workload.group,
            workload=workload.name,
            phase=phase,
            device=device,
            rows=workload.rows,
            timed_rows=0,
            seconds=(),
            note=note,
        )
        for phase in workload.phases
    ]
