import math
import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from finetune.report.chart import Axis, Chart, Series
from finetune.report.page import draw_curves
from finetune.runs.results import RunResults

UPDATES = [{"epoch": step, "loss": 1 / step} for step in range(10, 100, 10)]
VALIDATIONS = [
    {"epoch": step, "eval_loss": 0.5, "eval_accuracy": step / 100} for step in (30, 60, 90)
]
numbers = st.floats(-1e9, 1e9)


def texts_of(chart: Chart) -> set[str]:
    return {element.text for element in ElementTree.fromstring(chart.draw()).iter() if element.text}


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20))
def test_points_are_inside_the_chart_and_axes_have_ticks(points: list[tuple[float, float]]) -> None:
    chart = Chart("Any", [Series("values", points, "dots")], Axis("x"), Axis("y"))
    for scale, values in (
        (chart.across, [x for x, _ in points]),
        (chart.up, [y for _, y in points]),
    ):
        ends = sorted((scale.start, scale.end))
        assert all(ends[0] - 0.1 <= scale.place(value) <= ends[1] + 0.1 for value in values)
        assert 1 <= len(scale.ticks) <= 8
    ElementTree.fromstring(chart.draw())


def test_chart_has_a_text_description_and_inherits_page_colors(results: RunResults) -> None:
    loss, metrics = draw_curves(UPDATES + VALIDATIONS, results)
    picture = ElementTree.fromstring(loss.draw())
    assert picture.attrib["role"] == "img"
    words = picture.attrib["aria-label"]
    assert words.startswith("Loss. loss by epoch. training: 0.1 at 10, 0.01111 at 90.")
    assert "validation: 0.5 at 30" in words
    assert "80%" in texts_of(metrics)
    assert "#" not in loss.draw()


def test_long_run_gives_a_small_chart_with_its_last_point() -> None:
    points = [(float(n), math.sin(n)) for n in range(100_001)]
    chart = Chart("Long", [Series("values", points)], Axis("x"), Axis("y"))
    assert len(chart.draw()) < 20_000
    assert chart.paths[0][1].endswith(f"{chart.across.place(1e5)} {chart.up.place(math.sin(1e5))}")
