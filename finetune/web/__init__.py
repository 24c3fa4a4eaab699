"""Two small web programs: labeling texts in the browser, and a model behind an HTTP endpoint."""

from importlib.util import find_spec

from finetune.errors import UsageError


def require_packages() -> None:
    """Raise ``UsageError`` if the packages of the extra are missing."""
    for package in ("starlette", "uvicorn"):
        if find_spec(package) is None:
            raise UsageError(
                f"this command needs the package {package}", remedy="pip install starlette uvicorn"
            )
