"""The report page: what a run's files say, for the eye."""

import math
from collections.abc import Callable, Mapping
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from finetune.files import read_json, read_jsonl, write_text_atomically
from finetune.report.curves import draw_curves
from finetune.runs.folder import RunFolder

MOST_MISTAKES = 20


def write_report(folder: RunFolder) -> Path:
    """Write a run's report as one page that needs no other file, and return where it lies.

    What the run has not written, such as the figures of a run that was interrupted, is left out.

    Args:
        folder: The run; ``report.html`` in it is written or replaced.
    """
    results = _read_if_written(folder.results_file, read_json, otherwise={})
    metrics = _read_if_written(folder.metrics_file, read_jsonl, otherwise=[])
    predictions = _read_if_written(folder.predictions_file, read_jsonl, otherwise=[])
    mistakes = [row for row in predictions if row["predicted"] != row["label"]]
    page = TEMPLATES.get_template("report.html.j2").render(
        name=folder.path.resolve().name,
        subtitle=" · ".join(results[key] for key in ("model", "data", "mode") if key in results),
        headline=_headline(results),
        curves=_curves(metrics),
        per_class=results.get("test_per_class", {}),
        class_names=results.get("class_names", []),
        confusion_matrix=results.get("test_confusion_matrix", []),
        predictions=predictions,
        mistakes=mistakes,
        shown_mistakes=nlargest(MOST_MISTAKES, mistakes, key=itemgetter("probability")),
        config=_read_if_written(folder.config_file, _read_text, otherwise=""),
        environment=_read_if_written(folder.environment_file, read_json, otherwise={}),
    )
    write_text_atomically(folder.report_file, page)
    return folder.report_file


def percent(share: float) -> str:
    """Return a share of 0..1 in percent.

    >>> percent(0.972)
    '97.2 %'
    """
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return seconds in the two largest units that are worth reading.

    >>> duration(9.53), duration(1453), duration(8040)
    ('9.5 s', '24 min 13 s', '2 h 14 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes} min" if hours else f"{minutes} min {rest_seconds} s"


def _read_if_written(path: Path, read: Callable[[Path], Any], *, otherwise: Any) -> Any:
    return read(path) if path.exists() else otherwise


def _headline(results: Mapping[str, Any]) -> list[dict[str, str]]:
    notes = _notes(results)
    return [
        {"label": label, "figure": show(results[key]), "note": notes.get(key, "")}
        for key, label, show in HEADLINE
        if key in results
    ]


def _notes(results: Mapping[str, Any]) -> dict[str, str]:
    notes: dict[str, str] = {}
    if "test_confusion_matrix" in results:
        rows = sum(map(sum, results["test_confusion_matrix"]))
        accuracy = results["test_accuracy"]
        standard_error = math.sqrt(accuracy * (1 - accuracy) / rows)
        notes["test_accuracy"] = f"± {100 * standard_error:.1f} standard error on {rows} rows"
    if "train_samples_per_second" in results:
        notes["train_runtime"] = f"{results['train_samples_per_second']:.1f} rows a second"
    device = [results[key] for key in ("device_description", "precision") if key in results]
    notes["device"] = ", ".join(device)
    if "total_parameters" in results:
        notes["trained_parameters"] = f"of {results['total_parameters']:,}"
    return notes


def _curves(metrics: list[dict[str, Any]]) -> str:
    if not metrics:
        return ""
    return draw_curves(
        updates=[row for row in metrics if row["kind"] == "update"],
        validations=[row for row in metrics if row["kind"] == "validation"],
    )


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _as_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_as_text(inner)}" for key, inner in value.items())
    return str(value)


HEADLINE: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("test_accuracy", "Test accuracy", percent),
    ("test_macro_f1", "Test macro F1", percent),
    ("eval_accuracy", "Validation accuracy", percent),
    ("train_runtime", "Training time", duration),
    ("device", "Device", str),
    ("trained_parameters", "Trained parameters", "{:,}".format),
)

TEMPLATES = Environment(
    loader=PackageLoader("finetune", "report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters |= {"percent": percent, "as_text": _as_text}
