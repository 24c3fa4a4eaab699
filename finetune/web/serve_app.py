"""The endpoints of ``finetune serve``, compatible with the Hugging Face Inference API."""

import asyncio
import logging
import math
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import compress
from typing import Any, Literal

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from finetune.data.stream import Texts
from finetune.devices import Runtime
from finetune.devices.host import return_freed_memory
from finetune.errors import FinetuneError, UsageError
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import find_lowest_probabilities, package_versions
from finetune.runs.runtime import load_predictor
from finetune.tasks.base import Prediction, abstain
from finetune.web.monitor import Metrics, Monitor
from finetune.web.server import DEADLINE_SECONDS, StrictBody, make_app, read_body, route

Text = tuple[str, str | None]
"""A text, and the second text of a sentence pair."""

# Texts per request, and texts and seconds per batch, which can't be interrupted.
MAX_TEXTS, MAX_BATCH_TEXTS, BATCH_SECONDS = 512, 256, 0.5
BYTES_PER_TOKEN = 4
# The status that nginx uses for such requests.
CLIENT_LEFT = 499
PROMETHEUS = "text/plain; version=0.0.4"
# Explaining a text takes about ten times as long as classifying it.
MAX_EXPLAINED_TEXTS = 16
# Batches of many sizes fragment the process memory, which the C library keeps.
BATCHES_PER_TRIM = 10
# The function applied to logits, by task.
FUNCTIONS = {"single": "softmax", "multi": "sigmoid", "regression": "none"}


@dataclass(eq=False)
class _Request:
    """Waiting texts, with the future of each result, and their total tokens."""

    texts: deque[tuple[Text, asyncio.Future[Any]]]
    tokens: int


