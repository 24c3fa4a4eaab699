"""The tables, the page and the files of ``finetune data audit``."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from finetune.audit.audit import Audit
from finetune.report.chart import Axis, Chart, Series, chart_of, in_percent
from finetune.report.templates import TEMPLATES, without_folder
from finetune.tasks.tables import Table, format_number, percent, shorten_text

GOOD, ODD, BAD = "✔", "⚠", "✘"
# Rows on the page. suspects.csv and the JSON have all of them.
MAX_ROWS = 500
CURVE = "Learning curve"
SUSPECTS, TO_LABEL, PAGE = "suspects.csv", "to_label.csv", "audit.html"


def files_of(audit: Audit, *, batch: int) -> Mapping[str, str]:
    """Return the files of an audit by name. The page needs no other file."""
    page = TEMPLATES.get_template("audit.html.j2").render(
        audit=audit,
        name=without_folder("data", audit.data),
        model=without_folder("model", audit.model),
        summary=summarize(audit),
        tables=tabulate(audit),
        charts=draw_curve(audit),
        curve_title=CURVE,
    )
    files = {PAGE: page}
    if audit.suspects:
        rows = (["", *map(cell_of, record.values())] for record in audit.suspects)
        files[SUSPECTS] = _to_csv(["decision", *audit.suspects[0]], rows)
    if audit.to_label:
        texts = ((place // batch + 1, text, "") for place, text in enumerate(audit.to_label))
        files[TO_LABEL] = _to_csv(("batch", "text", "label"), texts)
    return files


def _to_csv(titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([titles, *rows])
    return text.getvalue()


def cell_of(value: Any) -> str:
    """Return a value of a record as a page and a terminal show it; row numbers unchanged."""
    if isinstance(value, list | tuple):
        return "|".join(map(str, value))
    return format_number(value) if isinstance(value, float) else str(value)


def summarize(audit: Audit) -> Table:
    """Return a table with one line per finding."""
    rows = []
    for what, records, mark in (
        ("near duplicates", audit.near_duplicates, ODD),
        ("leaks between splits", audit.leaks, BAD),
    ):
        count = sum(bool(record.get("labels")) for record in records)
        note = f"{count:,} with contradictory labels" * bool(count)
        rows.append((mark if records else GOOD, what, f"{len(records):,}", note))
    if audit.curve:
        last, twice = audit.curve["points"][-1], audit.curve["forecast"][0]
        show, metric = _show(audit), audit.curve["metric"]
        now = f"{metric} {show(last['value'])} on {last['rows']:,} rows"
        then, low, high = (show(twice[name]) for name in ("value", "low", "high"))
        note = f"{now}; about {then} ({low}–{high}) expected on {twice['rows']:,}"
        mark = ODD if abs(twice["value"] - last["value"]) > 0.01 else GOOD
        rows.append((mark, "learning curve", "", note))
    return Table("", ("", "what", "rows", "note"), rows, text_columns=4)


def _show(audit: Audit) -> Any:
    return percent if audit.classes else format_number


def tabulate(audit: Audit) -> list[Table]:
    """Return the records, the worst first, and the learning curve."""
    records = {
        "Labels that may be wrong": audit.suspects,
        "Leaks between splits": audit.leaks,
        "Near duplicates": audit.near_duplicates,
    }
    if audit.curve:
        points = [("measured", point) for point in audit.curve["points"]]
        points += [("forecast", point) for point in audit.curve["forecast"]]
        show = _show(audit)
        records[CURVE] = [
            {
                "": name,
                "training rows": point["rows"],
                audit.curve["metric"]: show(point["value"]),
                "90% interval": f"{show(point['low'])}–{show(point['high'])}",
            }
            for name, point in points
        ]
    tables = []
    for title, rows in records.items():
        if rows:
            # The text follows the number of its row.
            columns = sorted(rows[0], key=lambda name: {"row": 0, "text": 1}.get(name, 2))
            shown = rows[:MAX_ROWS]
            cells = [[shorten_text(cell_of(row[name])) for name in columns] for row in shown]
            note = f"The first {MAX_ROWS} of {len(rows):,}." if len(rows) > MAX_ROWS else ""
            titles = [name.replace("_", " ") for name in columns]
            tables.append(Table(title, titles, cells, len(columns), note))
    return tables


def draw_curve(audit: Audit) -> list[Chart]:
    """Return a chart of the measured and the forecast learning curve."""
    if audit.curve is None:
        return []
    measured, forecast = (
        [(float(point["rows"]), point["value"]) for point in audit.curve[name]]
        for name in ("points", "forecast")
    )
    lines = [Series("measured", measured), Series("forecast", [measured[-1], *forecast], "guide")]
    value = Axis(audit.curve["metric"], show=in_percent if audit.classes else format_number)
    return chart_of("By training rows", lines, Axis("rows", low=0.0), value)
