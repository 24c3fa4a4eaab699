"""Which kind of text classification a model is for."""

from collections.abc import Mapping
from typing import Any

from finetune.tasks.base import KINDS, PIPELINE, Task
from finetune.tasks.single import Single


def read_task(config: Mapping[str, Any]) -> Task:
    """Return the task that stands in a model's ``config.json``; of older runs it is ``single``.

    Raises:
        KeyError: If the file names no classes, or a kind that is not known.
    """
    own = (config.get("task_specific_params") or {}).get(PIPELINE, {})
    return KINDS[own.get("task", Single.name)].from_config(config)
