"""``finetune serve`` over HTTP."""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import Request, urlopen

import pytest
import starlette.requests
import uvicorn
from blocking import Start
from huggingface_hub import InferenceClient
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient
from tiny_runs import TEXTS, Command

import finetune
from finetune.commands.export import export_onnx
from finetune.errors import LossNotFiniteError
from finetune.runs.folder import RunFolder
from finetune.tasks.base import Prediction
from finetune.web import serve_app, server
from finetune.web.monitor import Monitor
from finetune.web.serve_app import Batcher, ServedModel, answer_in_time, make_serve_app
from finetune.web.server import StrictBody, bind, local_hosts, read_body


@pytest.fixture(scope="module")
def model(finished_run: Path) -> ServedModel:
    return ServedModel(RunFolder(finished_run), device="cpu")


def make_app(model: ServedModel, **options: Any) -> Monitor:
    return make_serve_app(model, address="<i>", hosts=["testserver"], **options)


def make_client(model: ServedModel, *, token: str | None = None, **options: Any) -> TestClient:
    return TestClient(make_app(model, token=token), **options)


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


def test_inference_client_gets_the_predictions_of_predict(address: str, finished_run: Path) -> None:
    expected = finetune.predict(finished_run, TEXTS, device="cpu", all_scores=True)
    client = InferenceClient(model=address, token="hf_xxx")
    for text, prediction in zip(TEXTS, expected, strict=True):
        [found] = client.text_classification(text)
        assert found.label == prediction.label
        assert found.score == pytest.approx(prediction.probability, abs=1e-6)
        ranked = client.text_classification(text, top_k=3, function_to_apply="softmax")
        assert len(ranked) == 3
        assert ranked[0].label == prediction.label


def test_responses_are_sent_without_nagle_delay() -> None:
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
        ('{"inputs": ["", " "]}', 200, '{"label":null,"score":0.0}],[{"label":null,"score":0.0}'),
        ('{"inputs": " ", "parameters": {"min_confidence": 1.0, "top_k": 2}}', 200, "null"),
        ('{"inputs": "a", "options": {"wait_for_model": true}, "parameters": null}', 200, ""),
        ('{"inputs": {"text": "a", "text_pair": null}}', 200, ""),
        ('{"inputs": "a", "parameters": {"function_to_apply": "softmax"}}', 200, ""),
        ('{"inputs": "a", "parameters": {"function_to_apply": "sigmoid"}}', 422, "must be softmax"),
        ('{"inputs": "a", "parameters": {"function_to_apply": "none"}}', 422, "must be softmax"),
        ('{"inputs": "a", "parameters": {"min_confidence": 1.0}}', 200, "[[]]"),
        ('{"inputs": ["Who is it?", " "], "parameters": {"explain": true}}', 200, '"word":"Who"'),
        ('{"inputs": []}', 422, "0 texts"),
        ('{"inputs": 3}', 422, "inputs must be a text"),
        ('{"inputs": null}', 422, "inputs must be a text"),
        ('{"inputs": ["a", null]}', 422, "inputs[1] must be a text"),
        ('{"inputs": [["a"]]}', 422, "inputs[0] must be a text"),
        ('{"inputs": {"text": 3}}', 422, "inputs must be a text"),
        ('{"inputs": {"text": "a", "more": "b"}}', 422, "inputs must be a text"),
        ('{"inputs": {}}', 422, "inputs must be a text"),
        ('{"text": "a"}', 422, "inputs"),
        ('{"inputs": "a", "parameters": {"top": 1}}', 422, "parameters.top"),
        ('{"inputs": "a", "parameters": {"top_k": 0}}', 422, "top_k"),
        ('{"inputs": "a", "parameters": {"min_confidence": 2}}', 422, "min_confidence"),
        (
            '{"inputs": "a", "parameters": {"min_confidence": 0.5, "target_precision": 0.5}}',
            422, '"min_confidence and target_precision can\'t be combined: drop one of them"',
        ),
        ('{"inputs": {"text": "a", "text_pair": "b"}}', 422, "for this model"),
        ('{"inputs": "\\ud800"}', 400, "hex escape"),
        ('{"inputs": "a"', 400, "JSON"),
        (json.dumps({"inputs": ["a"] * 513}), 422, "513 texts"),
        (
            json.dumps({"inputs": ["a"] * 17, "parameters": {"explain": True}}),
            422, "explain accepts up to 16 texts",
        ),
        (json.dumps({"inputs": "a" * 2**20}), 413, "1 MiB"),
    ],
)  # fmt: skip
def test_requests_succeed_or_return_an_error_message(
    body: str, code: int, words: str, model: ServedModel
) -> None:
    for path in ("/", "/predict"):
        response = make_client(model).post(path, content=body, headers=JSON)
        assert response.status_code == code, response.text
        assert words in response.text
        assert ("error" in response.json()) == (code != 200)


