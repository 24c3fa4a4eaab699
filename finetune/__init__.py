"""Fine-tune BERT-style text classifiers on a CPU, an NVIDIA GPU or Apple silicon.

The commands as functions:

    import finetune

    results = finetune.run(data="questions", model="minilm", freeze_core=True)
    results.predict(["Who wrote Faust?"]).to_pandas()
    finetune.evaluate(results)
    finetune.load(results).predict(["Who wrote Faust?"])
    finetune.compare(results, "runs/another")
    finetune.find_batch(model="minilm", device="cpu")

Data can be a DataFrame, a ``Dataset``, ``{"text": texts, "label": labels}``, ``(texts, labels)``,
or a list of dicts or (text, label) tuples: ``finetune.run(table, model="minilm")``.

The functions show progress in notebooks and on terminals. ``progress=False`` hides it, and so does
an ``emit``, which receives the events of ``finetune.events``. Warnings are Python warnings.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["compare", "evaluate", "find_batch", "load", "predict", "run", "sweep"]


def __getattr__(name: str) -> Any:
    """Import functions on first use, because torch and transformers take seconds."""
    if name in __all__:
        module = "predict" if name == "load" else name
        function = getattr(import_module(f"finetune.commands.{module}"), name)
        return import_module("finetune.commands.python_api").as_python(function)
    raise AttributeError(f"module 'finetune' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names for completion, including functions that are not imported yet."""
    return sorted({*globals(), *__all__})
