"""Example benchmark results on a CPU and a device that is faster with large batches."""

from finetune.bench import Phase
from finetune.bench.results import BenchResults, Row


def a_row(
    group: str, workload: str, device: str, seconds: float, *, rows: int = 8,
    phase: Phase = "training", note: str = "",
) -> Row:  # fmt: skip
    return Row(
        group=group, workload=workload, phase=phase, device=device, rows=rows,
        timed_rows=rows if seconds else 0,
        seconds=[seconds, 0.9 * seconds, 1.2 * seconds] if seconds else [], note=note,
    )  # fmt: skip


def example_results(*, gpu: str = "gpu") -> BenchResults:
    inference = [
        a_row("inference", f"batch {rows}", device, seconds, rows=rows, phase="evaluation")
        for rows, cpu, other in ((1, 0.01, 0.02), (8, 0.08, 0.06), (64, 0.6, 0.3))
        for device, seconds in (("cpu", cpu), (gpu, other))
    ]
    training = [
        a_row("training", "full, 512 tokens, batch 32", "cpu", 32.0, rows=32),
        a_row("training", "full, 512 tokens, batch 32", gpu, 0.0, rows=32, note="out of memory"),
        a_row("training", "full, as finetune run", "cpu", 10.0, rows=1000),
    ]
    apple = [
        a_row("apple", "VGG16", device, seconds, phase=phase)
        for phase in ("training", "evaluation")
        for device, seconds in (("cpu", 4.0), (gpu, 0.5))
    ]
    return BenchResults(
        machine={
            "cpu": "A <fast> chip",
            "platform": "Linux",
            "devices": {"cpu": "2 threads", gpu: "a GPU"},
            "versions": {"torch": "2"},
        },
        texts="questions",
        is_quick=False,
        is_complete=True,
        rows=[*inference, *training, *apple],
    )
