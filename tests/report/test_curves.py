import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest

from finetune.report.curves import draw_curves
from finetune.tasks.base import Figure

UPDATES = [{"update": step, "loss": 1 / step} for step in range(10, 100, 10)]
VALIDATIONS = [
    {"update": step, "eval_loss": 0.5, "eval_accuracy": 0.9, "eval_macro_f1": 0.8}
    for step in (30, 60, 90)
]
METRICS = [
    Figure("accuracy", "accuracy", "accuracy", 0.9),
    Figure("macro_f1", "macro F1", "f1", 0.8),
]


def texts_of(svg: str) -> set[str]:
    return {element.text or "" for element in ElementTree.fromstring(svg).iter() if element.text}


def test_curves_are_one_svg_element_in_the_colours_of_the_page() -> None:
    svg = draw_curves(UPDATES + VALIDATIONS, METRICS)

    assert svg.startswith("<svg")
    assert {"Loss", "training", "validation", "accuracy", "macro F1"} <= texts_of(svg)
    assert set(re.findall(r"(?:stroke|fill): ([^;\"]+)", svg)) <= {
        *("none", "var(--muted)", "var(--line)", "var(--first)", "var(--second)")
    }


@pytest.mark.parametrize("updates", [UPDATES, []])
def test_run_without_validation_has_one_panel(updates: list[dict[str, float]]) -> None:
    svg = draw_curves(updates, METRICS)

    assert "Loss" in texts_of(svg)
    assert "Validation" not in texts_of(svg)


def test_metric_that_is_missing_is_not_drawn() -> None:
    svg = draw_curves([*UPDATES, {"update": 30, "eval_accuracy": 0.9}], METRICS)

    assert "accuracy" in texts_of(svg)
    assert "macro F1" not in texts_of(svg)


def test_settings_of_matplotlib_are_left_as_they_were() -> None:
    before = dict(matplotlib.rcParams)

    draw_curves(UPDATES + VALIDATIONS, METRICS)

    assert dict(matplotlib.rcParams) == before
