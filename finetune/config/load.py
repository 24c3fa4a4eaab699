"""One configuration out of defaults, a YAML file, the environment and flags."""

import difflib
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any, get_type_hints

import pydantic
import yaml

from finetune.config.recipes import find_recipe
from finetune.config.schema import SECTION_OF_OPTION, Config, ModelConfig, mode_of
from finetune.config.sizes import parse_size
from finetune.config.trainer_names import OPTION_OF_TRAINER
from finetune.config.yaml_file import read_yaml
from finetune.errors import ConfigurationInvalid

ENVIRONMENT_PREFIX = "FINETUNE_"
# Options whose names in the files of earlier runs were others.
RENAMED_OPTIONS = {"head_rate_factor": "head_lr_multiplier"}


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration; the file, variable or flag of each option that one of them gives."""

    config: Config
    origins: dict[str, str]


def load_config(
    *,
    file: str | None,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    assignments: Sequence[str],
) -> LoadedConfig:
    """Merge a YAML file or recipe, ``FINETUNE_`` variables, flags and ``section.option=value``.

    Later ones win.

    Raises:
        ConfigurationInvalid: If a key is unknown, a value has the wrong type or range, or two
            contradict each other.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, option, value in [
        *_read_file(file),
        *_read_environment(environment),
        *(("--" + option.replace("_", "-"), option, value) for option, value in flags.items()),
        *map(_read_assignment, assignments),
    ]:
        values[option] = os.fspath(value) if isinstance(value, os.PathLike) else value
        origins[option] = origin
    sections: dict[str, dict[str, Any]] = {section.name: {} for section in fields(Config)}
    for option, value in values.items():
        sections[SECTION_OF_OPTION[option]][option] = _check_value(option, value, origins[option])
    types = get_type_hints(Config)
    config = Config(**{section: types[section](**given) for section, given in sections.items()})
    _check_mode(config.model)
    _check_checkpointing(config)
    if config.search.memory_limit is not None:
        parse_size(config.search.memory_limit, origin=origins["memory_limit"])
    return LoadedConfig(config, origins)


def dump_config(config: Config) -> str:
    """Return a configuration as YAML that ``load_config`` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def check_option(option: str, *, origin: str) -> None:
    """Raise ``ConfigurationInvalid`` with the nearest name if an option does not exist."""
    if option not in SECTION_OF_OPTION:
        remedy = _did_you_mean(OPTION_OF_TRAINER.get(option, option), SECTION_OF_OPTION)
        raise ConfigurationInvalid(f"unknown option {option} in {origin}", remedy=remedy)


def refuse_table(data: object) -> None:
    """Raise ``ConfigurationInvalid`` if data are a table in memory, such as pandas has."""
    if hasattr(data, "columns") or hasattr(data, "column_names"):
        raise ConfigurationInvalid(
            f"the data are a {type(data).__name__}, and a table is read from a file",
            remedy="write it to one, such as table.to_parquet('table.parquet'), and give its name",
        )


def _read_file(file: str | None) -> Iterable[tuple[str, str, Any]]:
    if file is None:
        return
    path = find_recipe(file)
    sections = [section.name for section in fields(Config)]
    content = read_yaml(path)
    if not isinstance(content, dict | None):
        remedy = f"write its options under {', '.join(sections)}; a table of texts is --data {file}"
        raise ConfigurationInvalid(f"{path} has no sections", remedy=remedy)
    for section, options in (content or {}).items():
        if section not in sections:
            remedy = _did_you_mean(section, sections)
            if section in SECTION_OF_OPTION:
                remedy = f"{section} is an option: write it below {SECTION_OF_OPTION[section]}:"
            raise ConfigurationInvalid(f"unknown section {section} in {path}", remedy=remedy)
        if not isinstance(options, dict | None):
            raise ConfigurationInvalid(
                f"section {section} in {path} has no options",
                remedy="write one `option: value` a line below it, indented",
            )
        for name, value in (options or {}).items():
            option = RENAMED_OPTIONS.get(name) or name
            _check_place(section, option, origin=str(path))
            yield str(path), option, value


def _read_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, str, Any]]:
    for variable, text in environment.items():
        if variable.startswith(ENVIRONMENT_PREFIX):
            option = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            check_option(option, origin=f"the environment variable {variable}")
            yield variable, option, _from_text(text)


def _read_assignment(assignment: str) -> tuple[str, str, Any]:
    key, separator, text = assignment.partition("=")
    section, dot, option = key.strip().partition(".")
    if not separator or not dot:
        raise ConfigurationInvalid(
            f"--set {assignment} is not of the form section.option=value",
            remedy="write for example --set training.learning_rate=3e-5",
        )
    _check_place(section, option, origin="--set")
    return f"--set {key.strip()}", option, _from_text(text)


def _check_place(section: str, option: str, *, origin: str) -> None:
    check_option(option, origin=origin)
    if SECTION_OF_OPTION[option] != section:
        raise ConfigurationInvalid(
            f"{option} is not an option of section {section} in {origin}",
            remedy=f"it belongs to section {SECTION_OF_OPTION[option]}",
        )


def _from_text(text: str) -> str | None:
    return None if text.strip().lower() == "null" else text


@cache
def _validators() -> dict[str, pydantic.TypeAdapter[Any]]:
    return {
        option: pydantic.TypeAdapter(hint)
        for section in get_type_hints(Config).values()
        for option, hint in get_type_hints(section, include_extras=True).items()
    }


def _check_value(option: str, value: Any, origin: str) -> Any:
    refuse_table(value)
    try:
        # Pydantic takes true for 1 unless it is strict.
        return _validators()[option].validate_python(value, strict=isinstance(value, bool))
    except pydantic.ValidationError as error:
        messages = (one["msg"].partition(", unable")[0] for one in error.errors())
        expected = " or ".join(message.removeprefix("Input should be ") for message in messages)
        raise ConfigurationInvalid(
            f"{origin}: {option} is {reprlib.repr(value)}, and should be {expected}",
            remedy="`finetune run --help` shows what each option takes",
        ) from error


def _check_mode(model: ModelConfig) -> None:
    if model.train_layers is not None and (model.freeze_core or model.head == "classifier"):
        flag = "--freeze-core" if model.freeze_core else "--head classifier"
        raise ConfigurationInvalid(
            f"{flag} freezes the whole encoder, --train-layers trains {model.train_layers} layers",
            remedy="give one of the two",
        )


def _check_checkpointing(config: Config) -> None:
    if config.training.gradient_checkpointing and not mode_of(config.model).trains_encoder:
        raise ConfigurationInvalid(
            "gradient checkpointing is for layers that train, and the whole encoder is frozen",
            remedy="leave out --gradient-checkpointing, or train layers with --train-layers",
        )


def _did_you_mean(word: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(word.replace("-", "_"), known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are: {', '.join(known)}"