def test_client_disconnect_during_upload_is_not_a_server_error() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(HTTPException, match="incomplete"):
        asyncio.run(read_body(starlette.requests.Request(scope, receive), StrictBody))


def test_client_disconnect_during_prediction_is_not_a_server_error() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    request = starlette.requests.Request({"type": "http", "headers": []}, receive)
    with pytest.raises(HTTPException, match="closed the connection") as error:
        asyncio.run(answer_in_time(request, asyncio.sleep(9)))
    assert error.value.status_code == 499


def test_model_error_does_not_expose_command_line_options(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(texts: object) -> None:
        raise LossNotFiniteError("the logits are NaN", remedy="lower --learning-rate")

    monkeypatch.setattr(model, "predict", fail)
    response = make_client(model).post("/", json={"inputs": "a"})
    assert response.status_code == 500
    assert response.json() == {"error": "the model can't be used: the logits are NaN"}
    assert "lower --learning-rate" in caplog.text  # for the operator


def test_metrics_count_requests_by_path_and_status_and_batch_sizes(model: ServedModel) -> None:
    client = make_client(model)
    for inputs in ("a", ["b"] * 3, []):
        client.post("/predict", json={"inputs": inputs})
    client.get("/made-up")
    client.get('/"}')
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    assert {
        'finetune_requests_total{worker="1",path="/predict",status="200"} 2',
        'finetune_requests_total{worker="1",path="/predict",status="422"} 1',
        'finetune_requests_total{worker="1",path="other",status="404"} 2',
        'finetune_request_seconds_bucket{worker="1",le="+Inf"} 2',
        'finetune_request_seconds_count{worker="1"} 2',
        'finetune_batch_texts_bucket{worker="1",le="1"} 1',
        'finetune_batch_texts_bucket{worker="1",le="2"} 1',
        'finetune_batch_texts_bucket{worker="1",le="4"} 2',
        'finetune_batch_texts_sum{worker="1"} 4.0',
        "# TYPE finetune_batch_texts histogram",
    } <= {*lines}
    assert response.text.endswith("\n")
    assert (
        'finetune_requests_total{worker="1",path="/metrics",status="200"} 1'
        in client.get("/metrics").text
    )


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("a-1_B.c:d=e/f+g@h", True), ("x" * 128, True), ("x" * 129, False), ("a b", False),
     ("ä", False), ("", False), ("a\tb", False), ("<script>", False)],
)  # fmt: skip
def test_request_id_is_returned_if_it_is_short_and_plain(
    sent: str, is_kept: bool, model: ServedModel
) -> None:
    client, headers = make_client(model), {"X-Request-ID": sent.encode()}
    for path in ("/health", "/unknown"):
        returned = client.get(path, headers=headers).headers["x-request-id"]
        assert (returned == sent) == is_kept
        assert len(returned) == (len(sent) if is_kept else 32)


def test_access_log_contains_a_json_line_per_request(model: ServedModel) -> None:
    lines = list[str]()
    client = TestClient(make_app(model, log=lines.append, token="secret"))
    headers = {"Authorization": "Bearer secret", "X-Request-ID": "id-1"}
    client.post("/", json={"inputs": ["a", "b"]}, headers=headers)
    client.get("/?token=secret")
    client.get("/a%0Ab%E2%80%AE")
    assert "secret" not in "".join(lines)
    assert "".join(lines).isascii()
    first, page, unknown = map(json.loads, lines)
    assert first["time"].endswith("+00:00")
    assert 0 < first["seconds"] < 60
    words = {"method": "POST", "path": "/", "status": 200, "request_id": "id-1", "texts": 2}
    assert first | words == first
    assert (page["path"], page["status"], page["texts"]) == ("/", 200, 0)
    assert (unknown["path"], unknown["status"]) == ("/a\nb\u202e", 404)


