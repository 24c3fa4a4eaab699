"""``finetune label`` in a real browser, by keyboard and mouse, in narrow and wide windows."""

import csv
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn

import finetune
from finetune.web.journal import LabelJournal, Labels, LabelSource
from finetune.web.labeling import LabelBody, LabelingSession, make_label_app
from finetune.web.server import bind, local_hosts
from finetune.web.suspects import Suspects

if TYPE_CHECKING:
    from browser.conftest import Browser, Visit

pytestmark = [pytest.mark.browser, pytest.mark.slow]

HOSTILE = "<img src=x onerror=alert(1)> {{ 7 * 7 }}"
TEXTS = [f"{HOSTILE} {word} {number}" for number in range(16) for word in ("good", "bad")]


def no_features(columns: object) -> Any:
    raise ValueError("no weights")


@contextmanager
def serving(journal: LabelJournal, read: Any = no_features) -> Iterator[str]:
    """Serve a session, and yield the URL of its page."""
    session = LabelingSession(journal, read, command=lambda: f"finetune run {journal.table_path}")
    session.start()
    listener = bind("127.0.0.1", 0)
    port, token = listener.getsockname()[1], "secret"
    app = make_label_app(session, name="texts.csv", hosts=local_hosts(port), token=token)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/?token={token}"
    finally:
        server.should_exit = True
        thread.join(30)
        session.stop()


def make_journal(
    folder: Path, texts: Sequence[str], classes: Sequence[str] = (), *, multi: bool = False
) -> LabelJournal:
    return LabelJournal(folder / "texts.csv", LabelSource([[*texts]], Labels([*classes]), multi))


def wait_for(visit: "Visit", progress: str) -> None:
    visit.page.locator("#progress", has_text=re.compile(progress)).wait_for()
    visit.page.locator("body:not([data-busy])").wait_for()


def test_texts_can_be_labeled_by_keyboard(
    browser: "Browser", tmp_path: Path, tiny_folder: Path
) -> None:
    journal = make_journal(tmp_path, TEXTS)
    with serving(journal) as address:
        visit = browser.visit(address, width=400, scheme="dark")
        shown = visit.page.locator("#text .text")

        def press(key: str, *, labeled: int) -> None:
            visit.page.keyboard.press(key)
            wait_for(visit, rf"^{labeled} of")

        shown.wait_for()
        visit.page.get_by_text("The model failed: ValueError: no weights").wait_for()
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
        base = address.partition("/?")[0]
        assert all(url.startswith(base) for url in visit.requests), visit.requests
        # After the last text, the server returns 404, which the browser logs.
        assert [each for each in visit.messages if "404" not in each] == []
        visit.page.close()
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


def test_keys_act_on_focused_controls_and_are_shortcuts_elsewhere(
    browser: "Browser", tmp_path: Path
) -> None:
    with serving(make_journal(tmp_path, TEXTS, ["good", "bad"])) as address:
        visit = browser.visit(address)
        page = visit.page
        wait_for(visit, "^0 of")
        page.locator("#classes button").first.focus()
        for number in (1, 2, 3):  # the focus stays on the class
            page.keyboard.press("Space")
            wait_for(visit, rf"^{number} of 32 texts labeled\.$")
        page.locator("#undo").focus()
        for number in (2, 1, 0):
            page.keyboard.press("Space")
            wait_for(visit, rf"^{number} of 32 texts labeled\.$")
        page.keyboard.press("Space")
        page.get_by_text("nothing to undo").wait_for()
        for place in ("#show-suggestion", "label:has(#show-suggestion)", "button.tab >> nth=0"):
            page.locator(place).click(position={"x": 5, "y": 5})
        page.get_by_text("Rename, merge or delete classes").click()
        page.keyboard.press("2")
        wait_for(visit, r"^1 of 32 texts labeled\.$")
        page.locator("#undo").click()
        wait_for(visit, r"^0 of")
        page.keyboard.press("Space")
        wait_for(visit, r"^0 of 32 texts labeled, 1 skipped\.$")
        page.keyboard.press("Control+1")
        # Skipped texts are listed, and can be labeled.
        page.get_by_role("button", name="Labeled texts", exact=True).click()
        page.get_by_label("Skipped texts").check()
        page.get_by_role("button", name="Label it").click()
        page.locator("#view-label:not([hidden])").wait_for()
        wait_for(visit, "1 skipped")
        page.keyboard.press("1")
        wait_for(visit, r"^1 of 32 texts labeled\.$")
        page.close()


