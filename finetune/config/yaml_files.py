"""YAML configuration files, and the presets that come with the package."""

import re
import sys
import textwrap
from collections.abc import Hashable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

import finetune
from finetune.config.schema import OPTIONS, Config
from finetune.errors import ConfigurationError
from finetune.files import is_there

# A table that is passed by mistake may be too large to parse as YAML.
MAX_FILE_BYTES = 2**20
MAX_LINE = 100


def read_yaml(path: Path) -> Any:
    """Return the mappings, lists, strings and None of a file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError("the file is larger than 1 MiB")
        return yaml.load(content.decode(), Loader=_ConfigLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} is not a YAML configuration: {' '.join(str(error).split())}",
            remedy="correct the file; `finetune config cp` copies one that works",
        ) from error


class _ConfigLoader(yaml.BaseLoader):
    """Reads every scalar except null as a string, which the schema converts.

    So ``no`` is a word and ``1e-5`` a number, as in YAML 1.2. Tags have no effect.
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
    """Return a configuration as YAML that ``load_config`` reads back."""
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True)


def presets_folder() -> Path:
    """Return the folder of the presets: in an installed package, or in a checkout."""
    package = Path(finetune.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def find_preset(name: str) -> Path:
    """Return the path of a file or, if there is none, of the preset with this name."""
    path = Path(name)
    if is_there(path) and not path.is_dir():  # a file, or a pipe such as /dev/stdin
        return path
    presets = describe_presets()
    is_preset_name = path.parent in (Path(), Path("configs")) and path.suffix in ("", ".yaml")
    if is_preset_name and path.stem in presets:
        return presets_folder() / f"{path.stem}.yaml"
    raise ConfigurationError(
        f"{name} is a folder" if path.is_dir() else f"there is no configuration file {name}",
        remedy=f"use a YAML file, or one of the presets {', '.join(presets)}",
    )


def is_config(name: str) -> bool:
    """Return whether a name is a YAML file or, if there is no such file, a preset."""
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
    """Return YAML with these options and their help; default values are commented out."""
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


def make_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the files, which editors use to complete, explain and check."""
    import pydantic

    schema = pydantic.TypeAdapter(Config).json_schema()
    for definition in (schema, *schema["$defs"].values()):
        definition["additionalProperties"] = False
    for section_class in get_type_hints(Config).values():
        definition = schema["$defs"][section_class.__name__]
        definition["description"] = section_class.__doc__.partition("\n")[0]
        for name, option in definition["properties"].items():
            option["description"] = OPTIONS[name].description
    for section, reference in schema["properties"].items():
        # A section whose options are all commented out is null.
        schema["properties"][section] = {"anyOf": [reference, {"type": "null"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
