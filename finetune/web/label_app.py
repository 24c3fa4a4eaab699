"""The pages and endpoints of ``finetune label``."""

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from finetune.web.labeling import LabelingSession
from finetune.web.security import RequestError, cookie_name
from finetune.web.server import static

Body = TypeVar("Body", bound=BaseModel)


class StrictBody(BaseModel):
    """JSON with these fields only."""

    model_config = ConfigDict(extra="forbid", strict=True)


class LabelBody(StrictBody):
    """A label, a list of labels for multi-label data, or null to skip the row."""

    row: int
    label: str | list[str] | None


class ClassBody(StrictBody):
    """A class to add; with ``new_name``, a class to rename or to merge."""

    name: str
    new_name: str | None = None


async def read_body(request: Request, model: type[Body]) -> Body:
    """Return the JSON body of a request, or raise a ``RequestError`` with the reason."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RequestError(415, "send JSON, with the header Content-Type: application/json")
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        message = f"{place}: {first['msg']}" if place else first["msg"]
        raise RequestError(400 if first["type"] == "json_invalid" else 422, message) from error


async def _explain(request: Request, error: Exception) -> Response:
    """Answer an error with its status and a sentence."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
    assert isinstance(error, RequestError)
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return JSONResponse({"error": error.message}, error.status, headers=headers)


EXCEPTION_HANDLERS: dict[Any, Any] = {RequestError: _explain, HTTPException: _explain}


def make_label_app(session: LabelingSession, *, page: str, token: str) -> Starlette:
    """Return the application; ``page`` is the HTML of the page, whose cookie holds ``token``."""

    async def show_page(request: Request) -> Response:
        response = HTMLResponse(page)
        response.set_cookie(cookie_name(token), token, httponly=True, samesite="strict")
        return response

    async def next_text(request: Request) -> Response:
        chosen = session.next()
        if chosen is None:
            raise RequestError(404, "all texts are labeled or skipped")
        row, how = chosen
        return _json({**session.text_of(row), "how": how, "suggestion": session.suggestion(row)})

    async def label(request: Request) -> Response:
        body = await read_body(request, LabelBody)
        names = [body.label] if isinstance(body.label, str) else body.label
        session.label(body.row - 1, names)
        return _json(session.status())

    async def undo(request: Request) -> Response:
        row = session.undo()
        return _json({"row": None if row is None else row + 1, **session.status()})

    async def change_class(request: Request) -> Response:
        body = await read_body(request, ClassBody)
        if body.new_name is None:
            session.add_class(body.name)
        else:
            session.rename_class(body.name, body.new_name)
        return _json(session.status())

    async def status(request: Request) -> Response:
        return _json(session.status())

    async def contradictions(request: Request) -> Response:
        return _json(session.contradictions())

    async def texts(request: Request) -> Response:
        asked = request.query_params
        return _json(session.search(asked.get("class") or None, asked.get("search", "")))

    return Starlette(
        routes=[
            Route("/", show_page),
            Route("/style.css", static("style.css", "text/css")),
            Route("/label.js", static("label.js", "text/javascript")),
            Route("/api/next", next_text),
            Route("/api/label", label, methods=["POST"]),
            Route("/api/undo", undo, methods=["POST"]),
            Route("/api/classes", change_class, methods=["POST"]),
            Route("/api/status", status),
            Route("/api/contradictions", contradictions),
            Route("/api/texts", texts),
        ],
        exception_handlers=EXCEPTION_HANDLERS,
    )


def _json(content: Any) -> Response:
    return Response(json.dumps(content, ensure_ascii=False), media_type="application/json")
