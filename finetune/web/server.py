"""Shared by both applications: the server, pages, request bodies and the guard.

Any website can send requests to localhost, and any domain name can resolve to 127.0.0.1 (DNS
rebinding). Therefore, a request must use a host name that the server was started with, and a
request from a page must come from the same host.
"""

import asyncio
import math
import secrets
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.errors import FinetuneError, UsageError, explain
from finetune.training.interruption import STOP_SIGNALS

Body = TypeVar("Body", bound=BaseModel)

MAX_BODY_BYTES = 2**20
# Requests are answered or rejected within this time, and shutdown takes at most this long.
DEADLINE_SECONDS = 60
# Time for the last bytes of responses.
CLOSING_SECONDS = 5
_HEADERS = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        b"img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
_TEMPLATES = Environment(
    loader=PackageLoader("finetune.web", "."), autoescape=True, undefined=StrictUndefined
)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port. 0 means a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"the server can't listen on {host}, port {port}: {error}",
            remedy="choose a different --port; --port 0 picks a free port",
        ) from error
    # Connections inherit this. Without it, a response body waits 40 ms until the client has
    # acknowledged the header. asyncio sets it only on sockets created with IPPROTO_TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return listener


def local_hosts(port: int) -> list[str]:
    """Return the ``Host`` values for requests from this machine."""
    return [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]


class _Server(uvicorn.Server):
    """Shuts down gracefully on a signal: finishes accepted requests, then exits normally.

    Until then it accepts connections, to tell clients and load balancers to go elsewhere.
    """

    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop, self._stop_by = on_stop, math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to shut down. A second Ctrl-C exits at once."""
        self._on_stop()
        self._stop_by = min(self._stop_by, time.monotonic() + DEADLINE_SECONDS)
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to close all connections. Called ten times per second."""
        is_idle = not self.server_state.tasks
        is_late = self.force_exit or time.monotonic() > self._stop_by
        return await super().on_tick(counter) and (is_idle or is_late)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals. The base class would raise them again after the shutdown."""
        for number in STOP_SIGNALS:
            signal.signal(number, self.handle_exit)
        yield


def run_server(
    app: ASGIApp, listener: socket.socket, *, on_stop: Callable[[], None] = lambda: None
) -> None:
    """Serve an application on a socket until a signal, which first calls ``on_stop``."""
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", loop="asyncio", log_level="warning",
        access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )  # fmt: skip
    _Server(config, on_stop).run(sockets=[listener])


class StrictBody(BaseModel):
    """JSON with exactly these fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


async def read_body(request: Request, model: type[Body]) -> Body:
    """Parse the JSON body of a request, or raise ``HTTPException`` with the reason."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
    content = bytearray()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MAX_BODY_BYTES:
                    message = f"the request is larger than {MAX_BODY_BYTES // 2**20} MiB"
                    raise HTTPException(413, message)
        return model.model_validate_json(bytes(content))
    except TimeoutError as error:
        raise HTTPException(408, "the rest of the request did not arrive") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the request is incomplete") from error
    except ValidationError as error:
        first = error.errors()[0]
        message = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise HTTPException(400 if first["type"] == "json_invalid" else 422, message) from error


def route(path: str, answer: Callable[..., Any], body: type[BaseModel] | None = None) -> Route:
    """Return a JSON endpoint: GET, or POST with a body for ``answer``."""

    async def respond(request: Request) -> Response:
        return JSONResponse(answer(await read_body(request, body)) if body else answer())

    return Route(path, respond, methods=["POST" if body else "GET"])


def make_app(
    routes: Sequence[Route],
    *,
    name: str,
    page: Mapping[str, Any],
    hosts: Collection[str],
    token: str | None,
) -> ASGIApp:
    """Build an application with a page, its script and more routes, behind a guard.

    ``name`` is the name of the template and the script, ``page`` the values on the page.
    ``hosts`` are the accepted values of the ``Host`` header, with ports. Requests must carry the
    token, if any, as a bearer token. The page also accepts ``?token=``, and sets a cookie
    for its own requests.
    """
    web, report = files("finetune.web"), files("finetune.report")
    html = _TEMPLATES.get_template(f"{name}.html.j2").render(page)
    script = web.joinpath(f"{name}.js").read_text("utf-8")
    style = report.joinpath("style.css").read_text("utf-8") + web.joinpath("web.css").read_text()
    accepted_hosts = {host.lower() for host in hosts}
    # Browsers share cookies between ports, so each server needs a different cookie name.
    session = secrets.token_urlsafe(32)
    cookie = f"finetune-{session[:8]}"

    async def show(request: Request) -> Response:
        response = HTMLResponse(html)
        if token:
            is_secure = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto"))
            options: Any = {"httponly": True, "samesite": "strict", "secure": is_secure}
            response.set_cookie(cookie, session, **options)
        return response

    app = Starlette(
        routes=[
            Route("/", show),
            Route("/style.css", lambda _: Response(style, media_type="text/css")),
            Route(f"/{name}.js", lambda _: Response(script, media_type="text/javascript")),
            *routes,
        ],
        exception_handlers=dict.fromkeys(
            (HTTPException, FinetuneError, OSError, Exception), _explain
        ),
    )

    def why_rejected(request: HTTPConnection) -> tuple[int, str] | None:
        host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
        if host not in accepted_hosts:
            return 403, f"host {host!r} is not allowed"
        if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
            return 403, "cross-origin requests are not allowed"
        # For load balancers and Prometheus. They reveal nothing about texts or classes.
        if not token or request.url.path in ("/health", "/metrics"):
            return None
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        is_page = request.url.path == "/" and request.scope["method"] == "GET"
        # Proxies log URLs.
        in_address = request.query_params.get("token", "") if is_page else ""
        pairs = [(bearer.strip(), token)] if scheme.lower() == "bearer" else []
        pairs += [(in_address, token), (request.cookies.get(cookie, ""), session)]
        if any([secrets.compare_digest(sent.encode(), true.encode()) for sent, true in pairs]):
            return None
        remedy = "send it as a bearer token, or open /?token=… in a browser"
        return 401, f"missing or invalid token: {remedy}"

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        reason = why_rejected(HTTPConnection(scope))
        answer = JSONResponse({"error": reason[1]}, reason[0]) if reason else app
        await answer(scope, receive, send_with_headers)

    return guard


async def _explain(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
    known = explain(error)
    words = f"{known.message}: {known.remedy}" if known else f"unexpected {type(error).__name__}"
    return JSONResponse({"error": words}, 500)
