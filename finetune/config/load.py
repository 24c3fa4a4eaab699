"""Merges defaults, a YAML file, environment variables and flags into one configuration.

Also finds presets and writes YAML. Pydantic is imported on first use.
"""

import difflib
import os
import re
import reprlib
import sys
import textwrap
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import finetune
from finetune.config.schema import OPTION_BY_OTHER_NAME, OPTIONS, Config, change_options, flag_of
from finetune.errors import ConfigurationError
from finetune.files import is_there, naming

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ENVIRONMENT_PREFIX = "FINETUNE_"
# Variables with the prefix that are not options.
OTHER_VARIABLES = {"FINETUNE_API_TOKEN"}
SECTIONS = [section.name for section in fields(Config)]
# Smaller numbers without a unit are probably a mistake.
MIN_SIZE_BYTES = 10**6
# A table passed by mistake can be too large to parse as YAML.
MAX_FILE_BYTES = 2**20
MAX_LINE = 100
# Conditions that can't be combined, besides ``Mode.excludes``. Fitting a head needs a convex loss.
_EXCLUSIVE = (
    ("--loss focal", "--label-smoothing"),
    ("--loss focal", "--fit-head on"),
    ("--contrastive on", "--loss focal"),
    ("--contrastive on", "--label-smoothing"),
    ("--contrastive on", "--fit-head off"),
    ("--class-names off", "--class-descriptions"),
)
# The source, the section if the source has one, the option and the value.
Setting = tuple[str, str | None, str, Any]


@dataclass(frozen=True)
class LoadedConfig:
    """A valid configuration, with the source of each set option: file, variable or flag."""

    config: Config
    sources: dict[str, str]


def load_config(
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    assignments: Sequence[str] = (),
    ignored: Collection[str] = (),
) -> LoadedConfig:
    """Merge a YAML file or preset, ``FINETUNE_`` variables, flags and ``section.option=value``.

    Later sources win. Options in ``ignored`` are not read from the file. Raise
    ``ConfigurationError`` for unknown keys, invalid values and contradictions.
    """
    settings = [] if file is None else [line for line in _read_file(file) if line[2] not in ignored]
    for variable, text in (environment or {}).items():
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES:
            option = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            settings.append((variable, None, option, _from_text(text)))
    settings += [(flag_of(name), None, name, value) for name, value in (flags or {}).items()]
    settings += map(_read_assignment, assignments)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, section, option, value in settings:
        check_name(option, section, source=source)
        values[option], sources[option] = value, source
    checked = {name: check_value(name, value, sources[name]) for name, value in values.items()}
    config = change_options(Config(), checked)
    check_contradictions(config)
    if config.search.memory is not None:
        parse_size(config.search.memory, source=sources["memory"])
    return LoadedConfig(config, sources)


def parse_size(text: str, *, source: str) -> int:
    """Parse a size of at least 1 MB, such as ``4GiB``, ``500 MB`` or ``1000000``, into bytes."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size_bytes = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size_bytes = 0
    if size_bytes < MIN_SIZE_BYTES:
        raise ConfigurationError(
            f"{source} is {text!r}, but should be a memory size of at least 1 MB",
            remedy="use a size such as 4GiB",
        )
    return size_bytes


def _read_file(file: str) -> Iterator[Setting]:
    path = find_preset(file)
    sections = read_yaml(path) or {}
    if not isinstance(sections, dict) or any(
        not isinstance(options, dict | None) for options in sections.values()
    ):
        raise ConfigurationError(
            f"{path} has no sections with options",
            remedy="write one indented `option: value` per line in a section, which is one of "
            f"{', '.join(SECTIONS)}; if it has texts, write them as CSV or JSON Lines",
        )
    for section, options in sections.items():
        for option, value in (options or {}).items():
            yield str(path), section, option, value


def _read_assignment(assignment: str) -> Setting:
    key, separator, text = assignment.partition("=")
    section, dot, option = key.strip().partition(".")
    if not separator or not dot:
        raise ConfigurationError(
            f"--set {assignment} is not in the format section.option=value",
            remedy="use, for example, --set training.learning_rate=3e-5",
        )
    return f"--set {key.strip()}", section, option, _from_text(text)


def _from_text(text: str) -> str | None:
    return None if text.strip().lower() == "null" else text


def check_name(option: str, section: str | None, *, source: str) -> None:
    """Raise ``ConfigurationError`` if an option is unknown or in the wrong section."""
    if option not in OPTIONS:
        word = OPTION_BY_OTHER_NAME.get(option, option).replace("-", "_")
        remedy = f"use one of {', '.join(OPTIONS)}"
        if option == "callbacks":
            remedy = "to follow a run, pass a function as emit; it receives finetune.events"
        elif near := difflib.get_close_matches(word, OPTIONS, n=1):
            remedy = f"did you mean {near[0]} ({OPTIONS[near[0]].purpose})?"
        where = "" if source == flag_of(option) else f"{source}: "
        raise ConfigurationError(f"{where}unknown option {option}", remedy=remedy)
    if section not in (None, OPTIONS[option].section):
        raise ConfigurationError(
            f"{source}: unknown option {option} in section {section}",
            remedy=f"move it to section {OPTIONS[option].section}",
        )


def check_value(option: str, value: Any, source: str) -> Any:
    """Convert a value to the type of an option, or raise ``ConfigurationError``."""
    words = source if source == flag_of(option) else f"{source}: {option}"
    # In lax mode, Pydantic converts true to 1.
    is_strict = isinstance(value, bool)
    return check_type(OPTIONS[option].type, value, words=words, is_strict=is_strict)


def check_type(hint: Any, value: Any, *, words: str, is_strict: bool = True) -> Any:
    """Convert a value to a type. Raise ``ConfigurationError`` if it is invalid or empty."""
    from pydantic import ValidationError

    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    if isinstance(value, str) and not value:
        raise ConfigurationError(f"{words} is empty", remedy="set a value, or drop the option")
    try:
        return _adapter(hint).validate_python(value, strict=is_strict)
    except ValidationError as error:
        messages = (problem["msg"].partition(", unable")[0] for problem in error.errors())
        expected = " or ".join(message.removeprefix("Input should be ") for message in messages)
        raise ConfigurationError(
            f"{words} is {reprlib.repr(value)}, but should be {expected}",
            remedy="see --help-all for the allowed values",
        ) from error


@cache
def _adapter(hint: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def check_contradictions(config: Config) -> None:
    """Raise ``ConfigurationError`` for options that can't be combined."""
    for option in OPTIONS.values():
        is_set = option.value_in(config) != option.default
        if option.needs and is_set and not _is_met(option.needs, config):
            raise ConfigurationError(
                f"{option.flag} has no effect without {option.needs}", remedy=f"add {option.needs}"
            )
    mode = config.model.mode
    selected = {name: OPTIONS[name].value_in(config) for name in mode.kind.options}
    flags = [flag_of(name) + f" {value}" * (value is not True) for name, value in selected.items()]
    for pair in (*_EXCLUSIVE, *product(mode.excludes, flags)):
        if all(_is_met(condition, config) for condition in pair):
            raise ConfigurationError(
                f"{' and '.join(pair)} can't be combined", remedy="drop one of them"
            )


