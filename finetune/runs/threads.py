"""How many CPU threads a run takes."""

import numpy as np
import torch

from finetune.config.schema import precision_without_timing
from finetune.devices.precision import autocast
from finetune.events import Emit, Info
from finetune.runs.details import AutoTunedOption
from finetune.runs.preparation import Preparation

EXAMPLES = 8


def choose_run_threads(preparation: Preparation, *, emit: Emit) -> Preparation:
    """Set the number of CPU threads by a timing of the model, where other processes are busy.

    Return the preparation with what was measured.
    """
    device, model = preparation.device, preparation.text_model.model
    train = preparation.examples["train"]
    middle = max(0, (len(train.lengths) - EXAMPLES) // 2)
    typical = np.argsort(train.lengths)[middle : middle + EXAMPLES]
    inputs = train.inputs_of(typical, int(train.lengths[typical].max()))
    model.train(False)

    def forward() -> None:
        with (
            torch.inference_mode(),
            autocast(device, precision=precision_without_timing(preparation.config.training)),
        ):
            model(**inputs)

    chosen = device.choose_threads(forward)
    if chosen is None:
        return preparation
    emit(Info(str(chosen)))
    milliseconds = {str(threads): 1e3 * one for threads, one in chosen.seconds.items()}
    note = f"other processes take {chosen.busy_share:.0%} of the CPU"
    return preparation.with_choices(
        AutoTunedOption("CPU threads", str(chosen.threads), "ms a forward", milliseconds, note)
    )
