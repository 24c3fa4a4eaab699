"""The endpoints of ``finetune serve``, in the shape of Hugging Face's inference API."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache, partial
from itertools import compress
from typing import Any, Literal

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from finetune.data.stream import Texts
from finetune.devices.host import return_freed_memory
from finetune.errors import UsageError
from finetune.runs.folder import RunFolder
from finetune.runs.manifest import find_lowest_probabilities, package_versions
from finetune.runs.results import read_results
from finetune.runs.trained import TrainedModel
from finetune.tasks.base import Prediction, abstain
from finetune.web.server import StrictBody, make_app, read_body, route

Text = tuple[str, str | None]
"""A text, and the second text of a sentence pair."""

# Texts of one request, texts of one batch, and texts that may wait for the model.
MAX_TEXTS, MAX_BATCH_TEXTS, MAX_WAITING_TEXTS = 512, 256, 4_096
# Batches of many sizes fragment the memory of the process, which the C library keeps.
BATCHES_PER_TRIM = 10


class Batcher:
    """Predicts texts that arrive while the model is busy together.

    Args:
        predict: Returns a result for each text.
        thread: The one thread in which it runs.
    """

    def __init__(
        self, predict: Callable[[Sequence[Text]], Sequence[Any]], thread: ThreadPoolExecutor
    ) -> None:
        self._predict, self._thread = predict, thread
        self._waiting: deque[tuple[Text, asyncio.Future[Any]]] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, texts: Sequence[Text]) -> Sequence[Any]:
        """Return a result for each text; raise ``HTTPException`` 503 if too many texts wait."""
        if len(self._waiting) + len(texts) > MAX_WAITING_TEXTS:
            message = "too many texts are waiting: try again in a second"
            raise HTTPException(503, message, headers={"Retry-After": "1"})
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in texts]
        self._waiting.extend(zip(texts, answers, strict=True))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())
        return await asyncio.gather(*answers)

    async def _work(self) -> None:
        while count := min(len(self._waiting), MAX_BATCH_TEXTS):
            texts, answers = zip(*(self._waiting.popleft() for _ in range(count)), strict=True)
            work = asyncio.get_running_loop().run_in_executor(self._thread, self._predict, texts)
            await asyncio.wait([work])
            # An answer is done before if its client has left.
            waiting = [each for each in enumerate(answers) if not each[1].done()]
            for number, answer in waiting:
                if error := work.exception():
                    answer.set_exception(error)
                else:
                    answer.set_result(work.result()[number])


class ServedModel:
    """The model of a run: what it predicts, and below which probabilities it abstains."""

    def __init__(self, folder: RunFolder, *, device: str) -> None:
        # If another thread than the one that predicts loads the model, OpenMP has more threads
        # than there are cores. Its threads then sleep in each operation, and predicting takes up
        # to twice the time.
        self.thread = ThreadPoolExecutor(max_workers=1)
        load = partial(copy_context().run, TrainedModel.load, folder, device=device)
        model = self._model = self.thread.submit(load).result()
        self.reads_pairs, results = model.reads_pairs, read_results(folder).to_json()
        # Classes, metrics with their intervals, and versions.
        self.info = {
            "run": folder.path.name,
            "task": results["task"],
            "classes": [*model.text_model.task.class_names],
            "reads_pairs": self.reads_pairs,
            "metrics": {name: value for name, value in results.items() if name.startswith("test_")},
            "versions": package_versions(),
        }
        self.find_lowest = lru_cache(maxsize=64)(partial(find_lowest_probabilities, folder))
        self._empty, self._batches = model.no_prediction(all_scores=True), 0

    def predict(self, texts: Sequence[Text]) -> Sequence[Prediction]:
        """Return predictions with the probabilities of all classes, empty ones for blank texts."""
        first, second = zip(*texts, strict=True)
        is_filled = Texts(first, second if self.reads_pairs else None).is_filled
        filled = [*compress(first, is_filled)]
        pairs = [*compress(second, is_filled)] if self.reads_pairs else None
        predictions = iter(self._model.predict(filled, pairs, all_scores=True) if filled else [])
        self._batches += 1
        if self._batches % BATCHES_PER_TRIM == 0:
            return_freed_memory()
        return [next(predictions) if has_text else self._empty for has_text in is_filled]


class TextBody(StrictBody):
    """A text, or a sentence pair."""

    text: str
    text_pair: str | None = None


class Parameters(StrictBody):
    """Optional parameters of a request."""

    top_k: int | None = Field(default=None, ge=1)
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    target_precision: float | None = Field(default=None, ge=0, le=1)
    # Clients of Hugging Face send it. The function of the model is always applied.
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None


class PredictBody(StrictBody):
    """One input or several."""

    inputs: str | TextBody | list[str | TextBody]
    parameters: Parameters | None = None

    def texts(self, *, reads_pairs: bool) -> Sequence[Text]:
        """Return the texts; raise ``HTTPException`` if the model can't read them."""
        inputs = self.inputs if isinstance(self.inputs, list) else [self.inputs]
        if not 0 < len(inputs) <= MAX_TEXTS:
            raise HTTPException(422, f"inputs has {len(inputs)} texts: send 1 to {MAX_TEXTS}")
        texts = [
            (text, None) if isinstance(text, str) else (text.text, text.text_pair)
            for text in inputs
        ]
        if any((pair is not None) != reads_pairs for _, pair in texts):
            message = "the model reads single texts: leave out text_pair"
            if reads_pairs:
                message = 'the model reads sentence pairs: send {"text": …, "text_pair": …}'
            raise HTTPException(422, message)
        return texts


def make_serve_app(
    model: ServedModel, *, address: str, hosts: Collection[str], token: str | None = None
) -> ASGIApp:
    """Return the application; its page shows how programs send texts to ``address``."""
    batcher = Batcher(model.predict, model.thread)
    page = {"address": address, "needs_token": bool(token), **model.info}

    async def predict(request: Request) -> Response:
        body = await read_body(request, PredictBody)
        predictions = await batcher.submit(body.texts(reads_pairs=model.reads_pairs))
        parameters = body.parameters or Parameters()
        limits = parameters.model_dump(
            include={"min_confidence", "target_precision"}, exclude_none=True
        )
        if limits:  # withhold labels
            try:
                predictions = abstain(predictions, model.find_lowest(**limits) or {})
            except UsageError as error:
                raise HTTPException(422, f"{error.message}: {error.remedy}") from error
        return JSONResponse([_answer(each, top_k=parameters.top_k) for each in predictions])

    routes = [
        Route("/", predict, methods=["POST"]),
        Route("/predict", predict, methods=["POST"]),
        route("/health", lambda: {"status": "ok"}),
        route("/info", lambda: model.info),
    ]
    return make_app(routes, name="serve", page=page, hosts=hosts, token=token)


def _answer(prediction: Prediction, *, top_k: int | None) -> list[dict[str, Any]]:
    """Return the predicted classes, or with ``top_k`` the most likely ones; none if withheld."""
    values, probabilities = prediction.values, prediction.probabilities
    if "value" in values:
        return [{"label": "value", "score": values["value"]}] if values["value"] is not None else []
    names = values["labels"] if "labels" in values else values["label"]
    if names is None or probabilities is None:
        return []
    if top_k is not None:
        names = sorted(probabilities, key=lambda name: -(probabilities[name] or 0.0))[:top_k]
    names = [names] if isinstance(names, str) else names
    return [{"label": name, "score": probabilities[name] or 0.0} for name in names]