def test_broken_log_does_not_stop_requests(model: ServedModel) -> None:
    def fail(line: str) -> None:
        raise BrokenPipeError

    assert TestClient(make_app(model, log=fail)).get("/health").status_code == 200


def test_command_logs_to_stderr_if_a_log_format_is_set(
    finished_run: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server, "run_server", lambda app, listener, on_stop: TestClient(app).get("/health")
    )
    logged = command("serve", finished_run, "--port", "0", "--log-format", "json").errors
    assert json.loads(logged.splitlines()[-1])["path"] == "/health"
    assert "/health" not in command("serve", finished_run, "--port", "0").errors


def test_stopping_server_returns_503_to_clients_and_load_balancers(model: ServedModel) -> None:
    app = make_app(model)
    client = TestClient(app)
    assert client.get("/health").status_code == 200
    app.stop()
    for response in (client.get("/health"), client.post("/", json={"inputs": "a"})):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.headers["connection"] == "close"
        assert "stopping" in response.json()["error"]
    assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("path", "headers", "code"),
    [
        ("/health", {}, 200),
        ("/metrics", {}, 200),
        ("/metrics", {"host": "evil.example"}, 403),
        ("/info", {}, 401),
        ("/info", {"authorization": "Bearer secret"}, 200),
        ("/?token=secret", {}, 200),
        ("/info?token=secret", {}, 401),
        ("/style.css?token=secret", {}, 401),
        ("/info", {"authorization": "Basic secret"}, 401),
        ("/health", {"host": "evil.example"}, 403),
    ],
)
def test_token_and_host_are_checked(
    path: str, headers: dict[str, str], code: int, model: ServedModel
) -> None:
    assert make_client(model, token="secret").get(path, headers=headers).status_code == code


def test_info_and_page_describe_the_model(model: ServedModel) -> None:
    client = make_client(model)
    info = client.get("/info").json()
    assert "LOC" in info["classes"]
    assert info["metrics"]["test_accuracy"] >= 0
    assert "torch" in info["versions"]
    assert "&lt;i&gt;" in client.get("/").text
    assert client.get("/serve.js").status_code == client.get("/style.css").status_code == 200


def test_page_gets_a_session_cookie_instead_of_the_token(model: ServedModel) -> None:
    client = make_client(model, token="secret")
    assert client.post("/?token=secret", json={"inputs": "a"}).status_code == 401
    plain = client.get("/?token=secret")
    behind_tls = client.get("/?token=secret", headers={"x-forwarded-proto": "https"})
    for response, is_secure in ((plain, False), (behind_tls, True)):
        cookie = response.headers["set-cookie"]
        assert "secret" not in cookie
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert ("Secure" in cookie) == is_secure
    client.cookies.clear()
    name, _, value = plain.headers["set-cookie"].partition(";")[0].partition("=")
    client.cookies.set(name, value)
    assert client.post("/", json={"inputs": "a"}).status_code == 200
    assert make_client(model, token="secret", cookies={name: value}).get("/info").status_code == 401
    assert make_client(model, token="secret", cookies={name: "secret"}).get("/").status_code == 401


class SlowModel:
    """A model that takes 0.01 s per character."""

    reads_pairs, tokens_per_second = False, 100.0
    info: ClassVar = {"run": "slow", "task": "single", "classes": [], "reads_pairs": False}

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1)
        self.batches: list[int] = []

    def count_tokens(self, text: tuple[str, None]) -> int:
        return len(text[0])

    def find_lowest(self) -> None:
        return None

    def predict(self, texts: Sequence[tuple[str, None]]) -> Sequence[Prediction]:
        self.batches.append(len(texts))
        time.sleep(sum(map(self.count_tokens, texts)) / self.tokens_per_second)
        return [Prediction(text, {"label": text[0]}, {text[0]: 1.0}) for text, _ in texts]


def make_batcher(model: SlowModel) -> Batcher:
    return Batcher(
        model.predict, model.count_tokens, model.thread,
        tokens_per_second=model.tokens_per_second, on_batch=lambda count: None,
    )  # fmt: skip


