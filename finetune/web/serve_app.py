"""The endpoints of ``finetune serve``, in the shape of Hugging Face's inference API."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from itertools import compress
from typing import Any, Literal

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from finetune.data.stream import Texts
from finetune.errors import UsageError
from finetune.runs.folder import RunFolder
from finetune.runs.inference import find_lowest_probabilities
from finetune.runs.manifest import package_versions
from finetune.runs.results import read_results
from finetune.runs.trained import TrainedModel
from finetune.tasks.base import Prediction, abstain
from finetune.web.batching import Batcher, Text
from finetune.web.label_app import EXCEPTION_HANDLERS, StrictBody, read_body
from finetune.web.security import RequestError, cookie_name
from finetune.web.server import static

MAX_TEXTS = 512


class ServedModel:
    """A run's model: what it predicts, and below which probabilities it abstains."""

    def __init__(self, folder: RunFolder, model: TrainedModel) -> None:
        self._folder, self._model, self.reads_pairs = folder, model, model.reads_pairs
        self._find_lowest = lru_cache(maxsize=64)(partial(find_lowest_probabilities, folder))

    def predict(self, texts: Sequence[Text]) -> Sequence[Prediction]:
        """Return predictions with the probabilities of all classes; without values for no text."""
        first, second = zip(*texts, strict=True)
        is_filled = Texts(first, second if self.reads_pairs else None).is_filled
        filled = [*compress(first, is_filled)]
        pairs = [*compress(second, is_filled)] if self.reads_pairs else None
        found = iter(self._model.predict(filled, pairs, all_scores=True) if filled else [])
        empty = self._model.no_prediction(all_scores=True)
        return [next(found) if has_text else empty for has_text in is_filled]

    def abstain(
        self, predictions: Sequence[Prediction], limits: Mapping[str, float]
    ) -> Sequence[Prediction]:
        """Withhold labels by ``min_confidence`` or ``target_precision``."""
        try:
            lowest = self._find_lowest(**limits)
        except UsageError as error:
            raise RequestError(422, f"{error.message}: {error.remedy}") from error
        return predictions if lowest is None else abstain(predictions, lowest)

    def info(self) -> dict[str, Any]:
        """Return classes, metrics with their intervals, and versions."""
        results = read_results(self._folder).to_json()
        return {
            "run": self._folder.path.name,
            "task": results["task"],
            "classes": [*self._model.text_model.task.class_names],
            "reads_pairs": self.reads_pairs,
            "metrics": {name: value for name, value in results.items() if name.startswith("test_")},
            "versions": package_versions(),
        }


class TextBody(StrictBody):
    """A text, or a text pair."""

    text: str
    text_pair: str | None = None


class Parameters(StrictBody):
    """Optional parameters of a request."""

    top_k: int | None = Field(default=None, ge=1)
    min_confidence: float | None = Field(default=None, ge=0, le=1)
    target_precision: float | None = Field(default=None, ge=0, le=1)
    # Clients of Hugging Face send it. The model's own function is always applied.
    function_to_apply: Literal["sigmoid", "softmax", "none"] | None = None


class PredictBody(StrictBody):
    """One input or several."""

    inputs: str | TextBody | list[str | TextBody]
    parameters: Parameters | None = None


def make_serve_app(model: ServedModel, *, page: str, token: str | None = None) -> Starlette:
    """Return the application; ``page`` is the HTML of the page on which to try texts."""
    batcher = Batcher(model.predict)
    description = model.info()

    async def predict(request: Request) -> Response:
        body = await read_body(request, PredictBody)
        inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
        if not 0 < len(inputs) <= MAX_TEXTS:
            raise RequestError(422, f"inputs has {len(inputs)} texts: send 1 to {MAX_TEXTS}")
        texts = [_read_text(each, reads_pairs=model.reads_pairs) for each in inputs]
        parameters = body.parameters or Parameters()
        predictions: Sequence[Prediction] = await batcher.submit(texts)
        limits = {
            name: value
            for name in ("min_confidence", "target_precision")
            if (value := getattr(parameters, name)) is not None
        }
        if limits:
            predictions = model.abstain(predictions, limits)
        return _json([_answer(each, top_k=parameters.top_k) for each in predictions])

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def info(request: Request) -> Response:
        return _json(description)

    async def show_page(request: Request) -> Response:
        response = HTMLResponse(page)
        if token:
            response.set_cookie(cookie_name(token), token, httponly=True, samesite="strict")
        return response

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/", predict, methods=["POST"]),
            Route("/predict", predict, methods=["POST"]),
            Route("/health", health),
            Route("/info", info),
            Route("/style.css", static("style.css", "text/css")),
            Route("/serve.js", static("serve.js", "text/javascript")),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )


def _read_text(given: str | TextBody, *, reads_pairs: bool) -> Text:
    text = (given, None) if isinstance(given, str) else (given.text, given.text_pair)
    if reads_pairs and text[1] is None:
        raise RequestError(422, 'the model reads text pairs: send {"text": …, "text_pair": …}')
    if not reads_pairs and text[1] is not None:
        raise RequestError(422, "the model reads single texts: leave out text_pair")
    return text


def _answer(prediction: Prediction, *, top_k: int | None) -> list[dict[str, Any]]:
    """Return what is predicted, or with ``top_k`` the most likely classes; nothing if withheld."""
    values = prediction.values
    if "value" in values:
        scores = [] if values["value"] is None else [values["value"]]
        return [{"label": "value", "score": score} for score in scores]
    names = values["labels"] if "labels" in values else values["label"]
    if names is None or (top_k is not None and prediction.probabilities is None):
        return []
    probabilities = {name: value or 0.0 for name, value in (prediction.probabilities or {}).items()}
    if top_k is not None:
        ranked = sorted(probabilities, key=probabilities.__getitem__, reverse=True)[:top_k]
    else:
        ranked = [names] if isinstance(names, str) else names
    return [{"label": name, "score": probabilities[name]} for name in ranked]


def _json(content: Any) -> Response:
    return Response(json.dumps(content, ensure_ascii=False), media_type="application/json")
