"""Pages in a real browser, in narrow and wide windows, in light and dark mode and printed."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from bench.example_results import example_results as example_bench
from report.example_run import (
    CALIBRATION,
    DETAILS,
    example_results,
    write_example_run,
    write_predictions,
)

from finetune.files import write_jsonl
from finetune.report.page import render_bench, write_report
from finetune.runs.folder import RunFolder
from finetune.tasks.scores import ClassScores
from finetune.tasks.single import Single

if TYPE_CHECKING:
    from browser.conftest import Browser

# Starting a browser and running axe-core on a page both take seconds.
pytestmark = [pytest.mark.browser, pytest.mark.slow]

MARKUP, ARABIC = "<img src=x onerror=alert(1)></td> {{ 7 * 7 }}", "\u0645\u0631\u062d\u0628\u0627"
HOSTILE = f"{MARKUP} {ARABIC} \x1b[2J \u202etxet\u202c"
SHOWN = f"{MARKUP} {ARABIC} \\u001b[2J \\u202etxet\\u202c"
OPEN_ALL = "for (const one of document.querySelectorAll('details')) one.open = true"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all sections, in which texts and names are long and contain markup."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "a run")
    write_example_run(folder, text=HOSTILE, other=HOSTILE, column=HOSTILE)
    words = {"message": f"{HOSTILE} is odd", "remedy": "w" * 300}
    write_jsonl(folder.warnings_file, [words])
    rows = [(f"{HOSTILE} {'x' * n}", HOSTILE, "DESC", n / 50) for n in range(40)]
    write_predictions(folder, *rows, ("x" * 2000, "DESC", HOSTILE, 0.9), ("y", "DESC", "DESC", 1.0))
    results = example_results(other=HOSTILE)
    return write_report(folder, replace(results, details=DETAILS, calibration=CALIBRATION))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = tmp_path_factory.mktemp("bench") / "bench.html"
    results = example_bench()
    results = replace(results, machine={**results.machine, "cpu": HOSTILE})
    page.write_text(render_bench(results), encoding="utf-8")
    return page


@pytest.mark.parametrize("name", ["report", "bench"])
def test_page_is_accessible_and_self_contained(
    name: str, browser: "Browser", request: pytest.FixtureRequest
) -> None:
    file = request.getfixturevalue(name)
    for width in (390, 1280):
        for scheme in ("light", "dark"):
            visit = browser.visit(file, width=width, scheme=scheme)
            visit.page.evaluate(OPEN_ALL)
            assert visit.overflow <= 0, (width, scheme)
            assert visit.requests == [file.as_uri()]
            assert visit.find_violations() == [], (width, scheme)
            assert visit.messages == []
            visit.page.close()


@pytest.mark.parametrize(("classes", "name"), [(12, "a question about a delivery"), (40, "class")])
def test_confusion_matrix_fits_the_window(
    classes: int, name: str, tmp_path: Path, browser: "Browser"
) -> None:
    folder, results = RunFolder(tmp_path / "run"), example_results()
    write_example_run(folder)
    per_class = {f"{name} {n}": ClassScores(1.0, 1.0, 1.0, 5) for n in range(classes)}
    matrix = [[5 * (n == other) for other in range(classes)] for n in range(classes)]
    test = replace(results.test, per_class=per_class, confusion_matrix=matrix)
    write_predictions(folder, *((name, name, name, 0.9) for name in per_class))
    report = write_report(folder, replace(results, test=test, task=Single([*per_class])))
    visit = browser.visit(report, width=1400, scheme="light")
    assert visit.overflow <= 0
    wide = "document.querySelector('#confusion .wide')"
    assert visit.page.evaluate(f"{wide}.scrollWidth - {wide}.clientWidth") == 0
    visit.page.close()


@pytest.mark.parametrize("name", ["report", "bench"])
def test_page_prints_dark_on_white(
    name: str, browser: "Browser", request: pytest.FixtureRequest
) -> None:
    visit = browser.visit(request.getfixturevalue(name), width=794, scheme="dark")
    visit.page.emulate_media(media="print", color_scheme="dark")
    style = "getComputedStyle(document.body)"
    assert visit.page.evaluate(f"{style}.backgroundColor") == "rgb(255, 255, 255)"
    assert visit.page.evaluate(f"{style}.color") == "rgb(29, 33, 41)"
    assert visit.find_violations() == []
    assert visit.page.pdf().startswith(b"%PDF")
    visit.page.close()


def test_markup_in_texts_is_shown_as_text(report: Path, browser: "Browser") -> None:
    visit = browser.visit(report)
    visit.page.locator("summary").first.click()
    for place in ("#mistakes tbody td", "#classes tbody th", "#configuration td", "li .warning"):
        assert SHOWN in " ".join(visit.page.locator(place).all_inner_texts()), place
    assert visit.page.locator("img, script").count() == 0
    assert visit.messages == []
    visit.page.close()


def test_confusion_matrix_cells_filter_mistakes_by_keyboard(
    report: Path, browser: "Browser"
) -> None:
    visit = browser.visit(report)
    rows = visit.page.locator("#mistakes tbody tr:visible")
    assert rows.count() == 20
    visit.page.locator("#confusion a").first.focus()
    visit.page.keyboard.press("Enter")
    assert "predicted as DESC" in visit.page.locator("p.filter:visible").inner_text()
    assert set(visit.page.locator("#mistakes td:nth-child(3):visible").all_inner_texts()) == {
        "DESC"
    }
    visit.page.keyboard.press("Tab")
    visit.page.keyboard.press("Enter")
    assert visit.page.locator("p.filter:visible").count() == 0
    assert rows.count() == 20
    visit.page.close()