class Batcher:
    """Batches texts that arrive while the model is busy, taking requests in turn.

    A batch repeatedly takes one text from each request, so that short requests don't wait for
    long ones.

    Args:
        predict: Returns a result for each text.
        count_tokens: Estimates how many tokens of a text the model reads.
        thread: The single thread in which ``predict`` runs.
        tokens_per_second: Speed of the model, updated by each full batch.
        on_batch: Receives the number of texts in each batch.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Text]], Sequence[Any]],
        count_tokens: Callable[[Text], int],
        thread: ThreadPoolExecutor,
        *,
        tokens_per_second: float,
        on_batch: Callable[[int], None],
    ) -> None:
        self._predict, self._count_tokens, self._thread = predict, count_tokens, thread
        self._on_batch = on_batch
        self._requests: deque[_Request] = deque()
        self.tokens_per_second = tokens_per_second
        self._worker: asyncio.Task[None] | None = None

    @property
    def _full_batch(self) -> float:
        return BATCH_SECONDS * self.tokens_per_second

    async def submit(self, texts: Sequence[Text]) -> Sequence[Any]:
        """Return a result per text. Raise ``HTTPException`` 503 if it would be late."""
        tokens, loop = sum(map(self._count_tokens, texts)), asyncio.get_running_loop()
        # While a short request is processed, each other request gets at most as many tokens.
        share = tokens if tokens < self._full_batch else math.inf
        others = sum(min(share, request.tokens) for request in self._requests)
        if others and tokens + others > DEADLINE_SECONDS * self.tokens_per_second:
            raise _busy("too many texts are waiting", others / self.tokens_per_second)
        answers = [loop.create_future() for _ in texts]
        request = _Request(deque(zip(texts, answers, strict=True)), tokens)
        self._requests.append(request)
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        try:
            return await asyncio.gather(*answers)
        finally:  # also if nobody waits for the rest
            request.texts.clear()
            request.tokens = 0

    def _next_batch(self) -> tuple[list[Text], list[asyncio.Future[Any]], int]:
        texts, answers, tokens = list[Text](), list[asyncio.Future[Any]](), 0
        while self._requests and tokens < self._full_batch and len(texts) < MAX_BATCH_TEXTS:
            request = self._requests.popleft()
            if request.texts:
                text, answer = request.texts.popleft()
                texts.append(text)
                answers.append(answer)
                count = self._count_tokens(text)
                tokens, request.tokens = tokens + count, request.tokens - count
                self._requests.append(request)
        return texts, answers, tokens

    async def _work(self) -> None:
        while (batch := self._next_batch())[0]:
            texts, answers, tokens = batch
            self._on_batch(len(texts))
            started = time.perf_counter()
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._predict, texts)
            await asyncio.wait([work])
            seconds = time.perf_counter() - started
            speed, is_full = tokens / seconds, tokens >= self._full_batch
            # Small batches take more time per token.
            if is_full or speed > self.tokens_per_second:
                self.tokens_per_second = speed
            # If a client has left, its result is already done.
            waiting = [each for each in enumerate(answers) if not each[1].done()]
            for number, answer in waiting:
                if error := work.exception():
                    answer.set_exception(error)
                else:
                    answer.set_result(work.result()[number])
            # Clients that received a response send their next text, which joins the waiting texts.
            if not is_full and any(request.texts for request in self._requests):
                await asyncio.sleep(seconds / 10)


def _busy(problem: str, seconds: float) -> HTTPException:
    headers = {"Retry-After": str(math.ceil(min(seconds, DEADLINE_SECONDS)))}
    return HTTPException(503, f"{problem}: try again later, or send fewer texts", headers=headers)


async def answer_in_time(request: Request, work: Awaitable[Any]) -> Any:
    """Return the result of work. Cancel it if the client disconnects, or at the deadline."""
    # After the body, the only message is that the client has disconnected.
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(request.receive())]
    try:
        await asyncio.wait(tasks, timeout=DEADLINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
    if tasks[1].done():  # nobody reads the response, but it is counted and logged
        raise HTTPException(CLIENT_LEFT, "the client closed the connection")
    raise _busy(f"no response within {DEADLINE_SECONDS} seconds", 1)


class ServedModel:
    """The model of a run, with its abstention thresholds."""

    def __init__(self, folder: RunFolder, *, device: str, runtime: Runtime = "auto") -> None:
        # If another thread than the one that predicts loads the model, OpenMP has more threads
        # than there are cores. Its threads then sleep in each operation, and predicting takes up
        # to twice the time.
        self.thread = ThreadPoolExecutor(max_workers=1)
        load = partial(load_predictor, folder, device=device, runtime=runtime)
        model = self._model = self.thread.submit(copy_context().run, load).result()
        self.reads_pairs = model.reads_pairs
        results = folder.read(folder.results_file, lambda content: dict(content).items())
        # Classes, metrics with intervals, and versions.
        self.info: dict[str, Any] = {
            "run": folder.path.name,
            "task": model.task.name,
            "classes": [*model.task.class_names],
            "reads_pairs": self.reads_pairs,
            "metrics": {name: value for name, value in results if name.startswith("test_")},
            "versions": package_versions(),
        }
        self._folder = folder
        self._empty, self._batches = model.no_prediction(all_scores=True), 0
        options = model.config.model
        self._max_tokens = None if options.window_stride else options.max_length
        trial, started = [("a short text " * 50, "a second one")] * 8, time.perf_counter()
        self.thread.submit(self.predict, trial).result()
        seconds = time.perf_counter() - started
        self.tokens_per_second = sum(map(self.count_tokens, trial)) / seconds

    @lru_cache(maxsize=64)  # noqa: B019 (there is one model)
    def find_lowest(self, **limits: float) -> Mapping[str, float] | None:
        """Return the probability of each class below which the model abstains, or None."""
        try:
            return find_lowest_probabilities(self._folder, **limits)
        except UsageError as error:  # which contains command-line flags and a local path
            words = f"{error.message}: {error.remedy}".replace(str(self._folder.path), "the server")
            words = re.sub(r"--([\w-]+)", lambda flag: flag[1].replace("-", "_"), words)
            raise HTTPException(422, words) from error

    def count_tokens(self, text: Text) -> int:
        """Estimate how many tokens of a text or pair the model reads."""
        tokens = 2 + sum(len(part.encode()) for part in text if part) // BYTES_PER_TOKEN
        return min(tokens, self._max_tokens or tokens)

    def predict(self, texts: Sequence[Text], *, explains: bool = False) -> Sequence[Prediction]:
        """Return predictions with probabilities of all classes, and empty ones for blank texts."""
        first, second = zip(*texts, strict=True)
        is_filled = Texts(first, second if self.reads_pairs else None).is_filled
        filled = [*compress(first, is_filled)]
        pairs = [*compress(second, is_filled)] if self.reads_pairs else None
        wanted = {"all_scores": True, "explains": explains}
        predictions = iter(self._model.predict(filled, pairs, **wanted) if filled else [])
        self._batches += 1
        if self._batches % BATCHES_PER_TRIM == 0:
            return_freed_memory()
        return [next(predictions) if has_text else self._empty for has_text in is_filled]


class Parameters(StrictBody):
    """Optional parameters of a request."""

    top_k: int | None = Field(default=None, ge=1)
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    target_precision: float | None = Field(default=None, ge=0, le=1)
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None
    explain: bool = False


class PredictBody(StrictBody):
    """One or several inputs. Hugging Face clients send options, which change no prediction."""

    inputs: Any
    parameters: Parameters | None = None
    options: dict[str, Any] | None = None

    def texts(self, *, reads_pairs: bool) -> Sequence[Text]:
        """Return the texts. Raise ``HTTPException`` if the model can't read them."""
        inputs = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        if not 0 < len(inputs) <= MAX_TEXTS:
            raise HTTPException(422, f"inputs has {len(inputs)} texts: send 1 to {MAX_TEXTS}")
        names = ("text", "text_pair")[: 1 + reads_pairs]
        rows = [value if isinstance(value, dict) else {"text": value} for value in inputs]
        for number, row in enumerate(rows):
            texts = {name: text for name, text in row.items() if text is not None}
            if {*texts} != {*names} or not all(isinstance(text, str) for text in texts.values()):
                place = f"inputs[{number}]" if isinstance(self.inputs, list) else "inputs"
                kind = '{"text": "…", "text_pair": "…"}' if reads_pairs else "a text"
                raise HTTPException(422, f"{place} must be {kind} for this model")
        return [(row["text"], row.get("text_pair")) for row in rows]


