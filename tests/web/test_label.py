"""``finetune label`` over HTTP."""

import csv
import errno
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from starlette.testclient import TestClient

from finetune.commands.flags import load
from finetune.commands.label import open_session
from finetune.config.schema import DataConfig
from finetune.events import Event, Info, WarningMessage, sent_to
from finetune.training.linear_head import normalize
from finetune.web.journal import Action, LabelJournal, Labels, LabelSource, read_label_source
from finetune.web.labeling import (
    FIRST_TEXTS,
    LabelBody,
    LabelingSession,
    Selection,
    fit_output,
    make_label_app,
)

TOKEN = "secret"
# Customer messages, 8 for each of 8 classes.
SUPPORT = Path(__file__).with_name("support.csv")
WORDS = {"refund": "money back please", "praise": "very good indeed", "bug": "it crashes often"}
TEXTS = [f"{words} {number}" for number in range(30) for words in WORDS.values()]
TRUE = [name for _ in range(30) for name in WORDS]


def read_features(columns: Sequence[Sequence[str]]) -> Any:
    """Return vectors of texts or class names, each close to the vector of its class."""
    random = np.random.default_rng(0)
    keys = [[name in text or words in text for name, words in WORDS.items()] for text in columns[0]]
    return np.array(keys, np.float32) + random.normal(0, 0.1, (len(keys), 3)).astype(np.float32)


def make_session(
    folder: Path, *, multi: bool = False, read: Any = read_features, texts: Sequence[str] = TEXTS,
    classes: Sequence[str] = tuple(WORDS)
) -> LabelingSession:  # fmt: skip
    source = LabelSource([[*texts]], Labels([*classes]), multi)
    return LabelingSession(LabelJournal(folder / "texts.csv", source), read)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LabelingSession]:
    session = make_session(tmp_path)
    yield session
    session.stop()


def make_client(session: LabelingSession, **options: Any) -> TestClient:
    app = make_label_app(session, name="<b>.csv", hosts=["testserver"], token=TOKEN)
    return TestClient(app, **{"headers": {"Authorization": f"Bearer {TOKEN}"}, **options})


def wait_until(client: TestClient, is_true: Callable[[Any], Any]) -> Any:
    end = time.monotonic() + 30
    while not is_true(status := client.get("/api/status").json()):
        assert time.monotonic() < end, status
        time.sleep(0.02)
    return status


def test_class_names_give_suggestions_before_the_first_label(session: LabelingSession) -> None:
    client = make_client(session)
    session.start()
    wait_until(client, lambda status: client.get("/api/next").json()["suggestion"])
    assert not client.get("/api/status").json()["error"]


def test_class_descriptions_replace_meaningless_names(tmp_path: Path) -> None:
    described = {
        "x": ["money back", "money back please"],
        "y": ["very good indeed"],
        "z": ["often"],
    }
    source = LabelSource([[*TEXTS]], Labels([*described]), False)
    journal = LabelJournal(tmp_path / "texts.csv", source)
    session = LabelingSession(journal, read_features, descriptions=described)
    client = make_client(session)
    session.start()
    wait_until(client, lambda status: client.get("/api/next").json()["suggestion"])
    suggested = [client.get(f"/api/next?row={row}").json()["suggestion"] for row in (1, 2, 4, 5)]
    assert [suggestion["label"] for suggestion in suggested] == ["x", "y", "x", "y"]
    session.stop()


