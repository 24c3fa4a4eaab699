"""``finetune serve`` over HTTP: the predictions of ``predict``, and rejections."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import starlette.requests
import uvicorn
from huggingface_hub import InferenceClient
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient
from tiny_runs import TEXTS, Command

import finetune
from finetune.runs.folder import RunFolder
from finetune.web import serve_app
from finetune.web.serve_app import Batcher, ServedModel, make_serve_app
from finetune.web.server import StrictBody, bind, local_hosts, read_body


@pytest.fixture(scope="module")
def model(finished_run: Path) -> ServedModel:
    return ServedModel(RunFolder(finished_run), device="cpu")


def client_of(model: ServedModel, *, token: str | None = None, **options: Any) -> TestClient:
    app = make_serve_app(model, address="<i>", hosts=["testserver"], token=token)
    return TestClient(app, **options)


@pytest.fixture(scope="module")
def address(model: ServedModel) -> Iterator[str]:
    """Serve the model on a real socket."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    app = make_serve_app(model, address="", hosts=local_hosts(port))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)


def test_an_inference_client_gets_what_predict_says(address: str, finished_run: Path) -> None:
    expected = finetune.predict(finished_run, TEXTS, device="cpu", all_scores=True)
    client = InferenceClient(model=address, token="hf_xxx")
    for text, prediction in zip(TEXTS, expected, strict=True):
        [found] = client.text_classification(text)
        assert found.label == prediction.label
        assert found.score == pytest.approx(prediction.probability, abs=1e-6)
        ranked = client.text_classification(text, top_k=3, function_to_apply="softmax")
        assert len(ranked) == 3
        assert ranked[0].label == prediction.label


def test_the_body_of_an_answer_does_not_wait_for_the_client() -> None:
    with bind("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ('{"inputs": "a"}', 200, ""),
        ('{"inputs": ["a", {"text": "b"}], "parameters": {"top_k": 2}}', 200, ""),
        ('{"inputs": ["", " "]}', 200, "[[],[]]"),
        ('{"inputs": "a", "parameters": {"min_confidence": 1.0}}', 200, "[[]]"),
        ('{"inputs": []}', 422, "0 texts"),
        ('{"inputs": 3}', 422, "inputs"),
        ('{"inputs": [["a"]]}', 422, "inputs"),
        ('{"text": "a"}', 422, "inputs"),
        ('{"inputs": "a", "parameters": {"top": 1}}', 422, "parameters.top"),
        ('{"inputs": "a", "parameters": {"top_k": 0}}', 422, "top_k"),
        ('{"inputs": "a", "parameters": {"min_confidence": 2}}', 422, "min_confidence"),
        (
            '{"inputs": "a", "parameters": {"min_confidence": 0.5, "target_precision": 0.5}}',
            422, "drop one of them",
        ),
        ('{"inputs": {"text": "a", "text_pair": "b"}}', 422, "single texts"),
        ('{"inputs": "\\ud800"}', 400, "hex escape"),
        ('{"inputs": "a"', 400, "JSON"),
        (json.dumps({"inputs": ["a"] * 513}), 422, "513 texts"),
        (json.dumps({"inputs": "a" * 2**20}), 413, "1 MiB"),
    ],
)  # fmt: skip
def test_a_request_is_answered_or_rejected_with_a_sentence(
    body: str, code: int, words: str, model: ServedModel
) -> None:
    for path in ("/", "/predict"):
        response = client_of(model).post(path, content=body, headers=JSON)
        assert response.status_code == code, response.text
        assert words in response.text
        assert ("error" in response.json()) == (code != 200)


def test_a_client_that_leaves_is_no_error_of_the_server() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(HTTPException, match="incomplete"):
        asyncio.run(read_body(starlette.requests.Request(scope, receive), StrictBody))


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/health", {}, 200),
        ("/info", {}, 401),
        ("/info", {"authorization": "Bearer secret"}, 200),
        ("/?token=secret", {}, 200),
        ("/health", {"host": "evil.example"}, 403),
    ],
)
def test_a_token_and_the_names_of_the_server_are_checked(
    path: str, headers: dict[str, str], code: int, model: ServedModel
) -> None:
    assert client_of(model, token="secret").get(path, headers=headers).status_code == code


def test_info_and_the_page_say_what_is_served(model: ServedModel) -> None:
    client = client_of(model)
    info = client.get("/info").json()
    assert "LOC" in info["classes"]
    assert info["metrics"]["test_accuracy"] >= 0
    assert "torch" in info["versions"]
    assert "&lt;i&gt;" in client.get("/").text
    assert client.get("/serve.js").status_code == client.get("/style.css").status_code == 200


def test_waiting_requests_form_a_batch_and_keep_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_app, "MAX_WAITING_TEXTS", 6)
    batches, has_started, go = [], threading.Event(), threading.Event()

    def predict(texts: Sequence[tuple[str, None]]) -> Sequence[str]:
        batches.append(len(texts))
        has_started.set()
        assert go.wait(30)
        return [f"{text}!" for text, _ in texts]

    async def ask_all() -> list[Sequence[str]]:
        batcher = Batcher(predict, ThreadPoolExecutor(max_workers=1))
        requests = [asyncio.create_task(batcher.submit([("a", None)]))]
        await asyncio.to_thread(has_started.wait)
        for name in "bc":
            requests.append(asyncio.create_task(batcher.submit([(name, None)] * 3)))
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="too many texts are waiting") as error:
            await batcher.submit([("d", None)])
        assert error.value.headers == {"Retry-After": "1"}
        go.set()
        return await asyncio.gather(*requests)

    assert asyncio.run(ask_all()) == [["a!"], ["b!"] * 3, ["c!"] * 3]
    assert batches == [1, 6]


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--host", "0.0.0.0"], {}, ["FINETUNE_API_TOKEN"]),
        (["--host", "0.0.0.0"], {"FINETUNE_API_TOKEN": "x"}, ["--allowed-host"]),
        (["--host", "192.0.2.1", "--allowed-host", "x"], {"FINETUNE_API_TOKEN": "x"}, ["--port"]),
    ],
)
def test_another_host_needs_a_token_and_names(
    arguments: list[str],
    variables: dict[str, str],
    words: list[str],
    finished_run: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command("serve", finished_run, "--port", "0", *arguments).assert_refused(2, *words)


@pytest.mark.slow
def test_a_signal_lets_the_server_answer_what_it_accepted(finished_run: Path) -> None:
    arguments = ["serve", str(finished_run), "--port", "0", "--json", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    address = json.loads(process.stdout.readline())["address"]
    answers: list[int] = []

    def ask() -> None:
        body = json.dumps({"inputs": ["Who wrote Faust? " * 20] * 512}).encode()
        with urlopen(Request(address, body, JSON), timeout=60) as response:
            answers.append(len(json.load(response)))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert process.wait(60) == 0
    assert answers == [512]