def _is_met(condition: str, config: Config) -> bool:
    """Return whether a condition such as ``--loss focal`` or ``--freeze-core`` is met.

    Numbers, as in ``--lora-rank 8``, are only examples.
    """
    flag, _, word = condition.removeprefix("--").partition(" ")
    option = OPTIONS[flag.replace("-", "_")]
    value = option.value_in(config)
    if word and not word.isdecimal():
        return bool(value == word)
    return bool(value) and value != option.default


def read_yaml(path: Path) -> Any:
    """Parse a YAML file into mappings, lists, strings and None."""
    try:
        with naming(path), path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError("the file is larger than 1 MiB")
        return yaml.load(content.decode(), Loader=_ConfigLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not a YAML configuration: {' '.join(str(error).split())}",
            remedy="fix the file; `finetune init TABLE` writes a valid one",
        ) from error


class _ConfigLoader(yaml.BaseLoader):
    """Reads every scalar except null as a string, which the schema converts.

    Therefore ``no`` is a word and ``1e-5`` a number, as in YAML 1.2. Tags have no effect.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        for index, name in enumerate(names):
            if name in names[:index]:
                problem = f"duplicate key {name}"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep=True)


_NULL = "tag:yaml.org,2002:null"
_ConfigLoader.add_implicit_resolver(_NULL, re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_ConfigLoader.add_constructor(_NULL, lambda loader, node: None)


def dump_config(config: Config) -> str:
    """Serialize a configuration as YAML, which ``load_config`` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def presets_folder() -> Path:
    """Return the presets folder, in an installed package or in a checkout."""
    package = Path(finetune.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_preset(name: str) -> Path:
    """Return the path of a file or, if it doesn't exist, of the preset with this name."""
    path = Path(name).expanduser()
    if is_there(path) and not path.is_dir():  # a file, or a pipe such as /dev/stdin
        return path
    presets = describe_presets()
    is_preset_name = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".yaml")
    if is_preset_name and path.stem in presets:
        return presets_folder() / f"{path.stem}.yaml"
    raise ConfigurationError(
        f"{name} is a folder" if path.is_dir() else f"configuration file not found: {name}",
        remedy=f"use a YAML file, or one of the presets {', '.join(presets)}",
    )


def is_config(name: str) -> bool:
    """Return whether a name is a YAML file, or a preset if no such file exists."""
    return Path(name).suffix.lower() in (".yaml", ".yml") or (
        name in describe_presets() and not is_there(name)
    )


def describe_presets() -> dict[str, str]:
    """Return the first comment line of each preset, by name."""
    return {
        path.stem: path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for path in sorted(presets_folder().glob("*.yaml"))
    }


def make_starter(values: Mapping[str, Any], *, notes: Mapping[str, str], heading: str) -> str:
    """Return YAML with these options and their help. Default values are commented out."""
    parts = [_comment(heading, indent="")]
    for section in fields(Config):
        entries = []
        for option in OPTIONS.values():
            if option.section == section.name and option.name in values:
                value = values[option.name]
                line = yaml.safe_dump({option.name: value}, allow_unicode=True, width=sys.maxsize)
                entries.append(
                    _comment(f"{option.description} {notes.get(option.name, '')}", indent="  ")
                    + textwrap.indent(line, "  # " if value == option.default else "  ")
                )
        if entries:
            parts.append(f"{section.name}:\n" + "\n".join(entries))
    return "\n".join(parts)


def _comment(text: str, *, indent: str) -> str:
    lines = textwrap.wrap(text, width=MAX_LINE - len(indent) - 2, break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)