def test_first_texts_are_balanced_and_exclude_random_texts() -> None:
    features = normalize(read_features([TEXTS]))
    names = dict(zip(WORDS, normalize(read_features([[*WORDS]])), strict=True))
    order = np.random.default_rng(0).permutation(len(TEXTS))
    selection, labels = Selection(order, random_fraction=0.25), Labels([*WORDS])
    selection.features = features
    for _ in range(FIRST_TEXTS):
        output = fit_output(labels.rows, names, features, sample=order, is_multi=False)
        chosen = selection.next(labels, output)
        assert chosen is not None
        assert chosen[1] == "spread"
        assert chosen[0] not in selection.random_rows
        labels.apply(Action("label", chosen[0], (TRUE[chosen[0]],), chosen[1]))
        counts = labels.counts().values()
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("as_file", [False, True])
def test_first_text_has_a_suggestion(
    as_file: bool, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with SUPPORT.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    classes = [*dict.fromkeys(row["class"] for row in rows)]
    Path("texts.txt").write_text("\n".join(row["text"] for row in rows))
    Path("classes.csv").write_text(
        "class,description\n" + "".join(f"{c},a\n{c},b\n" for c in classes)
    )
    chosen = {"class_descriptions": "classes.csv"} if as_file else {"classes": ",".join(classes)}
    loaded = load(data="texts.txt", model=str(tiny_folder), device="cpu", **chosen)
    session = open_session(loaded, is_multi=False)
    client = make_client(session)
    session.start()
    wait_until(client, lambda status: client.get("/api/next").json()["suggestion"])
    status = client.get("/api/status").json()
    assert [*status["classes"]] == classes
    assert status["labeled"] == 0
    assert f"--classes '{','.join(classes)}'" in status["command"]
    assert ("--class-descriptions classes.csv" in status["command"]) == as_file
    session.stop()


def test_texts_are_shown_and_labeled_one_at_a_time(session: LabelingSession) -> None:
    client = make_client(session)
    session.start()
    wait_until(client, lambda status: status["features"] == 1)
    shown = {}
    for number in range(len(TEXTS)):
        row = client.get("/api/next").json()
        assert client.get("/api/next").json()["row"] == row["row"]
        assert row["text"] == TEXTS[row["row"] - 1]
        shown[row["row"]] = row["how"]
        label = None if number == 7 else TRUE[row["row"] - 1]
        status = client.post("/api/label", json={"row": row["row"], "label": label}).json()
        assert status["labeled"] + status["skipped"] == number + 1
    assert client.get("/api/next").status_code == 404
    assert sorted(shown) == list(range(1, len(TEXTS) + 1))
    assert {*shown.values()} >= {"random", "spread"}
    with open(session.journal.table_path, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(TEXTS) - 1
    assert all(row["text"] == TEXTS[int(row["row"]) - 1] for row in rows)
    assert all((row["split"] == "test") == (row["how"] == "random") for row in rows)
    undone = client.post("/api/undo", json={}).json()
    assert undone["labeled"] == len(TEXTS) - 2
    assert client.get("/api/next").json()["row"] == undone["row"]


def test_classes_can_be_added_renamed_merged_deleted_and_searched(tmp_path: Path) -> None:
    client = make_client(make_session(tmp_path, classes="abc"))
    for row, name in ((1, " a "), (2, "b"), (3, "c")):
        client.post("/api/label", json={"row": row, "label": name})
    client.post("/api/classes", json={"name": "d"})
    status = client.post("/api/classes", json={"name": "b", "new_name": "a"}).json()
    assert status["classes"] == {"a": 2, "c": 1, "d": 0}
    found = client.get("/api/texts?class=a&search=GOOD").json()
    assert [(row["row"], row["label"]) for row in found] == [(2, "a")]
    assert client.post("/api/undo", json={}).json()["classes"] == {"a": 1, "b": 1, "c": 1, "d": 0}
    status = client.post("/api/classes", json={"name": "c", "new_name": ""}).json()
    assert status["classes"] == {"a": 1, "b": 1, "d": 0}
    assert status["labeled"] == 2


def test_deleting_a_class_keeps_other_labels_of_a_text(tmp_path: Path) -> None:
    client = make_client(make_session(tmp_path, multi=True, classes="ab"))
    for row, names in ((1, ["a", "b"]), (2, ["b"]), (3, [])):
        client.post("/api/label", json={"row": row, "label": names})
    status = client.post("/api/classes", json={"name": "b", "new_name": ""}).json()
    assert status["classes"] == {"a": 1}
    labels = {row["row"]: row["label"] for row in client.get("/api/texts").json()}
    assert labels == {1: ["a"], 3: []}


def test_skipped_texts_are_listed_and_can_be_shown_again(session: LabelingSession) -> None:
    client = make_client(session)
    first = client.get("/api/next").json()["row"]
    client.post("/api/label", json={"row": first, "label": None})
    assert [row["row"] for row in client.get("/api/texts?skipped").json()] == [first]
    assert client.get("/api/texts").json() == []
    assert client.get(f"/api/next?row={first}").json()["row"] == first
    assert client.get("/api/next").json()["row"] != first
    client.post("/api/label", json={"row": first, "label": "bug"})
    assert client.get("/api/texts?skipped").json() == []


def test_stale_page_gets_status_412(session: LabelingSession) -> None:
    client = make_client(session)

    def post(label: str | None, **was: str | None) -> int:
        body = {"row": 1, "label": label, **was}
        return client.post("/api/label", json=body).status_code

    assert post("bug", was=None) == 200
    for label in ("praise", None, "bug"):
        assert post(label, was=None) == 412
    assert post("praise", was="bug") == 200
    assert post("refund") == 200  # scripts can omit it
    response = client.post("/api/label", json={"row": 1, "label": "bug", "was": "praise"})
    assert response.json() == {"error": "row 1 now has the label 'refund'"}
    assert client.post("/api/undo", json={"undoable": 2}).status_code == 412
    assert client.post("/api/undo", json={"undoable": 3}).status_code == 200


@pytest.mark.parametrize("multi", [False, True])
def test_confirmed_label_is_not_listed_as_a_contradiction(multi: bool, tmp_path: Path) -> None:
    session = make_session(tmp_path, multi=multi)

    def label(row: int, name: str) -> None:
        session.label(LabelBody(row=row + 1, label=[name] if multi else name))

    for row in range(40):
        label(row, "bug" if row == 3 else TRUE[row])
    session.start()
    client = make_client(session)
    wait_until(client, lambda status: status["agreement"])
    assert [row["row"] for row in client.get("/api/contradictions").json()] == [4]
    label(3, "bug")
    assert client.get("/api/contradictions").json() == []
    label(3, "refund")
    label(3, "bug")
    found = client.get("/api/contradictions").json()
    assert [row["row"] for row in found] == [4]
    session.stop()


def test_full_disk_is_reported_and_the_label_is_not_saved(
    session: LabelingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, rows: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    client = make_client(session)
    with monkeypatch.context() as patch:
        patch.setattr("finetune.web.journal.append_jsonl", fail)
        response = client.post("/api/label", json={"row": 1, "label": "bug"})
    assert response.status_code == 500
    assert "No space left on device" in response.json()["error"]
    assert "free disk space" in response.json()["error"]
    assert client.get("/api/status").json()["labeled"] == 0


def test_unexpected_error_is_returned_as_json(
    session: LabelingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.journal, "record", None)
    client = make_client(session, raise_server_exceptions=False)
    response = client.post("/api/label", json={"row": 1, "label": "bug"})
    assert response.status_code == 500
    assert response.json() == {"error": "unexpected TypeError"}


def read_words(columns: Sequence[Sequence[str]]) -> Any:
    """Return features that count the name and the first word of each class."""
    keys = [(name, words.split()[0]) for name, words in WORDS.items()]
    counts = [
        [sum(text.split().count(key) for key in pair) for pair in keys] for text in columns[0]
    ]
    return np.float32(counts) + np.float32(0.1)


@pytest.mark.parametrize("multi", [False, True])
def test_words_that_support_the_suggestion_are_highlighted(multi: bool, tmp_path: Path) -> None:
    session = make_session(tmp_path, multi=multi, read=read_words, texts=[*TEXTS, "very " * 101])
    client = make_client(session)
    for row in range(24):
        session.label(LabelBody(row=row + 1, label=[TRUE[row]] if multi else TRUE[row]))
    session.start()
    for row, word in ((31, "money"), (32, "very"), (91, None)):
        wait_until(
            client, lambda _, row=row: client.get(f"/api/next?row={row}").json()["suggestion"]
        )
        shown = client.get(f"/api/next?row={row}").json()
        answer = client.get(f"/api/words?row={row}").json()
        assert answer["label"] == shown["suggestion"]["label"]
        assert "".join(piece for piece, _ in answer["text"]) == shown["text"]
        assert [piece for piece, is_word in answer["text"] if is_word] == [word] * bool(word)
    # Row 32 is no longer shown.
    assert client.get("/api/words?row=32").json()["text"] == [[TEXTS[31], False]]
    assert client.get("/api/words?row=92").status_code == 404
    session.stop()


def test_explanations_do_not_block_other_requests(tmp_path: Path) -> None:
    has_started, may_finish = threading.Event(), threading.Event()

    def read(columns: Sequence[Sequence[str]]) -> Any:
        if "back please 0" in columns[0]:  # the first text without its first word
            has_started.set()
            assert may_finish.wait(30)
        return read_words(columns)

    session = make_session(tmp_path, read=read)
    client = make_client(session)
    session.start()
    wait_until(client, lambda status: client.get("/api/next?row=1").json()["suggestion"])
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client.get, "/api/words?row=1")
        assert has_started.wait(30)
        second = pool.submit(client.get, "/api/words?row=1")
        client.post("/api/label", json={"row": 1, "label": "refund"})
        assert client.get("/api/next").json()["row"] != 1
        may_finish.set()
        assert [
            any(is_word for _, is_word in each.result(30).json()["text"])
            for each in (first, second)
        ] == [True, False]
    session.stop()


def test_status_reports_agreement_and_one_metric(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    client = make_client(session)
    session.start()
    wait_until(client, lambda status: client.get("/api/next").json()["suggestion"])
    for number in range(35):
        row = client.get("/api/next").json()
        label = (
            "bug" if number == 34 and row["suggestion"]["label"] != "bug" else TRUE[row["row"] - 1]
        )
        client.post("/api/label", json={"row": row["row"], "label": label, "was": row["label"]})
    status = wait_until(client, lambda status: status["agreement"])
    assert status["suggestions"]["last"] == 30
    assert 25 <= status["suggestions"]["agreed"] <= 30
    assert status["agreement"]["metric"] == "accuracy"
    assert 0 <= status["agreement"]["low"] <= status["agreement"]["value"] <= 1
    assert client.post("/api/undo", json={}).json()["suggestions"]["last"] == 30
    session.stop()


def test_multi_label_status_reports_micro_f1(tmp_path: Path) -> None:
    session = make_session(tmp_path, multi=True)
    for row in range(40):
        session.label(LabelBody(row=row + 1, label=[TRUE[row]]))
    session.start()
    client = make_client(session)
    agreement = wait_until(client, lambda status: status["agreement"])["agreement"]
    assert agreement["metric"] == "micro F1"
    assert agreement["low"] <= agreement["value"] <= agreement["high"]
    session.stop()


def test_suggested_command_contains_the_options_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my texts.txt").write_text("one\ntwo\n \nthree")
    loaded = load(data="my texts.txt", classes="a,b", model="minilm", device="cpu")
    session = open_session(loaded, is_multi=False)
    client = make_client(session)
    plain = "finetune run 'my texts.labels.csv' --model minilm --device cpu"
    unlabeled = f"{plain} --unlabeled 'my texts.txt' --classes a,b"
    assert client.get("/api/status").json()["command"] == unlabeled
    assert client.post("/api/label", json={"row": 3, "label": "a"}).status_code == 404
    for row, name in ((1, "a"), (2, "a"), (4, "b")):
        status = client.post("/api/label", json={"row": row, "label": name}).json()
    assert status["texts"] == status["labeled"] == 3
    assert status["command"] == plain
    session.stop()


def test_guessed_model_is_printed_and_in_the_suggested_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("one\ntwo\nthree")
    printed: list[Event] = []
    with sent_to(printed.append):
        session = open_session(load(data="texts.txt", classes="a,b"), is_multi=False)
    assert Info("guessed: --model minilm (there are few labels at first)") in printed
    assert session.command().startswith("finetune run texts.labels.csv --model minilm ")
    session.stop()


def test_fitted_head_contradicts_a_wrong_label(session: LabelingSession) -> None:
    for row in range(40):
        session.label(LabelBody(row=row + 1, label="bug" if row == 3 else TRUE[row]))
    session.start()
    client = make_client(session)
    status = wait_until(client, lambda status: status["agreement"])
    assert status["agreement"]["value"] >= 1 - 1.5 / status["agreement"]["texts"]
    if 3 not in session._selection.random_rows:
        found = client.get("/api/contradictions").json()
        assert [(row["row"], row["label"]) for row in found] == [(4, "bug")]
    assert client.get("/api/next").json()["suggestion"]["label"] in WORDS


def test_labeling_works_without_a_model(tmp_path: Path) -> None:
    def fail(columns: Any) -> Any:
        raise ValueError("no weights")

    session, events = make_session(tmp_path, multi=True, read=fail, classes="ab"), list[Event]()
    with sent_to(events.append):
        session.start()
    client = make_client(session)
    wait_until(client, lambda status: status["error"])
    hows = set()
    for _ in range(8):
        row = client.get("/api/next").json()
        hows.add(row["how"])
        client.post("/api/label", json={"row": row["row"], "label": ["a", "b"]})
    assert hows == {"spread", "random"}
    status = client.get("/api/status").json()
    assert "no weights" in status["error"]
    assert any(isinstance(event, WarningMessage) for event in events)
    assert status["classes"] == {"a": 8, "b": 8}
    session.stop()


POST = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "code"),
    [
        ("GET", "/api/next", POST, "", 200),
        ("GET", "/api/next", {}, "", 401),
        ("GET", "/", {}, "", 401),
        ("GET", "/api/next", {"authorization": "Bearer wrong"}, "", 401),
        ("GET", "/api/next", {"authorization": f"Basic {TOKEN}"}, "", 401),
        ("GET", "/api/next", {"cookie": f"finetune-token={TOKEN}"}, "", 401),
        ("GET", f"/?token={TOKEN}", {}, "", 200),
        ("GET", "/api/next", {**POST, "host": "evil.example"}, "", 403),
        ("GET", "/api/next", {**POST, "origin": "http://evil.example"}, "", 403),
        ("GET", "/api/next", {**POST, "origin": "null"}, "", 403),
        ("GET", "/api/next", {**POST, "origin": "http://testserver"}, "", 200),
        ("GET", "/api/nothing", POST, "", 404),
        ("GET", "/api/label", POST, "", 405),
        ("POST", "/api/label", {**POST, "content-type": "text/plain"}, "{}", 415),
        ("POST", "/api/label", POST, "{", 400),
        ("POST", "/api/label", POST, '{"row": 1}', 422),
        ("POST", "/api/label", POST, '{"row": 1, "label": 3}', 422),
        ("POST", "/api/label", POST, '{"row": 1, "label": " "}', 422),
        ("POST", "/api/label", POST, '{"row": 1, "label": ["a", "b"]}', 422),
        ("POST", "/api/label", POST, '{"row": 1, "label": "a", "more": 1}', 422),
        ("POST", "/api/label", POST, '{"row": 1, "label": "bugs"}', 422),
        ("POST", "/api/label", POST, '{"row": 0, "label": "a"}', 404),
        ("POST", "/api/label", POST, '{"row": 91, "label": "a"}', 404),
        ("POST", "/api/undo", POST, "{}", 409),
        ("POST", "/api/classes", POST, '{"name": "x", "new_name": "y"}', 404),
        ("POST", "/api/label", POST, '{"row": 1, "label": "' + "a" * 2**20 + '"}', 413),
    ],
)
def test_requests_succeed_or_return_an_error_message(
    method: str, path: str, headers: dict[str, str], body: str, code: int, session: LabelingSession
) -> None:
    response = make_client(session, headers={}).request(method, path, headers=headers, content=body)
    assert response.status_code == code, response.text
    assert "default-src 'none'" in response.headers["content-security-policy"]
    if code >= 400:
        assert len(response.json()["error"]) > 5
        assert not session.journal.actions


def test_page_escapes_names_and_sets_a_cookie(session: LabelingSession) -> None:
    client = make_client(session, headers={})
    page = client.get(f"/?token={TOKEN}")
    assert "&lt;b&gt;.csv" in page.text
    assert "HttpOnly" in page.headers["set-cookie"]
    assert "SameSite=strict" in page.headers["set-cookie"]
    assert client.get("/api/status").status_code == 200
    for file in ("style.css", "label.js"):
        assert file in page.text
        assert client.get(f"/{file}").status_code == 200
    assert not re.search(r"(src|href)=\"(?!/(style\.css|label\.js))", page.text)


@pytest.mark.parametrize(
    ("name", "content", "multi", "texts", "labels"),
    [
        ("a.txt", "one\n\ntwo", False, [["one", "", "two"]], {}),
        ("a.csv", "id,text\n1,one text\n2,two text", False, [["one text", "two text"]], {}),
        (
            "a.csv", "text,label\none text,x\ntwo text,\nthree,x", False,
            [["one text", "two text", "three"]], {0: ("x",), 2: ("x",)},
        ),
        (
            "a.csv", 'text,label\none text,"[""x"", ""y""]"\ntwo text,', True,
            [["one text", "two text"]], {0: ("x", "y")},
        ),
        (
            "a.csv", "premise,hypothesis\nIt rains now.,It is wet.\nIt snows.,It is warm.", False,
            [["It rains now.", "It snows."], ["It is wet.", "It is warm."]], {},
        ),
        (
            "a.csv", "text,label\none text,x\n ,y\ntwo text,z", False,
            [["one text", " ", "two text"]], {0: ("x",), 2: ("z",)},
        ),
        ("a.jsonl", '{"text": "one text", "label": 1}\n{"text": "two"}', False,
         [["one text", "two"]], {0: ("1",)}),
    ],
)  # fmt: skip
def test_input_file_is_read_with_its_labels(
    name: str, content: str, multi: bool, texts: Any, labels: Any, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text(content)
    source = read_label_source(path, DataConfig(), is_multi_label=False)
    assert source.texts == texts
    assert source.labels.rows == labels
    assert source.is_multi_label == multi
    assert source.is_blank.tolist() == [not text.strip() for text in texts[0]]


class Served:
    """``finetune label`` in a separate process."""

    def __init__(self, folder: Path, *options: str) -> None:
        arguments = [*("label", "texts.txt", "--no-browser", "--json"), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "finetune", *arguments],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout
        self.address = json.loads(self.process.stdout.readline() or "{}").get("address", "")

    def request(self, path: str, body: Any = None) -> Any:
        base, _, token = self.address.partition("/?token=")
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(base + path, data, headers), timeout=60) as response:
            return json.load(response)


@pytest.mark.slow
def test_labels_survive_a_kill_and_a_signal_stops_the_server(
    tmp_path: Path, tiny_folder: Path
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    options = ["--model", str(tiny_folder), "--classes", ",".join(WORDS), "--device", "cpu"]
    labeled: dict[int, str] = {}
    served = Served(tmp_path, *options)
    end, row = time.monotonic() + 0.6, 0
    while time.monotonic() < end and len(labeled) < len(TEXTS):
        row = served.request("/api/next")["row"]
        assert row not in labeled
        labeled[row] = TRUE[row - 1]
        served.request("/api/label", {"row": row, "label": TRUE[row - 1]})
    served.process.kill()
    served.process.wait()
    served = Served(tmp_path, *options)
    second = Served(tmp_path, *options)
    assert second.process.wait(60) == 2
    assert served.request("/api/status")["labeled"] == len(labeled)
    with pytest.raises(HTTPError, match="403"):
        urlopen(Request(served.address, headers={"Host": "evil.example"}), timeout=60)
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(60) == 0
    with open(tmp_path / "texts.labels.csv", newline="") as file:
        labels = {int(row["row"]): row["label"] for row in csv.DictReader(file)}
    assert labels == labeled
