"""``finetune label`` in a real browser: texts labeled by keyboard, on a phone and a screen."""

import csv
import re
import shlex
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn

import finetune
from finetune.web.journal import LabelJournal, Labels, LabelSource
from finetune.web.labeling import LabelingSession, make_label_app
from finetune.web.server import bind, local_hosts

if TYPE_CHECKING:
    from browser.conftest import Browser

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = "<img src=x onerror=alert(1)> {{ 7 * 7 }}"
TEXTS = [f"{HOSTILE} {word} {number}" for number in range(16) for word in ("good", "bad")]


def no_features(columns: object) -> None:
    raise ValueError("no weights")


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_texts_are_labeled_by_keyboard(
    width: int, scheme: str, browser: "Browser", tmp_path: Path, tiny_folder: Path
) -> None:
    journal = LabelJournal(tmp_path / "texts.csv", LabelSource([TEXTS], Labels(), False, "d"))
    session = LabelingSession(journal, no_features)  # type: ignore[arg-type]
    session.start()
    listener = bind("127.0.0.1", 0)
    port, token = listener.getsockname()[1], "secret"
    app = make_label_app(session, name="texts.csv", hosts=local_hosts(port), token=token)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    base = f"http://127.0.0.1:{port}"
    visit = browser.visit(f"{base}/?token={token}", width=width, scheme=scheme)
    shown = visit.page.locator("#text .text")

    def press(key: str, *, labeled: int) -> None:
        visit.page.keyboard.press(key)
        progress = re.compile(rf"^{labeled} of")
        visit.page.locator("#progress", has_text=progress).wait_for()
        visit.page.locator("body:not([data-busy])").wait_for()

    try:
        shown.wait_for()
        for name in ("good", "bad"):
            visit.page.fill("#class-name", name)
            visit.page.keyboard.press("Enter")
            visit.page.locator("#classes button", has_text=name).wait_for()
        for number in range(30):
            assert HOSTILE in shown.inner_text()
            key = "1" if " good " in shown.inner_text() else "2"
            press(key, labeled=number + 1)
        for number in range(3):
            press("Backspace", labeled=29 - number)
        visit.page.reload()
        shown.wait_for()
        assert visit.overflow <= 0
        for number in range(5):
            press("1" if " good " in shown.inner_text() else "2", labeled=28 + number)
        visit.page.get_by_text("All texts are labeled or skipped.").wait_for()
        command = shlex.split(visit.page.locator("#command").inner_text())
        for view in ("Labeled texts", "Contradictions", "Label"):
            visit.page.get_by_role("button", name=view, exact=True).click()
            visit.page.wait_for_timeout(300)
            assert visit.find_violations() == [], view
            assert visit.overflow <= 0, view
        assert all(url.startswith(base) for url in visit.requests), visit.requests
        # After the last text, the server answers 404, which the browser logs.
        assert [each for each in visit.messages if "404" not in each] == []
    finally:
        server.should_exit = True
        thread.join(30)
        session.stop()
    assert command[:2] == ["finetune", "run"]
    with journal.table_path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["text"] for row in rows) == sorted(TEXTS)
    assert all(f" {row['label']} " in row["text"] for row in rows)
    tested = sum(row["split"] == "test" for row in rows)
    run = finetune.run(
        data=command[2], model=str(tiny_folder), device="cpu", output_dir=str(tmp_path / "run")
    )
    assert run.test.samples == tested > 0