def test_multi_label_labels_are_changed_one_by_one(browser: "Browser", tmp_path: Path) -> None:
    journal = make_journal(tmp_path, TEXTS[:3], "abc", multi=True)
    with serving(journal) as address:
        visit = browser.visit(address)
        page = visit.page
        wait_for(visit, "^0 of")
        page.keyboard.press("Enter")
        page.get_by_text("press 0 if none fits").wait_for()
        for key in ("1", "2", "Enter"):
            page.keyboard.press(key)
        wait_for(visit, "^1 of")
        page.keyboard.press("0")
        wait_for(visit, "^2 of")
        assert sorted(journal.labels.rows.values()) == [(), ("a", "b")]
        page.get_by_role("button", name="Labeled texts", exact=True).click()
        page.locator("#search-class").select_option("a")
        # The text without labels is shown until the response to the search arrives.
        page.locator("article", has_text="none").wait_for(state="detached")
        page.locator("body:not([data-busy])").wait_for()
        page.get_by_role("button", name="Change", exact=True).click()
        page.get_by_text("Label: a, b").wait_for()
        page.locator("body:not([data-busy])").wait_for()
        for key in ("2", "3", "Enter"):
            page.keyboard.press(key)
        page.locator("#classes button", has_text=re.compile("^c.*1$")).wait_for()
        assert sorted(journal.labels.rows.values()) == [(), ("a", "c")]
        page.close()


def test_page_deletes_classes_and_warns_about_similar_names(
    browser: "Browser", tmp_path: Path
) -> None:
    journal = make_journal(tmp_path, TEXTS, ["Housing", "bad"])
    with serving(journal) as address:
        visit, asked = browser.visit(address), list[str]()
        page = visit.page
        wait_for(visit, "^0 of")

        def answer(dialog: Any) -> None:
            asked.append(dialog.message)
            (dialog.dismiss if len(asked) == 1 else dialog.accept)()

        page.on("dialog", answer)
        for count in (2, 3):
            page.fill("#class-name", "housing ")
            page.keyboard.press("Enter")
            page.locator(f"#classes button >> nth={count - 1}").wait_for()
            page.wait_for_timeout(200)
            assert len(journal.labels.classes) == count
        page.get_by_text("Rename, merge or delete classes").click()
        page.locator("#old-name").select_option("housing")
        page.get_by_role("button", name="Change", exact=True).click()
        page.locator("#classes button >> nth=2").wait_for(state="detached")
        assert journal.labels.classes == ["Housing", "bad"]
        assert 'The class "Housing" already exists' in asked[0]
        assert 'Delete the class "housing" and its 0 labels?' in asked[2]
        page.close()


@pytest.mark.parametrize("is_accepted", [False, True])
def test_stale_tab_asks_before_it_overwrites_a_label(
    is_accepted: bool, browser: "Browser", tmp_path: Path
) -> None:
    journal = make_journal(tmp_path, TEXTS, ["good", "bad"])
    with serving(journal) as address:
        first, second = browser.visit(address), browser.visit(address)
        wait_for(first, "^0 of")
        wait_for(second, "^0 of")
        first.page.keyboard.press("1")
        wait_for(first, "^1 of")
        asked = list[str]()

        def answer(dialog: Any) -> None:
            asked.append(dialog.message)
            (dialog.accept if is_accepted else dialog.dismiss)()

        second.page.on("dialog", answer)
        second.page.keyboard.press("2")
        wait_for(second, "^1 of")
        assert "now has the label 'good'" in asked[0]
        assert [*journal.labels.rows.values()] == [("bad" if is_accepted else "good",)]
        first.page.on("dialog", answer)
        first.page.keyboard.press("Backspace")
        first.page.wait_for_timeout(500)
        assert len(asked) == (2 if is_accepted else 1)
        first.page.close()
        second.page.close()


