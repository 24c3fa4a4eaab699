"""``finetune models``: lists pretrained encoders."""

from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from finetune.commands import flags
from finetune.commands.console import show_lines, show_table
from finetune.config.schema import Config
from finetune.runs.guess import MAX_ROWS_PER_CLASS

EXAMPLES = """\b
Examples:
  finetune models
  finetune run reviews.csv --model answerdotai/ModernBERT-base
"""
TITLES = (
    *("model", "default for", "languages", "M", "tokens", "all", "last 2", "head"),
    *("license", "good for"),
)
NOTES = f"""\
M: millions of parameters. tokens: maximum tokens per text. all, last 2 and head: GiB of tensors for
training these layers on 32 texts of 128 tokens in fp32; find-batch measures real memory.
default for: what finetune run chooses for a table in one of these languages, with few rows (at most
{MAX_ROWS_PER_CLASS} per class on average) or many. Without a table, it is {Config().model.model}.
minilm is sentence-transformers/all-MiniLM-L6-v2, which the offline extra includes. The fine-tuned
accuracy of the others was not measured in this project. --json lists the sources."""


def read_encoders() -> list[dict[str, Any]]:
    """Return the entries of ``encoders.yaml`` that the installed transformers supports."""
    import yaml

    text = (resources.files("finetune.commands") / "encoders.yaml").read_text("utf-8")
    spec = find_spec("transformers")  # importing it takes seconds
    folder = Path(str(spec and spec.origin)).parent / "models"
    return [
        {"default_for": None, **encoder}
        for encoder in yaml.safe_load(text)
        if (folder / encoder["config"]["model_type"].replace("-", "_")).is_dir()
    ]


@click.command(epilog=EXAMPLES)
@flags.with_display
def command(*, display: flags.Display) -> None:
    """List encoders with their size, languages, license, and memory for training.

    Other encoders with safetensors weights also work: set --model to a Hub ID or a folder.
    """
    encoders = read_encoders()
    rows = [
        [
            *(encoder["name"], encoder["default_for"] or "", encoder["languages"]),
            *(f"{encoder['parameters'] / 1e6:.0f}", f"{encoder['max_tokens']:,}"),
            *(f"{gib:.1f}" for gib in encoder["gib"].values()),
            *(encoder["license"], encoder["good_for"]),
        ]
        for encoder in encoders
    ]

    def show(_: object) -> None:
        show_table(TITLES, rows, numbers=TITLES[3:8])
        if not display.quiet:
            show_lines(*NOTES.splitlines())

    display.show({"models": encoders}, show)
