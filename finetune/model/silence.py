"""transformers without progress bars and reports, which would stand beside this package's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, WARNING

from transformers.utils import logging


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide its progress bars and, unless the user has chosen a level, its messages but errors."""
    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity(ERROR if level == WARNING else level)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
