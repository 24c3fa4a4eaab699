"""Loads ``finetune label`` and ``finetune serve`` with many requests, and checks every answer.

    python comparisons/web_load.py label-latency          10,000 texts of 20 words
    python comparisons/web_load.py label-kills            30 SIGKILLs in 1,000 labels
    python comparisons/web_load.py serve-speed RUN FILE   FILE: a table of 2,000 short texts
    python comparisons/web_load.py serve-mixed RUN FILE   10,000 requests, 1% of them malformed

Each prints one JSON object. ``--json`` of the commands prints the address of the server.
"""

import argparse
import csv
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

CLASSES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
CLIENTS = 20


class Client:
    """A connection that stays open."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._connection = HTTPConnection(parts.netloc, timeout=600)
        token = parts.query.removeprefix("token=")
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return the status and the JSON of an answer; a body of bytes is sent unchanged."""
        content = body if isinstance(body, bytes) else json.dumps(body)
        self._connection.request(method, path, content if body is not None else None, self._headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())


@contextmanager
def server(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a command of finetune; yield the process and its address."""
    command = [sys.executable, "-m", "finetune", *map(str, arguments), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, json.loads(process.stdout.readline())["address"]
        finally:
            process.send_signal(signal.SIGTERM)


def write_texts(folder: Path, *, count: int, words: int) -> Path:
    """Write random texts, one per line; the first word of each is its class."""
    source = random.Random(0)
    vocabulary = ["".join(source.choices("abcdefghijklmnoprstuvwxyz", k=6)) for _ in range(5000)]
    path = folder / "texts.txt"
    lines = [
        [source.choice(CLASSES), *source.choices(vocabulary, k=words - 1)] for _ in range(count)
    ]
    path.write_text("\n".join(map(" ".join, lines)) + "\n")
    return path


def label_latency(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the time from a label to the next text, once the features are computed."""
    with tempfile.TemporaryDirectory() as name:
        path = write_texts(Path(name), count=options.texts, words=20)
        arguments = ("label", path, "--model", options.model, "--classes", ",".join(CLASSES))
        with server(*arguments, "--no-browser") as (_, address):
            started, client = time.perf_counter(), Client(address)
            _, shown = client.ask("GET", "/api/next")
            first_seconds = time.perf_counter() - started
            while client.ask("GET", "/api/status")[1]["features"] < 1:
                time.sleep(0.5)
            milliseconds = []
            for _ in range(options.labels):
                started = time.perf_counter()
                label = {"row": shown["row"], "label": shown["text"].split()[0]}
                assert client.ask("POST", "/api/label", label)[0] == 200
                _, shown = client.ask("GET", "/api/next")
                milliseconds.append(1e3 * (time.perf_counter() - started))
                time.sleep(options.pause)
    return {
        "first_text_seconds": first_seconds,
        "median_ms": statistics.median(milliseconds),
        "95%_ms": statistics.quantiles(milliseconds, n=20)[-1],
        "most_ms": max(milliseconds),
    }


def label_kills(options: argparse.Namespace) -> dict[str, Any]:
    """Kill the server at random moments; every answered label is kept, and none is there twice."""
    answered: dict[int, str] = {}
    pending: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as name:
        path = write_texts(Path(name), count=options.labels, words=5)
        arguments = ("label", path, "--model", options.model, "--classes", ",".join(CLASSES))
        per_life, source = options.labels // (options.kills + 1), random.Random(1)
        for life in range(options.kills + 1):
            with server(*arguments, "--no-browser") as (process, address):
                client = Client(address)
                labeled = client.ask("GET", "/api/status")[1]["labeled"]
                # The label without an answer may have been written or not.
                if labeled == len(answered) + 1:
                    answered |= pending
                assert labeled == len(answered), (labeled, len(answered))
                for _ in range(per_life if life < options.kills else options.labels):
                    status, shown = client.ask("GET", "/api/next")
                    if status == 404:
                        break
                    answered |= label_row(client, shown)
                if life < options.kills:
                    pending = kill_during_a_label(process, client, source)
        rows = [*csv.DictReader((path.parent / "texts.labels.csv").open())]
    labels = {int(row["row"]): row["label"] for row in rows}
    return {
        "kills": options.kills,
        "labels": len(rows),
        "lost": len(answered.keys() - labels.keys()),
        "twice": len(rows) - len(labels),
        "wrong": sum(row["text"].split()[0] != row["label"] for row in rows),
    }


def label_row(client: Client, shown: dict[str, Any]) -> dict[int, str]:
    """Label a text with its class, and return the row and the class."""
    body = {"row": shown["row"], "label": shown["text"].split()[0]}
    status, answer = client.ask("POST", "/api/label", body)
    assert status == 200, answer
    return {body["row"]: body["label"]}


def kill_during_a_label(
    process: subprocess.Popen[str], client: Client, source: random.Random
) -> dict[int, str]:
    """Send a label, kill the server within the next milliseconds, and return the label."""
    status, shown = client.ask("GET", "/api/next")
    if status == 404:
        return {}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(label_row, client, shown)
        time.sleep(source.uniform(0, 0.03))
        process.kill()
        answer.exception()  # the connection may have been closed
    return {shown["row"]: shown["text"].split()[0]}


def read_texts(path: Path) -> list[str]:
    """Return the texts of a table, from its column ``text``."""
    return [row["text"] for row in csv.DictReader(path.open())]


def spread(
    clients: list[Client], work: Callable[[Client, Any], Any], items: list[Any]
) -> list[Any]:
    """Let each client process its share of the items; return the results in order."""
    with ThreadPoolExecutor(len(clients)) as threads:
        shares = [items[number :: len(clients)] for number in range(len(clients))]
        done = threads.map(
            lambda pair: [work(pair[0], item) for item in pair[1]],
            zip(clients, shares, strict=True),
        )
        results: list[Any] = [None] * len(items)
        for number, share in enumerate(done):
            results[number :: len(clients)] = share
    return results


def predict_one(client: Client, text: str) -> Any:
    """Return the answer for one text."""
    status, answer = client.ask("POST", "/", {"inputs": text})
    assert status == 200, answer
    return answer[0][0]


def serve_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Compare texts per second and latency with ``predict``, in turn and several times."""
    import finetune

    texts = read_texts(options.file)
    model = finetune.load(options.run)
    model.predict(texts)
    predict_rates, serve_rates, client_ms, predict_ms, request_ms = [], [], [], [], []
    with server("serve", options.run, "--port", "0") as (_, address):
        for _ in range(options.repeats):
            predict_rates.append(rate(lambda: model.predict(texts), texts))
            predict_ms += milliseconds(lambda text: model.predict([text]), texts[:200])
            # The server closes connections that are idle for 5 seconds.
            clients = [Client(address) for _ in range(CLIENTS)]
            ask = partial(predict_one, clients[0])
            request_ms += milliseconds(ask, texts[:200])
            started = time.process_time()
            serve_rates.append(rate(partial(spread, clients, predict_one, texts), texts))
            client_ms.append(1e3 * (time.process_time() - started) / len(texts))
    median = statistics.median
    return {
        "predict_texts_per_second": predict_rates,
        "serve_texts_per_second": serve_rates,
        "ratio_of_medians": median(serve_rates) / median(predict_rates),
        "client_cpu_ms_per_request": median(client_ms),
        "model_predict_p50_p95_ms": p50_p95(predict_ms),
        "one_client_p50_p95_ms": p50_p95(request_ms),
    }


def rate(act: Callable[[], Any], texts: list[str]) -> float:
    """Return how many texts per second an action classifies."""
    started = time.perf_counter()
    act()
    return len(texts) / (time.perf_counter() - started)


def milliseconds(act: Callable[[str], Any], texts: list[str]) -> list[float]:
    """Return the milliseconds of an action for each text."""
    measured = []
    for text in texts:
        started = time.perf_counter()
        act(text)
        measured.append(1e3 * (time.perf_counter() - started))
    return measured


def p50_p95(values: list[float]) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=20)[-1]


MALFORMED: tuple[Any, ...] = (
    b"{", b"[]", {"inputs": 3}, {"inputs": []}, {"inputs": "a", "parameters": {"top": 1}},
    {"inputs": {"text": "a", "text_pair": "b"}}, {"input": "a"},
)  # fmt: skip


def serve_mixed(options: argparse.Namespace) -> dict[str, Any]:
    """Send requests of mixed kinds; compare each answer with ``predict``."""
    import finetune

    texts, source = read_texts(options.file), random.Random(2)
    predictions = finetune.load(options.run).predict(texts, all_scores=True)
    expected = dict(zip(texts, predictions, strict=True))
    requests = [make_request(texts, source) for _ in range(options.requests)]
    with server("serve", options.run, "--port", "0") as (process, address):
        memory, answers, used_bytes = psutil.Process(process.pid).memory_info, [], []
        for start in range(0, len(requests), len(requests) // 10):
            part = requests[start : start + len(requests) // 10]
            # The server closes connections that are idle for 5 seconds.
            clients = [Client(address) for _ in range(CLIENTS)]
            answers += spread(clients, lambda client, body: client.ask("POST", "/", body), part)
            used_bytes.append(memory().rss)
    wrong = unanswered = 0
    for body, (status, answer) in zip(requests, answers, strict=True):
        if body in MALFORMED:
            unanswered += not 400 <= status < 500
        elif status != 200:
            unanswered += 1
        else:
            wrong += not is_equal(body, answer, expected)
    return {
        "requests": len(requests), "malformed": sum(body in MALFORMED for body in requests),
        "unanswered": unanswered, "wrong": wrong,
        "mib_after_each_tenth": [each // 2**20 for each in used_bytes],
    }  # fmt: skip


def make_request(texts: list[str], source: random.Random) -> Any:
    """Return a body: one text, several texts, with parameters, or malformed."""
    if source.random() < 0.01:
        return source.choice(MALFORMED)
    kind = source.randrange(3)
    if kind == 0:
        return {"inputs": source.choice(texts)}
    inputs = source.sample(texts, source.randint(1, 8))
    return {"inputs": inputs, **({"parameters": {"top_k": 2}} if kind == 2 else {})}


def is_equal(body: Any, answer: Any, expected: dict[str, Any]) -> bool:
    """Return whether an answer agrees with the predictions."""
    inputs = body["inputs"] if isinstance(body["inputs"], list) else [body["inputs"]]
    for text, ranked in zip(inputs, answer, strict=True):
        prediction = expected[text]
        if abs(ranked[0]["score"] - max(prediction.probabilities.values())) > 1e-4:
            return False
        if len(ranked) != (2 if "parameters" in body else 1):
            return False
    return len(answer) == len(inputs)


def main() -> None:
    """Run one of the load tests."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    loads = {
        "label-latency": label_latency, "label-kills": label_kills,
        "serve-speed": serve_speed, "serve-mixed": serve_mixed,
    }  # fmt: skip
    parser.add_argument("load", choices=loads)
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--labels", type=int)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two labels")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    options.labels = options.labels or (1_000 if options.load == "label-kills" else 100)
    print(json.dumps(loads[options.load](options)))


if __name__ == "__main__":
    main()
