"""One configuration out of defaults, a YAML file, the environment and flags."""

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from typing import Any

import pydantic
import yaml

from finetune.config.recipes import find_recipe
from finetune.config.schema import SECTION_OF_OPTION, Config
from finetune.config.sizes import parse_size
from finetune.errors import ConfigurationInvalid

ENVIRONMENT_PREFIX = "FINETUNE_"

Sections = dict[str, dict[str, Any]]


class _PlainLoader(yaml.SafeLoader):
    """Reads ``no`` and ``on`` as the words they are, as YAML 1.2 and editors do."""


_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("^(?:true|false)$", re.IGNORECASE), list("tTfF")
)


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration and where each of its values comes from.

    Args:
        config: The values.
        origins: For each option that is not at its default: a file, a variable or a flag.
    """

    config: Config
    origins: dict[str, str]


def load_config(
    *,
    file: str | None,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    assignments: Sequence[str],
) -> LoadedConfig:
    """Merge all sources of a configuration; later ones win: file, environment, flags.

    Args:
        file: A YAML file or the name of a recipe.
        environment: Variables; those that begin with ``FINETUNE_`` count.
        flags: Values by option.
        assignments: ``section.option=value``, as strings; they win over everything.

    Raises:
        ConfigurationInvalid: If a key is unknown, a value has the wrong type or range, or two
            contradict each other.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, option, value in [
        *_read_file(file),
        *_read_environment(environment),
        *((_flag_name(option), option, value) for option, value in flags.items()),
        *(_read_assignment(assignment) for assignment in assignments),
    ]:
        values[option] = os.fspath(value) if isinstance(value, os.PathLike) else value
        origins[option] = origin
    config = _validate(values, origins)
    return LoadedConfig(config, origins)


def dump_config(config: Config) -> str:
    """Return a configuration as YAML that ``load_config`` reads back to the same values."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def check_option(option: str, *, origin: str) -> None:
    """Make sure that an option exists.

    Raises:
        ConfigurationInvalid: Naming the nearest one that does.
    """
    if option not in SECTION_OF_OPTION:
        raise ConfigurationInvalid(
            f"unknown option {option} in {origin}", remedy=_did_you_mean(option, SECTION_OF_OPTION)
        )


def _read_file(file: str | None) -> Iterable[tuple[str, str, Any]]:
    if file is None:
        return
    path = find_recipe(file)
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationInvalid(
            f"{path} is not YAML: {' '.join(str(error).split())}", remedy="mend the file"
        ) from error
    sections = [section.name for section in fields(Config)]
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigurationInvalid(
            f"{path} holds no sections", remedy=f"write its options under {', '.join(sections)}"
        )
    for section, options in _with_words_as_keys(content).items():
        if section not in sections:
            raise ConfigurationInvalid(
                f"unknown section {section} in {path}", remedy=_did_you_mean(section, sections)
            )
        if not isinstance(options, dict | None):
            raise ConfigurationInvalid(
                f"section {section} in {path} holds no options",
                remedy="write one `option: value` a line below it, indented",
            )
        for option, value in _with_words_as_keys(options or {}).items():
            _check_place(section, option, origin=str(path))
            yield str(path), option, value


def _with_words_as_keys(mapping: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a mapping with string keys; YAML takes ``3`` and ``on`` for other things."""
    return {str(key): value for key, value in mapping.items()}


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
            f"{option} is no option of section {section} in {origin}",
            remedy=f"it belongs to section {SECTION_OF_OPTION[option]}",
        )


def _from_text(text: str) -> str | None:
    return None if text.strip().lower() == "null" else text


def _flag_name(option: str) -> str:
    return "--" + option.replace("_", "-")


@cache
def _schema() -> pydantic.TypeAdapter[Config]:
    return pydantic.TypeAdapter(Config)


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    sections: Sections = {}
    for option, value in values.items():
        sections.setdefault(SECTION_OF_OPTION[option], {})[option] = value
    try:
        config = _schema().validate_python(sections)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][1])
        raise ConfigurationInvalid(
            f"{origins[option]}: {option} is {values[option]!r}, {_lower_first(first['msg'])}",
            remedy="`finetune run --help` shows what each option takes",
        ) from error
    _check_mode(config)
    if config.search.memory_limit is not None:
        parse_size(config.search.memory_limit, origin=origins["memory_limit"])
    return config


def _check_mode(config: Config) -> None:
    model = config.model
    if model.train_layers is None:
        return
    for flag, contradicts in (
        ("--freeze-core", model.freeze_core),
        ("--head classifier", model.head == "classifier"),
    ):
        if contradicts:
            raise ConfigurationInvalid(
                f"{flag} freezes the whole core, --train-layers trains {model.train_layers} layers",
                remedy="give one of the two",
            )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    choices = list(known)
    near = difflib.get_close_matches(word.replace("-", "_"), choices, n=1)
    return f"did you mean {near[0]}?" if near else f"known are: {', '.join(choices)}"


def _lower_first(message: str) -> str:
    return message[:1].lower() + message[1:]
