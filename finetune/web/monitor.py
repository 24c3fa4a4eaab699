"""Monitoring of ``finetune serve``: metrics, an access log and request IDs."""

import json
import re
import time
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import accumulate, chain

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Ids of other programs are UUIDs, numbers, base64, or have fields with = and :.
_REQUEST_ID = re.compile(r"[\w.:=+/@-]{1,128}", re.ASCII)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts values up to each bound."""

    def __init__(self, name: str, description: str, bounds: Sequence[float]) -> None:
        self._name, self._description, self._bounds = name, description, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, label: str) -> Iterator[str]:
        """Yield the lines of the histogram in the Prometheus text format."""
        yield from _header(self._name, self._description, "histogram")
        totals = [*accumulate(self._counts)]
        for bound, total in zip((*self._bounds, "+Inf"), totals, strict=True):
            yield f'{self._name}_bucket{{{label},le="{bound}"}} {total}'
        yield f"{self._name}_sum{{{label}}} {self._sum}"
        yield f"{self._name}_count{{{label}}} {totals[-1]}"


def _header(name: str, description: str, kind: str) -> tuple[str, str]:
    return f"# HELP {name} {description}", f"# TYPE {name} {kind}"


class Metrics:
    """Metrics of a worker process since it started."""

    def __init__(self, worker: int) -> None:
        self._label = f'worker="{worker}"'
        self.requests: Counter[tuple[str, int]] = Counter()
        self.seconds = Histogram(
            "finetune_request_seconds", "Time to answer requests that have texts.", _SECONDS
        )
        self.batches = Histogram(
            "finetune_batch_texts", "Texts that were classified in one batch.", _TEXTS
        )

    def as_text(self) -> str:
        """Return all metrics in the Prometheus text format."""
        name = "finetune_requests_total"
        lines = [*_header(name, "Answered requests.", "counter")]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'{name}{{{self._label},path="{path}",status="{status}"}} {count}')
        histograms = (self.seconds.lines(self._label), self.batches.lines(self._label))
        return "\n".join([*lines, *chain(*histograms), ""])


class Monitor:
    """An application that wraps another to count and log requests and assign request IDs.

    After ``stop``, it responds with 503, so that load balancers choose another server.

    Args:
        paths: Paths to count separately. Clients can make up any number of others.
        log: Receives one line of JSON per request.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        paths: Collection[str],
        log: Callable[[str], object] | None,
    ) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths
        self._log, self._is_stopping = log, False

    def stop(self) -> None:
        """Respond with 503 from now on, except for metrics and accepted requests."""
        self._is_stopping = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request. The application can set the state ``texts`` to the number of texts."""
        started, status, path = time.perf_counter(), 500, scope["path"]
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                added = (b"x-request-id", request_id.encode())
                message["headers"] = [*message["headers"], added]
            await send(message)

        is_rejected = self._is_stopping and path != "/metrics"
        try:
            await (_reject if is_rejected else self._app)(scope, receive, send_with_id)
        finally:
            seconds, texts = time.perf_counter() - started, state.get("texts", 0)
            self._metrics.requests[path if path in self._paths else "other", status] += 1
            if texts:
                self._metrics.seconds.add(seconds)
            if self._log:
                now = datetime.now(UTC).isoformat(timespec="milliseconds")
                line = {
                    "time": now, "method": scope["method"], "path": path, "status": status,
                    "seconds": round(seconds, 6), "request_id": request_id, "texts": texts,
                }  # fmt: skip
                with suppress(OSError):  # if the log can't be written, serve anyway
                    self._log(json.dumps(line))


async def _reject(scope: Scope, receive: Receive, send: Send) -> None:
    headers = {"Retry-After": "1", "Connection": "close", "Cache-Control": "no-store"}
    words = "the server is stopping: send the request again later"
    await JSONResponse({"error": words}, 503, headers=headers)(scope, receive, send)
