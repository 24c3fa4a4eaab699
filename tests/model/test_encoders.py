import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from finetune.batch_finder.case import Case, architecture_of
from finetune.batch_finder.estimate import live_peaks
from finetune.config.mode import Mode
from finetune.config.schema import Config
from finetune.data.check import MULTILINGUAL_MODEL
from finetune.model.encoders import Encoder, read_encoders
from finetune.model.source import MINILM

ENCODERS = {one.name: one for one in read_encoders()}


def test_the_models_that_commands_propose_are_listed() -> None:
    assert {MINILM, Config().model.model, MULTILINGUAL_MODEL} <= ENCODERS.keys()


@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=[*ENCODERS])
def test_the_size_of_an_encoder_is_that_of_its_config(encoder: Encoder) -> None:
    config = AutoConfig.for_model(**encoder.config)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    parameters = sum(one.numel() for one in model.base_model.parameters())
    assert parameters == encoder.parameters
    # RoBERTa numbers positions from 2 on.
    positions = config.max_position_embeddings - 2 * ("roberta" in config.model_type)
    assert positions == encoder.max_tokens


def test_the_memory_of_an_encoder_is_that_of_a_step() -> None:
    encoder = ENCODERS[MINILM]
    architecture = architecture_of(AutoConfig.for_model(**encoder.config).to_dict())
    for mode, expected in encoder.gib.items():
        case = Case(
            "cpu", architecture, classes=6, mode=Mode(mode), padded_length=128, precision="fp32",
            optimizer="adamw", gradient_checkpointing=False, task="single", has_mean_layer=False,
        )  # fmt: skip
        assert live_peaks(case, (32, 32))[1] / 2**30 == pytest.approx(expected, rel=0.05, abs=0.01)
