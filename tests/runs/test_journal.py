import resource
import signal
from pathlib import Path

from finetune.events import Emit, Event, Info, Step, WarningMessage, ignore, sent_to
from finetune.files import read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.journal import Journal, read_warnings


def step_event(number: int) -> Step:
    return Step(
        step=number,
        total_steps=10,
        epoch=number / 10,
        loss=1.5,
        learning_rate=1e-3,
        examples_per_second=10.0,
        memory_bytes=1024,
        reserved_bytes=2048,
        budget_bytes=6 * 2**30,
        remaining_seconds=1.0,
    )


def open_journal(folder: RunFolder, receiver: Emit = ignore) -> Journal:
    with sent_to(receiver):
        journal = Journal()
    journal.open(folder)
    return journal


def test_a_full_disk_leaves_no_torn_row(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    emit = open_journal(folder)
    emit(step_event(1))
    size = folder.metrics_file.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        emit(step_event(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert folder.metrics_file.stat().st_size == size
    emit(step_event(3))
    assert [row["step"] for row in read_jsonl(folder.metrics_file)] == [1, 2, 3]


def test_warnings_from_before_and_after_a_run_has_a_folder_are_kept_once(tmp_path: Path) -> None:
    folder, emitted = RunFolder(tmp_path), list[Event]()
    early, late = WarningMessage("some texts are cut", remedy="read all"), WarningMessage("slow")
    with sent_to(emitted.append):
        journal = Journal()
    journal(early)
    assert read_warnings(folder) == ()
    journal.open(folder)
    for event in (Info("training"), late, early):
        journal(event)
    assert emitted == [early, Info("training"), late, early]
    assert read_warnings(folder) == [early, late]
