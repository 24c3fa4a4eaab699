import re
import typing
from dataclasses import fields

from finetune.config.schema import OPTIONS, Config


def test_each_option_has_a_unique_name_and_a_help_sentence() -> None:
    kinds = typing.get_type_hints(Config).values()
    assert len(OPTIONS) == sum(len(fields(kind)) for kind in kinds)
    assert [
        one.name for one in OPTIONS.values() if not re.fullmatch(r".{10,}\.", one.description)
    ] == []
