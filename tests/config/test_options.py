import typing
from os import PathLike

from finetune.config.options import Options
from finetune.config.schema import Config


def without_paths(hint: typing.Any) -> typing.Any:
    """Return a type in which only text names a path, as in the schema."""
    members = [one for one in typing.get_args(hint) if one != PathLike[str]]
    has_path = PathLike[str] in typing.get_args(hint)
    return typing.Union[*members] if has_path else hint


def test_the_typed_options_are_those_of_the_schema_in_its_order() -> None:
    in_schema = {
        name: hint
        for section in typing.get_type_hints(Config).values()
        for name, hint in typing.get_type_hints(section).items()
    }
    typed = {name: without_paths(hint) for name, hint in typing.get_type_hints(Options).items()}
    assert typed == in_schema
    assert list(typed) == list(in_schema)
    assert not Options.__required_keys__
