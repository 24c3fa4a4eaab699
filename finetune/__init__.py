"""Fine-tune BERT-like text classifiers on a Mac's GPU, on a CPU, or on CUDA.

The commands as functions:

    import finetune

    results = finetune.run(data="questions", model="minilm", freeze_core=True)
    finetune.evaluate(results.output_dir)
    finetune.predict(results.output_dir, ["Who wrote Faust?"])
    finetune.compare("runs/one", "runs/another").runs
    finetune.find_batch(model="minilm", device="cpu").results

In a notebook and on a terminal they show how far they are, as the commands do; not with
``progress=False``, nor with an ``emit`` that receives the events of ``finetune.events``.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["compare", "evaluate", "find_batch", "predict", "run"]


def __getattr__(name: str) -> Any:
    """Load the functions when they are first used: torch and transformers take seconds."""
    if name in __all__:
        function = getattr(import_module(f"finetune.commands.{name}"), name)
        return import_module("finetune.commands.progress").shown_live(function)
    raise AttributeError(f"module 'finetune' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what an interactive session completes: the functions before they are used, too."""
    return sorted({*globals(), *__all__})
