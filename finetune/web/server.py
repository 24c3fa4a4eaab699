"""What both applications share: socket and server, pages, request bodies and the guard.

A page of any website can send requests to localhost, and a name of any domain can resolve to
127.0.0.1 (DNS rebinding). So a request must carry a host name that the server was started with,
and if it comes from a page, an origin of the same kind.
"""

import hashlib
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any, TypeVar

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from finetune.errors import UsageError
from finetune.training.interruption import STOP_SIGNALS

Body = TypeVar("Body", bound=BaseModel)

MAX_BODY_BYTES = 2**20
# A request that takes longer is cut off when the server stops.
MAX_STOP_SECONDS = 60
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
    """Return a socket at a port; 0 means a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"the server can't listen on {host}, port {port}: {error}",
            remedy="choose another --port; --port 0 is a free one",
        ) from error
    # Connections inherit this. Without it, the body of an answer waits 40 ms until the client has
    # confirmed the header. asyncio sets it only on sockets that were made with IPPROTO_TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return listener


class _Server(uvicorn.Server):
    """Stops when a signal comes: what was accepted is answered, and the command ends normally."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals. The base class would raise them again after the server has stopped."""
        previous = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def run_server(app: ASGIApp, listener: socket.socket) -> None:
    """Serve an application on a socket until a signal comes."""
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", loop="asyncio", log_level="warning",
        access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=MAX_STOP_SECONDS,
    )  # fmt: skip
    _Server(config).run(sockets=[listener])


def make_app(
    routes: Sequence[Route],
    *,
    page: str,
    script: str,
    hosts: Collection[str],
    token: str | None,
    open_paths: Collection[str] = (),
) -> ASGIApp:
    """Return an application with a page, its script and more routes, behind a guard.

    Args:
        page: The HTML of the page, which sets a cookie with the token.
        hosts: The accepted values of the header ``Host``, with ports.
        token: What requests have to carry, as a cookie, a bearer token, or ``?token=``; None if
            anyone may ask.
        open_paths: Paths that need no token.
    """

    async def show_page(request: Request) -> Response:
        response = HTMLResponse(page)
        if token:
            response.set_cookie(_cookie_name(token), token, httponly=True, samesite="strict")
        return response

    app = Starlette(
        routes=[
            Route("/", show_page),
            Route("/style.css", _static("text/css", "finetune.report/style.css", "web.css")),
            Route(f"/{script}", _static("text/javascript", script)),
            *routes,
        ],
        exception_handlers={HTTPException: _explain},
    )
    return Guard(app, hosts=hosts, token=token, open_paths=open_paths)


def render(template: str, **values: Any) -> str:
    """Return the HTML of a page."""
    return _TEMPLATES.get_template(template).render(values)


def _static(media_type: str, *names: str) -> Callable[[Request], Awaitable[Response]]:
    content = ""
    for name in names:
        package, _, file = f"finetune.web/{name}".rpartition("/")
        content += files(package.rpartition("/")[2]).joinpath(file).read_text("utf-8")

    async def send(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return send


async def _explain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


class StrictBody(BaseModel):
    """JSON with these fields only."""

    model_config = ConfigDict(extra="forbid", strict=True)


async def read_body(request: Request, model: type[Body]) -> Body:
    """Return the JSON body of a request, or raise ``HTTPException`` with the reason."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "send JSON, with the header Content-Type: application/json")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the request is larger than {MAX_BODY_BYTES // 2**20} MiB")
    try:
        return model.model_validate_json(bytes(content))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{place}: {first['msg']}" if place else first["msg"]
        status = 400 if first["type"] == "json_invalid" else 422
        raise HTTPException(status, message) from error


class Guard:
    """An ASGI layer that rejects foreign requests, and adds security headers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        token: str | None,
        open_paths: Collection[str],
    ) -> None:
        self._app, self._token, self._open_paths = app, token, open_paths
        self._hosts = {host.lower() for host in hosts}
        self._origins = {
            f"{scheme}://{host}" for scheme in ("http", "https") for host in self._hosts
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or reject it."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        app, request = self._app, HTTPConnection(scope)
        host, origin = request.headers.get("host", "").lower(), request.headers.get("origin")
        if host not in self._hosts:
            app = JSONResponse({"error": f"this server is not reached as {host!r}"}, 403)
        elif origin is not None and origin.lower() not in self._origins:
            app = JSONResponse({"error": "pages of other sites can't use this server"}, 403)
        elif request.url.path not in self._open_paths and not self._has_token(request):
            message = "the token is missing or wrong: open the address that was printed"
            app = JSONResponse({"error": message}, 401)
        await app(scope, receive, send_guarded)

    def _has_token(self, request: HTTPConnection) -> bool:
        if not self._token:
            return True
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        tokens = [
            bearer.strip() if scheme.lower() == "bearer" else "",
            request.cookies.get(_cookie_name(self._token), ""),
            request.query_params.get("token", ""),
        ]
        expected = self._token.encode()
        return any([secrets.compare_digest(token.encode(), expected) for token in tokens])


def _cookie_name(token: str) -> str:
    """Return a different name for each server: browsers share cookies between ports."""
    return f"finetune-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def local_hosts(port: int) -> list[str]:
    """Return the values of ``Host`` with which this machine is reached from itself."""
    return [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]
