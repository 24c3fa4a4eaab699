import resource
import signal
from pathlib import Path

from finetune.events import Event, Info, Step, WarningMessage, sent_to
from finetune.files import read_jsonl
from finetune.runs.folder import RunFolder
from finetune.runs.journal import Journal, read_warnings


def step_event(number: int) -> Step:
    return Step(number, 10, number / 10, 1.5, 1e-3, 10.0, 1024, 2048, 6 * 2**30, 1.0)


def test_a_full_disk_leaves_no_torn_row(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    emit = Journal()
    emit.open(folder)
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
