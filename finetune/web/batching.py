"""Requests that arrive while the model is busy are predicted together."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from finetune.web.security import RequestError

Result = TypeVar("Result")
Text = tuple[str, str | None]
"""A text, and the second text of a pair."""

# Texts of one batch, and texts that may wait for the model.
MAX_BATCH_TEXTS, MAX_WAITING_TEXTS = 256, 4_096


@dataclass(frozen=True)
class _Waiting:
    texts: Sequence[Text]
    answer: "asyncio.Future[Sequence[object]]"


class Batcher:
    """Predicts texts of several requests at once; an idle model starts with the first one.

    Args:
        predict: Returns a result for each text. It runs in one thread, never twice at a time.
    """

    def __init__(self, predict: Callable[[Sequence[Text]], Sequence[Result]]) -> None:
        self._predict = predict
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, texts: Sequence[Text]) -> Sequence[Result]:
        """Return a result for each text; raise ``RequestError`` 503 if too many texts wait."""
        waiting_texts = sum(len(request.texts) for request in self._waiting)
        if waiting_texts + len(texts) > MAX_WAITING_TEXTS:
            raise RequestError(503, "too many texts are waiting: try again in a second")
        answer: asyncio.Future[Sequence[object]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(texts, answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer  # type: ignore[return-value]

    async def _work(self) -> None:
        """Predict until nothing waits."""
        while self._waiting:
            batch, count = [self._waiting.popleft()], 0
            count = len(batch[0].texts)
            while self._waiting and count + len(self._waiting[0].texts) <= MAX_BATCH_TEXTS:
                batch.append(self._waiting.popleft())
                count += len(batch[-1].texts)
            texts = [text for request in batch for text in request.texts]
            loop = asyncio.get_running_loop()
            try:
                results = await loop.run_in_executor(self._thread, self._predict, texts)
            except Exception as error:  # each request is answered with it
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            start = 0
            for request in batch:
                end = start + len(request.texts)
                if not request.answer.done():  # the client may have left
                    request.answer.set_result(results[start:end])
                start = end

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
