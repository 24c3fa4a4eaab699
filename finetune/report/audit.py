"""The tables, the page and the files of ``finetune data audit``."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence

from finetune.audit.audit import Audit, Duplicate, Place
from finetune.audit.curve import Point
from finetune.report.chart import Axis, Chart, Series, chart_of, in_percent
from finetune.report.templates import TEMPLATES, without_folder
from finetune.tasks.tables import Table, format_number, format_value, percent, shorten_text

GOOD, ODD, BAD = "✔", "⚠", "✘"
# A page is for looking; suspects.csv and the JSON have all.
MAX_ROWS = 500
SUSPECTS, TO_LABEL, PAGE = "suspects.csv", "to_label.csv", "audit.html"


def files_of(audit: Audit, *, batch: int) -> Mapping[str, str]:
    """Return the files of an audit by name."""
    files = {PAGE: render_audit(audit)}
    if audit.suspects:
        files[SUSPECTS] = _to_csv(
            ("decision", "split", "row", "label", "suggested", "probability",
             "suggested_probability", "loss", "text"),
            ((("", one.split, one.row, label_of(one.label), label_of(one.suggested),
               _rounded(one.probability), _rounded(one.suggested_probability),
               _rounded(one.loss), one.text)) for one in audit.suspects),
        )  # fmt: skip
    if audit.to_label:
        rows = ((place // batch + 1, text, "") for place, text in enumerate(audit.to_label))
        files[TO_LABEL] = _to_csv(("batch", "text", "label"), rows)
    return files


def _to_csv(titles: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([titles, *rows])
    return text.getvalue()


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def label_of(label: object) -> str:
    """Return a label, or several, as a text."""
    if isinstance(label, float):
        return format_number(label)
    return "|".join(label) if isinstance(label, list) else str(label)


def summarize(audit: Audit) -> Table:
    """Return what was looked for, and how much of it was found."""
    rows = [
        _line("near duplicates", len(audit.near_duplicates), _contradictory(audit.near_duplicates))
    ]
    rows.append(_line("leaks between splits", len(audit.leaks), _contradictory(audit.leaks), BAD))
    rows.append(_line("rows unlike the rest", len(audit.outliers), ""))
    if wrong := audit.estimated_wrong:
        low, high = (f"{round(end * audit.sampled):,}" for end in (wrong.low, wrong.high))
        note = f"{percent(wrong.value)} of the labels; 95% interval {low} to {high}"
        rows.append(_line("labels that are wrong, about", round(wrong.value * audit.sampled), note))
    if audit.suspects:
        by_name = [one for one in audit.merges if one.by == "name"]
        rows.append(_line("classes spelt alike", len(by_name), "", BAD))
        rows.append(_line("classes that can't be told apart", len(audit.merges) - len(by_name), ""))
    if curve := audit.curve:
        twice = curve.forecast[0]
        last = curve.points[-1]
        now = f"{curve.metric} {_show(last.value, curve.metric)} on {last.rows:,} rows"
        ends = "–".join(_show(end, curve.metric) for end in (twice.low, twice.high))
        more = f"{now}; about {_show(twice.value, curve.metric)} ({ends}) on {twice.rows:,}"
        gain = abs(twice.value - last.value)
        rows.append((ODD if gain > 0.01 else GOOD, "is it enough?", "", more))
    return Table("", ("", "what", "rows", "note"), rows, text_columns=4)


def _line(what: str, count: int, note: str, mark: str = ODD) -> tuple[str, str, str, str]:
    return (mark if count else GOOD, what, f"{count:,}", note)


def _contradictory(pairs: Sequence[Duplicate]) -> str:
    count = sum(bool(one.labels) for one in pairs)
    return f"{count:,} with contradictory labels" * bool(count)


def _show(value: float, metric: str) -> str:
    return percent(value) if metric == "accuracy" else format_number(value, digits=3)


def tabulate(audit: Audit) -> list[Table]:
    """Return what was found row by row, the worst first."""
    tables = []
    cells: list[tuple[str, ...]]
    columns: tuple[str, ...]
    if audit.suspects:
        columns = (
            "row",
            "text",
            "label",
            "suggested",
            "probability",
            "of suggested",
            "loss",
            "rows with the suggested label",
        )
        rows = [
            (number_of(one), shorten_text(one.text), label_of(one.label), label_of(one.suggested),
             _rounded(one.probability), _rounded(one.suggested_probability), _rounded(one.loss),
             "\n".join(f"{number_of(near)}: {near.text[:60]}" for near in one.nearest))
            for one in audit.suspects[:MAX_ROWS]
        ]  # fmt: skip
        tables.append(Table("Labels that may be wrong", columns, rows, 8, _rest(audit.suspects)))
    for title, by in (
        ("Classes spelt alike", "name"),
        ("Classes that a head can't tell apart", "model"),
    ):
        cells = [(one.label, one.into, one.why) for one in audit.merges if one.by == by]
        tables.append(Table(title, ("class", "into", "why"), cells, 3))
    for title, pairs in (
        ("Leaks between splits", audit.leaks),
        ("Near duplicates", audit.near_duplicates),
    ):
        columns = (
            "row",
            "text",
            "row of the other",
            "its text",
            "labels, if they differ",
            "similarity",
        )
        cells = [
            (number_of(one), shorten_text(one.text), number_of(one.of), shorten_text(one.of.text),
             ", ".join(map(label_of, one.labels)), f"{one.similarity:.2f}")
            for one in pairs[:MAX_ROWS]
        ]  # fmt: skip
        tables.append(Table(title, columns, cells, 5, _rest(pairs)))
    cells = [
        (number_of(one), shorten_text(one.text), one.reason or "–", f"{one.deviations:.1f}")
        for one in audit.outliers
    ]
    tables.append(Table("Rows unlike the rest", ("row", "text", "why", "deviations"), cells, 3))
    if audit.curve:
        tables += _tabulate_curve(audit)
    return [one for one in tables if one.rows]


def number_of(place: Place) -> str:
    """Return the number of a row as people read it, with its split unless that is train."""
    return f"{place.row}" if place.split == "train" else f"{place.split} {place.row}"


def _rest(rows: Sequence[object]) -> str:
    return f"The first {MAX_ROWS} of {len(rows):,}." if len(rows) > MAX_ROWS else ""


def _tabulate_curve(audit: Audit) -> Iterator[Table]:
    assert audit.curve is not None
    curve, metric = audit.curve, audit.curve.metric

    def cells(points: Sequence[Point], what: str) -> list[tuple[str, ...]]:
        return [
            (
                what,
                f"{one.rows:,}",
                _show(one.value, metric),
                "–".join(_show(end, metric) for end in (one.low, one.high)),
            )
            for one in points
        ]

    rows = [*cells(curve.points, "measured"), *cells(curve.forecast, "forecast")]
    yield Table("Is it enough?", ("", "training rows", metric, "90% interval"), rows)
    gains = sorted(curve.gains.items(), key=lambda one: -one[1])
    shown = [
        (name, format_value(audit.classes[name]), f"{100 * gain:+.2f}") for name, gain in gains
    ]
    yield Table("What 200 more rows of a class would add", ("class", "rows", "points"), shown)


def draw_curve(audit: Audit) -> list[Chart]:
    """Return the accuracy by training rows, measured and forecast."""
    if audit.curve is None:
        return []
    curve = audit.curve
    measured = [(float(one.rows), one.value) for one in curve.points]
    more = [measured[-1], *((float(one.rows), one.value) for one in curve.forecast)]
    show = in_percent if curve.metric == "accuracy" else format_number
    series = [Series("measured", measured), Series("forecast", more, "guide")]
    return chart_of(
        "By training rows", series, Axis("rows", is_log=True), Axis(curve.metric, show=show)
    )


def render_audit(audit: Audit) -> str:
    """Return ``audit.html``, which needs no other file."""
    return TEMPLATES.get_template("audit.html.j2").render(
        audit=audit,
        name=without_folder("data", audit.data),
        model=without_folder("model", audit.model),
        summary=summarize(audit),
        tables=tabulate(audit),
        charts=draw_curve(audit),
    )