def test_concurrent_requests_share_a_batch_and_get_their_own_predictions() -> None:
    model = SlowModel()

    async def request_all() -> list[Sequence[Prediction]]:
        batcher = make_batcher(model)
        texts = ["a"], ["b"] * 20, ["c"] * 3
        requests = [batcher.submit([(text, None) for text in each]) for each in texts]
        return await asyncio.gather(*requests)

    answers = asyncio.run(request_all())
    assert [[one.label for one in answer] for answer in answers] == [["a"], ["b"] * 20, ["c"] * 3]
    assert model.batches == [24]


def test_new_requests_join_waiting_requests_in_a_batch() -> None:
    model = SlowModel()

    async def request_all() -> None:
        batcher = make_batcher(model)

        async def request_five_times() -> None:
            for _ in range(5):
                await batcher.submit([("a", None)])

        first = asyncio.create_task(request_five_times())
        await asyncio.sleep(0)
        await asyncio.gather(first, *(request_five_times() for _ in range(3)))

    asyncio.run(request_all())
    assert model.batches[0] == 1
    assert len(model.batches) < 9  # for 20 texts; alternating batches of 1 and 3 would be 10


def test_requests_past_the_deadline_are_rejected_and_short_ones_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve_app, "DEADLINE_SECONDS", 2)

    async def request_all() -> None:
        batcher = make_batcher(SlowModel())
        long = asyncio.create_task(batcher.submit([("x" * 40, None)] * 5))
        await asyncio.sleep(0)
        with pytest.raises(HTTPException, match="too many texts are waiting") as error:
            await batcher.submit([("y" * 40, None)] * 2)
        assert error.value.status_code == 503
        assert 1 <= int((error.value.headers or {})["Retry-After"]) <= 2
        started = time.monotonic()
        await batcher.submit([("z", None)])
        assert time.monotonic() - started < 1.2
        assert len(await long) == 5

    asyncio.run(request_all())


SLOW_SERVER = """
import sys
from web.test_serve import SlowModel
from finetune.web import serve_app, server
serve_app.DEADLINE_SECONDS = 4
listener = server.bind("127.0.0.1", 0)
port = listener.getsockname()[1]
print(port, flush=True)
app = serve_app.make_serve_app(SlowModel(), address="", hosts=server.local_hosts(port))
server.run_server(app, listener, on_stop=app.stop)
"""


BLOCKING_SERVER = """
import asyncio, sys
from starlette.responses import Response
from finetune.web.monitor import Metrics, Monitor
from finetune.web.server import bind, run_server

async def answer(scope, receive, send):
    if scope["path"] == "/":
        print("accepted", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    await Response()(scope, receive, send)

listener = bind("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
app = Monitor(answer, Metrics(1), paths=[], log=None)
run_server(app, listener, on_stop=app.stop)
"""


@pytest.mark.slow
def test_accepted_requests_finish_while_new_requests_get_503(start: Start) -> None:
    process = start(sys.executable, "-c", BLOCKING_SERVER, stdin=subprocess.PIPE)
    assert process.stdout
    assert process.stdin
    address = f"127.0.0.1:{int(process.stdout.readline())}"

    def check() -> tuple[int, str | None]:
        connection = HTTPConnection(address, timeout=30)
        connection.request("GET", "/health")
        response = connection.getresponse()
        return response.status, response.headers["Retry-After"]

    assert check() == (200, None)
    accepted = HTTPConnection(address, timeout=30)
    accepted.request("POST", "/", "{}", JSON)
    assert process.stdout.readline() == "accepted\n"
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 30
    while check() != (503, "1"):
        assert time.monotonic() < deadline
    process.stdin.write("\n")
    process.stdin.flush()
    assert accepted.getresponse().status == 200
    assert process.wait(30) == 0


