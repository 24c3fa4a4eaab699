"""What a configuration holds and may hold, in forms that people and editors read."""

from dataclasses import asdict, fields
from typing import Any, get_type_hints

import pydantic

from finetune.config.load import LoadedConfig
from finetune.config.schema import Config


def describe_options(loaded: LoadedConfig) -> list[dict[str, Any]]:
    """Return section, option, value and origin of every option; a default's is ``default``."""
    origins = loaded.origins
    return [
        dict(section=section, option=name, value=value, origin=origins.get(name, "default"))
        for section, options in asdict(loaded.config).items()
        for name, value in options.items()
    ]


def make_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the YAML files, from which editors complete, explain and check.

    Numbers must be written as numbers, where ``load_config`` takes their text as well.
    """
    schema = pydantic.TypeAdapter(Config).json_schema() | {"additionalProperties": False}
    for name, section in get_type_hints(Config).items():
        definition = schema["$defs"][section.__name__]
        definition["additionalProperties"] = False
        for option in fields(section):
            definition["properties"][option.name]["description"] = option.metadata["help"]
        # A section with all of its options commented out is empty, not an object.
        reference = schema["properties"][name]
        schema["properties"][name] = {"anyOf": [reference, {"type": "null"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