def make_serve_app(
    model: ServedModel,
    *,
    address: str,
    hosts: Collection[str],
    token: str | None = None,
    log: Callable[[str], object] | None = None,
    worker: int = 1,
) -> Monitor:
    """Build the application. Its page shows how programs send texts to ``address``.

    ``log`` receives one line of JSON per request. ``worker`` is the number of this process.
    """
    metrics, speed = Metrics(worker), model.tokens_per_second
    batcher = Batcher(
        model.predict, model.count_tokens, model.thread,
        tokens_per_second=speed, on_batch=metrics.batches.add,
    )  # fmt: skip
    page = {"address": address, "needs_token": bool(token), **model.info}
    function = FUNCTIONS[model.info["task"]]

    async def explain(texts: Sequence[Text]) -> list[Prediction]:
        """Explain one text at a time, so that other requests are handled in between."""
        loop, predict_one = asyncio.get_running_loop(), partial(model.predict, explains=True)
        explained = list[Prediction]()
        for text in texts:
            explained += await loop.run_in_executor(model.thread, predict_one, [text])
        return explained

    async def predict(request: Request) -> Response:
        body = await read_body(request, PredictBody)
        texts, parameters = (
            body.texts(reads_pairs=model.reads_pairs),
            body.parameters or Parameters(),
        )
        request.state.texts = len(texts)
        if parameters.function_to_apply not in (None, function):
            raise HTTPException(422, f"function_to_apply must be {function} for this model")
        names = {"min_confidence", "target_precision"}
        lowest = model.find_lowest(**parameters.model_dump(include=names, exclude_none=True))
        if parameters.explain and len(texts) > MAX_EXPLAINED_TEXTS:
            raise HTTPException(
                422, f"explain accepts up to {MAX_EXPLAINED_TEXTS} texts per request"
            )
        work = explain(texts) if parameters.explain else batcher.submit(texts)
        try:
            predictions = await answer_in_time(request, work)
        except FinetuneError as error:  # whose remedy contains command-line flags
            logging.getLogger("uvicorn.error").error("%s: %s", error.message, error.remedy)
            raise HTTPException(500, f"the model can't be used: {error.message}") from error
        if lowest is not None:
            predictions = abstain(predictions, lowest)
        return JSONResponse([_answer(each, top_k=parameters.top_k) for each in predictions])

    routes = [
        Route("/", predict, methods=["POST"]),
        Route("/predict", predict, methods=["POST"]),
        route("/health", lambda: {"status": "ok"}),
        route("/info", lambda: model.info),
        Route("/metrics", lambda _: Response(metrics.as_text(), media_type=PROMETHEUS)),
    ]
    app = make_app(routes, name="serve", page=page, hosts=hosts, token=token)
    paths = {each.path for each in routes}
    return Monitor(app, metrics, paths=paths, log=log)


def _answer(prediction: Prediction, *, top_k: int | None) -> list[dict[str, Any]]:
    """Return the predicted classes or, with ``top_k``, the most likely. Empty if withheld.

    A blank text has the label null. With an explanation, each class includes its words.
    """
    values, probabilities = prediction.values, prediction.probabilities or {}
    value = values.get("value", next(iter(probabilities.values()), None))
    if value is None:
        return [{"label": None, "score": 0.0}]
    explanation = prediction.explanation

    def words_of(name: str) -> dict[str, Any]:
        if explanation is None:
            return {}
        changes = (change for change in explanation if change.label in (None, name))
        is_explained = "labels" in values or name == values.get("label", "value")
        return {"explanation": [change.to_json() for change in changes] if is_explained else []}

    if "value" in values:
        return [{"label": "value", "score": value, **words_of("value")}]
    names = values["labels"] if "labels" in values else values["label"]
    if names is not None and top_k is not None:
        names = sorted(probabilities, key=lambda name: -(probabilities[name] or 0.0))[:top_k]
    names = [names] if isinstance(names, str) else names or []
    return [{"label": name, "score": probabilities[name], **words_of(name)} for name in names]
