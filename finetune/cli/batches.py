"""Shows batch sizes, found or estimated, on standard output."""

from collections.abc import Sequence

from finetune.batch_finder.results import BatchResult, EstimateResult, FoundBatches
from finetune.cli.console import show_lines, show_table

RESULT_NUMBERS = (
    "tokens", "largest", "fails", "GiB", "of", "fastest", "use", "probes", "s",
)  # fmt: skip
ESTIMATE_NUMBERS = ("tokens", "batch", "from", "to", "GiB", "of")


def show_batches(found: FoundBatches, *, folder: str) -> None:
    """Print a line per device or padded length and mode, and notes below."""
    if found.estimates:
        rows = map(_estimate_row, found.estimates)
        show_table(("machine", "mode", *ESTIMATE_NUMBERS), rows, numbers=ESTIMATE_NUMBERS)
        show_lines(
            "These are estimates: nothing was run on such a machine. They are based on",
            *_bases(found.estimates),
            *(note for estimate in found.estimates for note in _features_notes(estimate)),
        )
    else:
        rows = map(_result_row, found.results)
        show_table(("device", "mode", *RESULT_NUMBERS), rows, numbers=RESULT_NUMBERS)
        notes = [note for result in found.results for note in _notes(result)]
        show_lines(*notes, f"results and picture: {folder}")


def _result_row(one: BatchResult) -> Sequence[str]:
    fails = "-" if one.first_failed is None else f"{one.first_failed:,}"
    return (
        one.device, _mode(one), str(one.padded_length), f"{one.max_verified:,}", fails,
        _gibibytes(one.peak_bytes), _gibibytes(one.budget_bytes), f"{one.fastest:,}",
        f"{one.recommended:,}", str(len(one.probes)), f"{one.seconds:.0f}",
    )  # fmt: skip


def _estimate_row(one: EstimateResult) -> Sequence[str]:
    return (
        one.machine, _mode(one), str(one.padded_length), f"{one.batch:,}",
        f"{one.lowest_batch:,}", f"{one.highest_batch:,}", _gibibytes(one.peak_bytes),
        _gibibytes(one.budget_bytes),
    )  # fmt: skip


def _mode(one: BatchResult | EstimateResult) -> str:
    is_unsplit = one.mode != "full" and not one.stores_features
    return f"{one.mode}, no stored features" if is_unsplit else one.mode


def _bases(estimates: Sequence[EstimateResult]) -> list[str]:
    modes_by_basis: dict[str, dict[str, None]] = {}
    for one in estimates:
        modes_by_basis.setdefault(one.basis, {})[_mode(one)] = None
    return [f"{', '.join(modes)}: {basis}" for basis, modes in modes_by_basis.items()]


def _notes(result: BatchResult) -> list[str]:
    notes = _features_notes(result)
    if result.predicted_maximum:
        notes.append(
            f"{_place(result)}: the time limit ended the search; memory is predicted to hold "
            f"{result.predicted_maximum:,} examples"
        )
    return notes


def _features_notes(one: BatchResult | EstimateResult) -> list[str]:
    if one.features_batch is None:
        return []
    return [f"{_place(one)}: features are extracted with --eval-batch-size {one.features_batch:,}"]


def _place(one: BatchResult | EstimateResult) -> str:
    return f"{one.mode} at {one.padded_length} tokens"


def _gibibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.2f}"
