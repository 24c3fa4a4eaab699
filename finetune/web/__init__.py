"""Two small web applications: labeling texts in the browser, and serving a model over HTTP."""

from importlib.util import find_spec

from finetune.errors import UsageError


def require_packages() -> None:
    """Raise ``UsageError`` if packages of the `web` extra are missing."""
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        message, remedy = "starlette and uvicorn are missing", "pip install starlette uvicorn"
        raise UsageError(message, remedy=remedy)
