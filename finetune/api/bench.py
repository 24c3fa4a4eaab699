"""``finetune bench`` as a function."""

from collections.abc import Sequence
from pathlib import Path

from finetune.bench.results import GROUPS, BenchResults, Group
from finetune.bench.supervisor import Supervisor
from finetune.errors import Interrupted
from finetune.events import Emit, ignore
from finetune.files import write_json, write_text_atomically
from finetune.runs.reserving import check_writable
from finetune.training.interruption import signal_of


def run_bench(
    groups: Sequence[Group] = GROUPS,
    *,
    output_dir: Path,
    devices: Sequence[str] = (),
    model: str | None = None,
    data_dir: Path | None = None,
    quick: bool = False,
    emit: Emit = ignore,
) -> BenchResults:
    """Time workloads on the devices of this machine; write ``bench.json`` and ``bench.html``.

    Args:
        groups: Of workloads.
        output_dir: Folder of the files; those of an earlier bench are replaced.
        devices: Their names; none for all that work.
        model: A network of the user's own, ``package.module:function``, to be timed as well.
        data_dir: Folder of TREC's raw files; None for the questions of the package.
        quick: Whether to time few rows, and not for long.
        emit: Receives progress events.

    Raises:
        DeviceNotAvailable: If a device that is named can't be used.
        UsageError: If the model or the folder can't be used.
        DataNotFound: If TREC's training file is not there.
        Interrupted: If the user stopped it; what was measured is written.
    """
    check_writable(output_dir)
    with Supervisor() as supervisor:
        # Each takes seconds to import PyTorch: the child and this process at the same time.
        from finetune.api.bench_session import Session
        from finetune.bench.bert import TREC_FILE, read_lengths
        from finetune.bench.workloads import AutoTunedOption
        from finetune.devices.select import select_device, usable_devices

        chosen = [select_device(name, emit=emit) for name in dict.fromkeys(devices)]
        session = Session(
            AutoTunedOption(
                groups=groups, model=model, lengths=read_lengths(data_dir), is_quick=quick
            ),
            devices=chosen or [*usable_devices(emit=emit)],
            texts="questions" if data_dir is None else TREC_FILE,
            emit=emit,
        )
        try:
            session.measure(supervisor)
        except KeyboardInterrupt as stop:
            write_bench(session.results(is_complete=False), output_dir)
            raise Interrupted(
                "stopped before the end",
                remedy=f"see what was measured in {output_dir}, or run the command again",
                signal_number=signal_of(stop),
            ) from None
        results = session.results(is_complete=True)
        write_bench(results, output_dir)
        return results


def write_bench(results: BenchResults, folder: Path) -> None:
    """Write results as ``bench.json``, ``bench.html`` and pictures that need no page."""
    from finetune.report.bench import CHARTS, render_bench
    from finetune.report.chart import picture_of

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", results.to_json())
    write_text_atomically(folder / "bench.html", render_bench(results))
    for name, draw in CHARTS.items():
        if charts := draw(results):
            write_text_atomically(folder / f"{name}.svg", picture_of(charts))
