"""YAML files, read so that nothing in them can surprise: no tags, aliases or duplicate keys.

Size, depth and values are limited, so that no file takes long.
"""

from collections.abc import Hashable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from finetune.errors import ConfigurationInvalid

MAX_FILE_BYTES = 2**20
DEEPEST_LEVELS = 20
MAX_VALUES = 10_000


def read_yaml(path: Path) -> Any:
    """Return a file's mappings, lists, text and None, which are shared: do not change them.

    Raises:
        ConfigurationInvalid: If it can't be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError("it is larger than 1 MiB")
        return _parse(content.decode())
    except OSError as error:
        raise ConfigurationInvalid(
            f"{path} can't be read: {error.strerror}", remedy="check the name after --config"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationInvalid(
            f"{path} is not a YAML configuration: {' '.join(str(error).split())}",
            remedy="correct the file; `finetune config cp` copies one that works",
        ) from error


# A command reads the configuration of its run several times.
@lru_cache(maxsize=4)
def _parse(text: str) -> Any:
    return yaml.load(text, Loader=_ConfigLoader)


class _ConfigLoader(yaml.BaseLoader):
    """Reads every scalar but null as text, from which the schema makes numbers and booleans.

    So ``no`` is a word and ``1e-5`` a number, as in YAML 1.2, and no tag has an effect.
    """

    levels = values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.levels += 1
        self.values += 1
        if problem := self._problem():
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, problem, mark)
        node = super().compose_node(parent, index)
        self.levels -= 1
        return node

    def _problem(self) -> str | None:
        # By aliases a short file can describe a huge or a recursive value.
        if self.check_event(yaml.AliasEvent):
            return "aliases are not supported"
        if self.levels > DEEPEST_LEVELS:
            return f"nested more than {DEEPEST_LEVELS} deep"
        return f"more than {MAX_VALUES:,} values" if self.values > MAX_VALUES else None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key, value in node.value:
            if (name := str(key.value)) in mapping:
                problem = f"duplicate key {name}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            mapping[name] = self.construct_object(value, deep=True)
        return mapping


_NULL = "tag:yaml.org,2002:null"
_ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag == _NULL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_ConfigLoader.add_constructor(_NULL, lambda loader, node: None)
