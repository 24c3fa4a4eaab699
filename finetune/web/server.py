"""Runs an application on a socket until a signal asks it to stop; renders the pages."""

import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import uvicorn
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from finetune.errors import UsageError
from finetune.training.interruption import STOP_SIGNALS

# A request that takes longer is cut off when the server stops.
MAX_STOP_SECONDS = 60
_TEMPLATES = Environment(
    loader=PackageLoader("finetune.web", "."), autoescape=True, undefined=StrictUndefined
)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at a port; 0 means a free one."""
    try:
        return socket.create_server((host, port), family=_family_of(host), backlog=2048)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"a server can't listen at {host} port {port}: {error}",
            remedy="choose another --port, or leave it out for a free one",
        ) from error


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class _Server(uvicorn.Server):
    """Stops when a signal comes: what was accepted is answered, and the command ends normally."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals; uvicorn would raise them again after the server has stopped."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = STOP_SIGNALS if is_main else ()
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def make_server(app: ASGIApp) -> uvicorn.Server:
    """Return a server, whose ``run(sockets=[…])`` returns after a signal or ``should_exit``."""
    return _Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=MAX_STOP_SECONDS,
        )
    )


def render(template: str, **values: Any) -> str:
    """Return the HTML of a page."""
    return _TEMPLATES.get_template(template).render(values)


def static(name: str, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint for a file of this package; ``style.css`` includes the report styles."""
    sources = [("finetune.web", name)]
    if name == "style.css":
        sources = [("finetune.report", name), ("finetune.web", "web.css")]
    content = "".join(files(package).joinpath(file).read_text("utf-8") for package, file in sources)

    async def send(request: Request) -> Response:
        return Response(content, media_type=media_type)

    return send
