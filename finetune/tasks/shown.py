"""How results are displayed in Python and in notebooks: a few lines, and a table."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from finetune.files import escape_line

MAX_ROWS, MAX_CHARACTERS = 4, 158


class DisplayMixin(ABC):
    """A result with a repr of at most five lines; a dataclass must set repr=False."""

    # Warnings of the function of the Python API that returned the result.
    warnings: Sequence[str] = ()

    @abstractmethod
    def records(self) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the table, the most important first, each with its values by name."""

    def __repr__(self) -> str:
        from finetune.tasks.tables import format_value  # imports numpy

        lines = [f"{type(self).__name__} {getattr(self, 'output_dir', '')}".rstrip()]
        for row in self.records()[:MAX_ROWS]:
            cells = (
                f"{name} {format_value(value)}" for name, value in row.items() if value is not None
            )
            lines.append(f"  {', '.join(cells)}")
        return "\n".join(escape_line(line)[:MAX_CHARACTERS] for line in lines)

    def to_pandas(self) -> Any:
        """Return the table as a DataFrame of pandas."""
        import pandas

        return pandas.DataFrame(list(self.records()))

    def _repr_html_(self) -> str:
        title = escape(repr(self).partition("\n")[0])
        return f"<p>{title}</p>{self.to_pandas().to_html(max_rows=20, index=False)}"


class RunResultMixin(DisplayMixin, os.PathLike[str]):
    """The results of a run or several; functions accept them instead of the folder."""

    output_dir: str

    def __post_init__(self) -> None:
        # The working directory may change.
        object.__setattr__(self, "_path", os.path.abspath(self.output_dir))

    def __fspath__(self) -> str:
        return str(vars(self)["_path"])

    def predict(self, texts: Any, **options: Any) -> Any:
        """Classify texts with the best model, as ``finetune.predict`` does."""
        import finetune

        return finetune.predict(self, texts, **options)

    def evaluate(self, **options: Any) -> Any:
        """Score the best model, as ``finetune.evaluate`` does."""
        import finetune

        return finetune.evaluate(self, **options)
