"""Sizes of memory as people write them."""

import contextlib
import re

import pydantic

from finetune.errors import ConfigurationInvalid

# Without a unit, a smaller number is meant in another one than bytes.
_MIN_BYTES = 10**6
# Pydantic does not look at what comes behind a number and a unit, and reads 4,5GiB as 4 bytes.
_NUMBER_AND_UNIT = re.compile(r"\s*\d*\.?\d+\s*[a-zA-Z]*\s*")


def parse_size(text: str, *, origin: str) -> int:
    """Return the bytes of a size such as ``4GiB``, ``500 MB`` or ``1000000``, at least 1 MB.

    Raises:
        ConfigurationInvalid: If it is not; it names ``origin``, where the text was written.
    """
    size_bytes = 0
    if _NUMBER_AND_UNIT.fullmatch(text):
        with contextlib.suppress(pydantic.ValidationError):
            size_bytes = int(pydantic.TypeAdapter(pydantic.ByteSize).validate_python(text))
    if size_bytes < _MIN_BYTES:
        found = "is less than 1 MB" if size_bytes else "is no size of memory"
        raise ConfigurationInvalid(
            f"{origin} is {text!r}, which {found}", remedy="write for example 4GiB"
        )
    return size_bytes
