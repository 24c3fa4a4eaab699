"""Rejects unsafe requests before they reach the endpoints of either application.

A page of any website can send requests to localhost, and a name of any domain can resolve to
127.0.0.1 (DNS rebinding). So a request has to carry a host name, and if it comes from a page an
origin, that the server was started with.
"""

import hashlib
import secrets
from collections.abc import Collection

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 2**20
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class RequestError(Exception):
    """A request that can't be answered, with an HTTP status and a reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Guard:
    """An ASGI layer that rejects foreign and oversized requests, and adds security headers.

    Args:
        hosts: The values of the header ``Host`` that are accepted, with ports.
        token: What requests have to carry, as a cookie, a bearer token, or ``?token=`` on the
            page; None if anyone may ask.
        open_paths: Paths that need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        token: str | None,
        open_paths: Collection[str] = (),
    ) -> None:
        self._app, self._token, self._open_paths = app, token, open_paths
        self._hosts = {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_guarded(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        try:
            self._check(HTTPConnection(scope))
            await self._app(scope, _limited(receive), send_guarded)
        except RequestError as error:
            if has_started:
                raise
            response = JSONResponse({"error": error.message}, status_code=error.status)
            await response(scope, receive, send_guarded)

    def _check(self, request: HTTPConnection) -> None:
        host = request.headers.get("host", "").lower()
        if host not in self._hosts:
            raise RequestError(403, f"this server is not reached as {host!r}")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in {
            f"{scheme}://{host}" for scheme in ("http", "https") for host in self._hosts
        }:
            raise RequestError(403, "pages of other sites may not use this server")
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise _too_large()
        if (
            self._token
            and request.url.path not in self._open_paths
            and not self._is_allowed(request)
        ):
            raise RequestError(
                401, "the token is missing or wrong: open the address that was printed"
            )

    def _is_allowed(self, request: HTTPConnection) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        tokens = [
            bearer.strip() if scheme.lower() == "bearer" else "",
            request.cookies.get(cookie_name(self._token or ""), ""),
            request.query_params.get("token", ""),
        ]
        expected = (self._token or "").encode()
        return any([secrets.compare_digest(token.encode(), expected) for token in tokens])


def _limited(receive: Receive) -> Receive:
    """Count what is received, since a body may come without its length."""
    received_bytes = 0

    async def receive_limited() -> Message:
        nonlocal received_bytes
        message = await receive()
        received_bytes += len(message.get("body", b""))
        if received_bytes > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return receive_limited


def _too_large() -> RequestError:
    return RequestError(413, f"the request is larger than {MAX_BODY_BYTES // 2**20} MiB")


def cookie_name(token: str) -> str:
    """Return a name of its own for each server: browsers share cookies between ports."""
    return f"finetune-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def local_hosts(port: int) -> list[str]:
    """Return the values of ``Host`` with which this machine is reached from itself."""
    return [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")]
