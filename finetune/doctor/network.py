"""Whether models and data can be had from the Hub."""

from huggingface_hub import constants

from finetune.config.schema import ModelConfig
from finetune.devices.check import Check
from finetune.errors import HubNotReachable, ModelIsGated
from finetune.hub import ask_hub

_TIMEOUT_SECONDS = 3.0


def check_hub() -> Check:
    """Say whether the Hub answers; without it, what is in the cache can be used."""
    try:
        ask_hub(model=ModelConfig().model, timeout_seconds=_TIMEOUT_SECONDS)
    except (HubNotReachable, ModelIsGated) as error:
        return Check("hub", "warning", error.message, error.remedy)
    return Check("hub", "ok", f"{constants.ENDPOINT} answers")
