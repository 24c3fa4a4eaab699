"""The chart in the README shows the figures of docs/benchmarks.md."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_committed_speed_chart_shows_benchmark_figures() -> None:
    script = runpy.run_path(str(DOCS / "speed_chart.py"))
    bars = [*script["read_bars"](script["PAGE"].read_text(encoding="utf-8"))]
    assert [bar.name.partition(",")[0] for bar in bars] == ["Training"] * 3 + ["Whole command"] * 2
    assert script["CHART"].read_text(encoding="utf-8") == script["draw"](bars)
