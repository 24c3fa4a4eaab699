"""What was measured, and the ``bench.json`` that holds it; free of torch."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from finetune.errors import UsageError

Group = Literal["mlp", "inference", "training", "apple"]
Phase = Literal["training", "evaluation"]

GROUPS: tuple[Group, ...] = get_args(Group)
SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A workload in one phase on one device.

    Args:
        rows: Of a step, as published.
        timed_rows: Of the steps that were timed; 0 where none was.
        seconds: Of a step, by timing.
        note: Why fewer rows were timed, or none.
    """

    group: str
    workload: str
    phase: Phase
    device: str
    rows: int
    timed_rows: int = 0
    seconds: tuple[float, ...] = ()
    note: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Row":
        """Return the row of which these are the fields."""
        return cls(**{**fields, "seconds": tuple(fields["seconds"])})

    def with_note(self, note: str) -> "Row":
        """Return the row with a note, after the one it has."""
        return replace(self, note="; ".join(filter(None, [self.note, note])))

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Group, workload, phase and device, by which it differs from the other rows."""
        return self.group, self.workload, self.phase, self.device

    @property
    def rows_per_second(self) -> float | None:
        """By the median of a step's seconds, None where nothing was timed."""
        return self.timed_rows / statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it was measured: devices by name, versions of Python and the packages that compute."""

    cpu: str
    platform: str
    devices: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class BenchResults:
    """All rows that were measured on a machine.

    ``texts`` says where the lengths of the texts are from, ``found_batches`` what ``find-batch``
    found at 512 tokens, by device and mode.
    """

    machine: Machine
    texts: str
    is_quick: bool
    is_complete: bool
    rows: tuple[Row, ...]
    found_batches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    schema_version: Literal[1] = SCHEMA_VERSION

    def of(self, group: str) -> tuple[Row, ...]:
        """Return the rows of a group."""
        return tuple(row for row in self.rows if row.group == group)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``bench.json``; its readers get the rows a second as well."""
        rows = [asdict(row) | {"rows_per_second": row.rows_per_second} for row in self.rows]
        return asdict(self) | {"rows": rows}


def read_results(path: Path) -> BenchResults:
    """Read a ``bench.json``; UsageError if it can't be read, is none, or of another version."""
    import pydantic

    try:
        return pydantic.TypeAdapter(BenchResults).validate_json(path.read_bytes())
    except OSError as error:
        reason = error.strerror
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        reason = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
    raise UsageError(
        f"{path} can't be read as a bench.json: {reason}",
        remedy="name two files that finetune bench of this version has written",
    )