@pytest.mark.slow
def test_short_requests_are_not_delayed_by_long_abandoned_requests(start: Start) -> None:
    process = start(sys.executable, "-c", SLOW_SERVER, cwd=Path(__file__).parents[1])
    assert process.stdout
    port = int(process.stdout.readline())

    def request(inputs: list[str], *, patience: float) -> tuple[int | None, str | None, float]:
        started, connection = time.monotonic(), HTTPConnection("127.0.0.1", port, timeout=patience)
        connection.request("POST", "/", json.dumps({"inputs": inputs}), JSON)
        try:
            response = connection.getresponse()
            response.read()
            status, retry = response.status, response.headers["Retry-After"]
        except TimeoutError:
            status, retry = None, None
        connection.close()
        return status, retry, time.monotonic() - started

    with ThreadPoolExecutor(12) as threads:
        long = ["x" * 20] * 512  # 102 seconds
        leaving = [threads.submit(request, long, patience=1.5) for _ in range(3)]
        time.sleep(0.5)
        staying = threads.submit(request, long, patience=30)
        time.sleep(0.2)
        short = [threads.submit(request, ["a"], patience=30) for _ in range(4)]
        for future in short:
            status, _, seconds = future.result()
            assert status == 200
            assert seconds < 3
        outcomes = [future.result()[:2] for future in (*leaving, staying)]
        assert outcomes.count((None, None)) == 1  # the first request was accepted
        assert all(retry for status, retry in outcomes if status == 503)
        # The first client disconnected, so the next request is accepted, but misses the deadline.
        status, retry, seconds = request(long, patience=30)
        assert (status, retry) == (503, "1")
        assert 3 < seconds < 7
    leaving_last = ThreadPoolExecutor(1).submit(request, long, patience=1)
    leaving_last.result()
    stopped = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert time.monotonic() - stopped < 15  # not the 102 seconds of the accepted texts


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], "http://127.0.0.1:7"),
        (["--host", "::1"], "http://[::1]:7"),
        (["--host", "localhost"], "http://localhost:7"),
        (["--allowed-host", "fe80::1"], "http://[fe80::1]:7"),
        (["--host", "0.0.0.0", "--allowed-host", "models.example"], "http://models.example:7"),
    ],
)
def test_printed_url_is_reachable(
    arguments: list[str], address: str, finished_run: Path, command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    class Listener:
        def getsockname(self) -> tuple[str, int]:
            return "", 7

    monkeypatch.setattr(server, "bind", lambda host, port: Listener())
    monkeypatch.setattr(server, "run_server", lambda app, listener, on_stop: None)
    monkeypatch.setenv("FINETUNE_API_TOKEN", "secret")
    outcome = command("serve", finished_run, *arguments)
    assert f"at {address}/?token=$FINETUNE_API_TOKEN " in outcome.output
    assert "secret" not in outcome.output + outcome.errors
    assert f'"address": "{address}"' in command("serve", finished_run, *arguments, "--json").output


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--host", "0.0.0.0"], {}, ["FINETUNE_API_TOKEN"]),
        (["--host", "0.0.0.0"], {"FINETUNE_API_TOKEN": "x"}, ["--allowed-host"]),
        (["--host", "192.0.2.1", "--allowed-host", "x"], {"FINETUNE_API_TOKEN": "x"}, ["--port"]),
    ],
)
def test_public_host_requires_a_token_and_allowed_hosts(
    arguments: list[str],
    variables: dict[str, str],
    words: list[str],
    finished_run: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command("serve", finished_run, "--port", "0", *arguments).assert_rejected(2, *words)


@pytest.mark.slow
def test_server_finishes_accepted_requests_after_a_signal(finished_run: Path) -> None:
    arguments = ["serve", str(finished_run), "--port", "0", "--json", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    address = json.loads(process.stdout.readline())["address"]
    answers: list[int] = []

    def request() -> None:
        body = json.dumps({"inputs": ["Who wrote Faust? " * 20] * 512}).encode()
        with urlopen(Request(address, body, JSON), timeout=60) as response:
            answers.append(len(json.load(response)))

    thread = threading.Thread(target=request)
    thread.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    thread.join(60)
    assert process.wait(60) == 0
    assert answers == [512]


@pytest.mark.slow
def test_served_model_uses_onnxruntime(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    export_onnx(run, verify=True)
    torch, onnx = (
        ServedModel(RunFolder(run), device="cpu", runtime=runtime).predict([("a text", None)])
        for runtime in ("torch", "onnx")
    )
    assert onnx[0].label == torch[0].label
    assert onnx[0].probabilities == pytest.approx(torch[0].probabilities, abs=1e-4)
