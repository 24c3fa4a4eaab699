"""``finetune models``: encoders to start from."""

from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_table
from finetune.config.schema import Config

EXAMPLES = """\b
Examples:
  finetune models
  finetune run reviews.csv --model answerdotai/ModernBERT-base
"""
TITLES = ("model", "languages", "M", "tokens", "all", "last 2", "head", "license", "good for")
NOTES = f"""\
M: millions of parameters. tokens: maximum tokens per text. all, last 2 and head: GiB of tensors
while these layers train on 32 texts of 128 tokens in fp32; find-batch measures real memory.
The default is {Config().model.model}. minilm needs no network. --json lists the sources."""


def read_encoders() -> list[dict[str, Any]]:
    """Return the entries of ``encoders.yaml`` that the installed transformers knows."""
    import yaml

    text = (resources.files("finetune.commands") / "encoders.yaml").read_text("utf-8")
    spec = find_spec("transformers")  # importing it takes seconds
    folder = Path(str(spec and spec.origin)).parent / "models"
    return [
        encoder
        for encoder in yaml.safe_load(text)
        if (folder / encoder["config"]["model_type"].replace("-", "_")).is_dir()
    ]


@click.command(epilog=EXAMPLES)
@flags.with_display
def command(*, display: flags.Display) -> None:
    """List encoders with their size, languages, license, and the memory that training needs.

    Other encoders with weights in safetensors also work: set --model to a Hub ID or a folder.
    """
    encoders = read_encoders()
    rows = [
        [
            *(encoder["name"], encoder["languages"], f"{encoder['parameters'] / 1e6:.0f}"),
            f"{encoder['max_tokens']:,}",
            *(f"{gib:.1f}" for gib in encoder["gib"].values()),
            *(encoder["license"], encoder["good_for"]),
        ]
        for encoder in encoders
    ]

    def show(_: object) -> None:
        show_table(TITLES, rows, numbers=TITLES[2:7])
        if not display.quiet:
            show_lines(*NOTES.splitlines())

    display.show({"models": encoders}, show)
