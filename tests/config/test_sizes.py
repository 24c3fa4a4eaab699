import pytest

from finetune.config.sizes import parse_size
from finetune.errors import ConfigurationInvalid


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 2**30),
        ("4 GiB", 4 * 2**30),
        ("4gib", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("500 MB", 500_000_000),
        ("1MiB", 2**20),
        ("1000000", 1_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_size(text, origin="--memory-limit") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "much",
        "GiB",
        "4 gibibytes",
        "0",
        "0GiB",
        "-4GiB",
        "nan",
        "inf",
        "4GiB 2",
        "4,5GiB",
        "4GiB/s",
    ],
)
def test_what_is_no_size_is_refused_with_where_it_was_written(text: str) -> None:
    with pytest.raises(ConfigurationInvalid) as refused:
        parse_size(text, origin="--memory-limit")
    assert refused.value.message.startswith(f"--memory-limit is {text!r}")
    assert "4GiB" in refused.value.remedy


def test_a_number_that_lacks_its_unit_is_refused() -> None:
    with pytest.raises(ConfigurationInvalid, match="'4', which is less than 1 MB"):
        parse_size("4", origin="--memory-limit")
