"""How the model of a run reads texts, in a file beside it."""

from dataclasses import asdict, dataclass, replace

from pydantic import TypeAdapter

from finetune.config.schema import Config, ModelConfig
from finetune.errors import ModelUnsupported
from finetune.files import read_json, write_json
from finetune.runs.folder import RunFolder
from finetune.tokenization.long_texts import Aggregation, Handling

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Inference:
    """What of a configuration says how texts are read; ``max_length`` is at most the model's."""

    max_length: int
    long_texts: Handling
    stride: int
    pooling: Aggregation


def write_inference(folder: RunFolder, options: ModelConfig, *, max_tokens: int) -> None:
    """Write ``inference.json`` beside a run's model, which reads ``max_tokens`` at once."""
    max_length = min(options.max_length, max_tokens)
    inference = Inference(max_length, options.long_texts, options.stride, options.pooling)
    content = {"schema_version": SCHEMA_VERSION, **asdict(inference)}
    write_json(folder.inference_file, content)


def with_inference(config: Config, folder: RunFolder) -> Config:
    """Return a run's configuration with what its ``inference.json`` says, where it has one.

    Raises:
        ModelUnsupported: If the file can't be read.
    """
    if not folder.inference_file.is_file():
        return config
    try:
        saved = TypeAdapter(Inference).validate_python(read_json(folder.inference_file))
    except (OSError, ValueError) as error:
        raise ModelUnsupported(
            f"{folder.inference_file} does not say how the model reads texts",
            remedy="restore the file, or make the run again",
        ) from error
    return replace(config, model=replace(config.model, **asdict(saved)))
