"""Two small web programs: labeling texts in the browser, and a model behind an HTTP endpoint."""

from importlib.util import find_spec

from finetune.errors import UsageError


def require_packages() -> None:
    """Raise ``UsageError`` if the packages of the extra are missing."""
    if not all(map(find_spec, ("starlette", "uvicorn"))):
        message, remedy = "starlette and uvicorn are missing", "pip install starlette uvicorn"
        raise UsageError(message, remedy=remedy)
