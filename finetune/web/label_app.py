"""The endpoints of ``finetune label``."""

from collections.abc import Collection
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from finetune.web.labeling import LabelingSession
from finetune.web.server import StrictBody, make_app, read_body


class LabelBody(StrictBody):
    """A label, a list of labels for multi-label data, or null to skip the row."""

    row: int
    label: str | list[str] | None


class ClassBody(StrictBody):
    """A class to add; with ``new_name``, a class to rename or to merge."""

    name: str
    new_name: str | None = None


def make_label_app(
    session: LabelingSession, *, page: str, hosts: Collection[str], token: str
) -> ASGIApp:
    """Return the application; ``page`` is the HTML of the page."""

    async def next_text(request: Request) -> Response:
        shown = session.next()
        if shown is None:
            raise HTTPException(404, "all texts are labeled or skipped")
        row, how = shown
        texts, suggestion = session.text_of(row), session.suggestion(row)
        return JSONResponse({**texts, "how": how, "suggestion": suggestion})

    async def label(request: Request) -> Response:
        body = await read_body(request, LabelBody)
        names = [body.label] if isinstance(body.label, str) else body.label
        session.label(body.row - 1, names)
        return JSONResponse(session.status())

    async def undo(request: Request) -> Response:
        row = session.undo()
        return JSONResponse({"row": None if row is None else row + 1, **session.status()})

    async def change_class(request: Request) -> Response:
        body = await read_body(request, ClassBody)
        session.change_class(body.name, body.new_name)
        return JSONResponse(session.status())

    async def search(request: Request) -> Response:
        query: Any = request.query_params
        return JSONResponse(session.search(query.get("class") or None, query.get("search", "")))

    async def status(request: Request) -> Response:
        return JSONResponse(session.status())

    async def contradictions(request: Request) -> Response:
        return JSONResponse(session.contradictions())

    routes = [
        Route("/api/next", next_text),
        Route("/api/label", label, methods=["POST"]),
        Route("/api/undo", undo, methods=["POST"]),
        Route("/api/classes", change_class, methods=["POST"]),
        Route("/api/status", status),
        Route("/api/contradictions", contradictions),
        Route("/api/texts", search),
    ]
    return make_app(routes, page=page, script="label.js", hosts=hosts, token=token)
