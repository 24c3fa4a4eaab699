"""Shows batch sizes, found or estimated, on standard output."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from finetune.batch_finder.results import BatchResult, EstimateResult, FoundBatches
from finetune.cli.console import LITERAL, show_lines


def show_batches(found: FoundBatches, *, folder: str) -> None:
    """Print a line per device or padded length and mode, and notes below."""
    if found.estimates:
        Console(**LITERAL).print(_tabulate_estimates(found.estimates))
        show_lines(
            "These are estimates: nothing was run on such a machine. They are based on",
            *_bases(found.estimates),
            *map(_features_note, filter(_has_features, found.estimates)),
        )
    else:
        Console(**LITERAL).print(_tabulate_results(found.results))
        notes = [note for result in found.results for note in _notes(result)]
        show_lines(*notes, f"results and picture: {folder}")


def _tabulate_results(results: Sequence[BatchResult]) -> Table:
    table = _table("device", "mode", numbers=(
        "tokens", "largest", "fails", "GiB", "of", "fastest", "use", "probes", "s",
    ))  # fmt: skip
    for one in results:
        table.add_row(
            one.device,
            _mode(one),
            str(one.padded_length),
            f"{one.max_verified:,}",
            "-" if one.first_failed is None else f"{one.first_failed:,}",
            _gibibytes(one.peak_bytes),
            _gibibytes(one.budget_bytes),
            f"{one.fastest:,}",
            f"{one.recommended:,}",
            str(len(one.probes)),
            f"{one.seconds:.0f}",
        )
    return table


def _tabulate_estimates(estimates: Sequence[EstimateResult]) -> Table:
    table = _table("machine", "mode", numbers=("tokens", "batch", "from", "to", "GiB", "of"))
    for one in estimates:
        table.add_row(
            one.machine,
            _mode(one),
            str(one.padded_length),
            f"{one.batch:,}",
            f"{one.lowest_batch:,}",
            f"{one.highest_batch:,}",
            _gibibytes(one.peak_bytes),
            _gibibytes(one.budget_bytes),
        )
    return table


def _table(*names: str, numbers: Sequence[str]) -> Table:
    table = Table(*names, box=None, pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _mode(one: BatchResult | EstimateResult) -> str:
    is_unsplit = one.mode != "full" and not one.stores_features
    return f"{one.mode}, no stored features" if is_unsplit else one.mode


def _bases(estimates: Sequence[EstimateResult]) -> list[str]:
    modes_by_basis: dict[str, dict[str, None]] = {}
    for one in estimates:
        modes_by_basis.setdefault(one.basis, {})[_mode(one)] = None
    return [f"{', '.join(modes)}: {basis}" for basis, modes in modes_by_basis.items()]


def _notes(result: BatchResult) -> list[str]:
    notes = [_features_note(result)] if _has_features(result) else []
    if result.predicted_maximum:
        notes.append(
            f"{_place(result)}: the time limit ended the search; memory is predicted to hold "
            f"{result.predicted_maximum:,} examples"
        )
    return notes


def _has_features(one: BatchResult | EstimateResult) -> bool:
    return one.features_batch is not None


def _features_note(one: BatchResult | EstimateResult) -> str:
    return f"{_place(one)}: features are extracted with --eval-batch-size {one.features_batch:,}"


def _place(one: BatchResult | EstimateResult) -> str:
    return f"{one.mode} at {one.padded_length} tokens"


def _gibibytes(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else f"{size_bytes / 2**30:.2f}"