def test_disk_error_is_shown(
    browser: "Browser", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, rows: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    with serving(make_journal(tmp_path, TEXTS, ["good", "bad"])) as address:
        visit = browser.visit(address)
        wait_for(visit, "^0 of")
        text = visit.page.locator("#text").inner_text()
        with monkeypatch.context() as patch:
            patch.setattr("finetune.web.journal.append_jsonl", fail)
            visit.page.keyboard.press("1")
            visit.page.locator("#error", has_text="No space left on device").wait_for()
        assert visit.page.locator("#text").inner_text() == text
        visit.page.keyboard.press("1")
        wait_for(visit, "^1 of")
        assert not visit.page.locator("#error").is_visible()
        visit.page.close()


def test_contradictions_can_be_confirmed_or_changed(browser: "Browser", tmp_path: Path) -> None:
    def read(columns: Any) -> Any:
        import numpy as np

        keys = [["good" in text, "bad" in text] for text in columns[0]]
        return np.array(keys, np.float32) + np.arange(len(keys))[:, None] * np.float32(1e-3)

    journal = make_journal(tmp_path, TEXTS, ["good", "bad"])
    session = LabelingSession(journal)
    for row in range(20):
        is_right = row not in (3, 6, 9)
        name = "good" if (" good " in TEXTS[row]) == is_right else "bad"
        session.label(LabelBody(row=row + 1, label=name))
    with serving(journal, read) as address:
        visit = browser.visit(address)
        page = visit.page
        wait_for(visit, "^20 of 32 texts labeled.$")
        for number in range(21, 24):
            key = "1" if " good " in page.locator("#text").inner_text() else "2"
            page.keyboard.press(key)
            wait_for(visit, f"^{number} of")
            page.wait_for_timeout(300)
        page.locator("#advice", has_text="random texts, the model has accuracy").wait_for()
        page.get_by_role("button", name="Contradictions", exact=True).click()
        page.locator("article").first.wait_for()
        count = page.locator("article").count()
        assert count >= 2
        page.get_by_role("button", name="Confirm").first.click()
        page.get_by_role("button", name=re.compile("^Change to ")).nth(1).wait_for()
        page.locator("body:not([data-busy])").wait_for()
        page.get_by_role("button", name=re.compile("^Change to ")).first.click()
        page.locator("body:not([data-busy])").wait_for()
        page.wait_for_timeout(300)
        assert page.locator("article").count() == count - 2
        page.get_by_role("button", name="Contradictions", exact=True).click()
        page.wait_for_timeout(500)
        assert page.locator("article").count() == count - 2  # they are not listed again
        page.close()


def test_only_words_in_the_shown_text_are_highlighted(browser: "Browser", tmp_path: Path) -> None:
    path = tmp_path / "suspects.csv"
    lines = ["decision,split,row,label,suggested,loss,suggested_probability,text,words"]
    lines += [f",train,{n},bad,good,1.5,0.9,text {n} text,text -0.4|{n} -0.2" for n in range(1, 4)]
    path.write_text("\n".join(lines))
    with serving(Suspects(path, ["bad", "good"], is_multi_label=False), None) as address:
        visit = browser.visit(address, scheme="dark")
        page = visit.page
        page.get_by_text("Suggestion: good (90%). Words that support it: text, 1").wait_for()
        assert page.locator("#text mark").all_inner_texts() == ["text", "1", "text"]
        assert visit.find_violations() == []
        held: list[Any] = []
        page.route("**/api/words?row=2", lambda route: held.append(route))
        for number in (1, 2):
            page.keyboard.press("Enter")
            wait_for(visit, rf"^{number} of 3 ")
        page.get_by_text("Words that support it: text, 3").wait_for()
        [route] = held
        route.continue_()
        page.wait_for_timeout(300)
        assert page.locator("#text mark").all_inner_texts() == ["text", "3", "text"]
        assert visit.messages == []
        page.close()


def test_decisions_on_suspects_are_saved(browser: "Browser", tmp_path: Path) -> None:
    path = tmp_path / "suspects.csv"
    lines = ["decision,split,row,label,suggested,loss,suggested_probability,text"]
    lines += [f",train,{row},bad,good,1.5,0.9,text {row}" for row in range(1, 7)]
    path.write_text("\n".join(lines))
    with serving(Suspects(path, ["bad", "good", "other"], is_multi_label=False), None) as address:
        visit = browser.visit(address)
        page = visit.page
        page.get_by_text("Suggestion: good (90%)").wait_for()
        page.get_by_text("Label: bad").wait_for()
        for number, key in enumerate(["Enter", ".", "3", "4"], 1):
            page.keyboard.press(key)
            wait_for(visit, rf"^{number} of 6 ")
        page.keyboard.press("Space")
        wait_for(visit, "1 skipped")
        assert visit.find_violations() == []
        page.close()
    with path.open() as file:
        decisions = [row["decision"] for row in csv.DictReader(file)]
    assert decisions == ["keep", "good", "other", "drop", "", ""]
    path.write_text(path.read_text().replace("\n,train,5", "\nKeep,train,5"))
    with serving(Suspects(path, ["bad", "good", "other"], is_multi_label=False), None) as address:
        visit = browser.visit(address)
        visit.page.get_by_text("text 6").wait_for()
        wait_for(visit, "^5 of 6")
        visit.page.keyboard.press(".")
        visit.page.get_by_text("All texts are labeled or skipped.").wait_for()
        visit.page.close()
    with path.open() as file:
        decisions = [row["decision"] for row in csv.DictReader(file)]
    assert decisions == ["keep", "good", "other", "drop", "Keep", "good"]
