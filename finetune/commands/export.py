"""``finetune export``."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from finetune.commands.console import format_size, show_json, show_lines, show_table
from finetune.commands.options import output_options
from finetune.commands.progress import showing

if TYPE_CHECKING:
    from finetune.api.export import Export, ExportedFile

EXAMPLES = """\b
Examples:
  finetune export onnx runs/demo --verify
  finetune export onnx runs/demo --int8 --output-dir exported
  finetune export coreml runs/demo
"""
COLUMNS = ("labels as PyTorch's", "largest difference", "metric", "PyTorch's", "ms/text", "PyTorch")


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Write a run's model for another runtime."""


@command.command(epilog=EXAMPLES, short_help="As ONNX, for onnxruntime and others.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="Folder to write; an earlier export there is replaced.  [default: RUN/onnx]",
)
@click.option("--int8", is_flag=True, help="Also write int8 weights, and compare the answers.")
@click.option(
    "--verify", is_flag=True, help="Compare all answers to the test split with PyTorch's."
)
@output_options
def onnx(
    run: Path, *, output_dir: Path | None, int8: bool, verify: bool, as_json: bool, **output: bool
) -> None:
    """Write the model of the run folder RUN as ONNX, for onnxruntime and others.

    Needs pip install 'finetune-mps[onnx]'.
    """
    with showing(**output) as emit:
        from finetune.api.export import export_onnx

        found = export_onnx(run, output_dir=output_dir, int8=int8, verify=verify, emit=emit)
    if as_json:
        show_json(found.to_json())
    else:
        _show(found)


@command.command(epilog=EXAMPLES, short_help="As a Core ML program, for a Mac or an iPhone.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    help="Folder to write; an earlier export there is replaced.  [default: RUN/coreml]",
)
@output_options
def coreml(run: Path, *, output_dir: Path | None, as_json: bool, **output: bool) -> None:
    """Write the model of the run folder RUN as a Core ML program, for apps on a Mac or an iPhone.

    Needs pip install 'finetune-mps[coreml]', on a Mac or on Linux.
    """
    with showing(**output) as emit:
        from finetune.api.export import export_coreml

        found = export_coreml(run, output_dir=output_dir, emit=emit)
    if as_json:
        show_json(found.to_json())
        return
    program = found.program
    folded = f", {' and '.join(program.folded)} folded into constants" * bool(program.folded)
    show_lines(
        f"{found.path}, {format_size(found.size_bytes)}",
        f"checked: coremltools reads {program.operations:,} operations that take "
        f"{' and '.join(program.inputs)} of {program.shortest} to {program.longest} tokens; "
        f"{program.parameters:,} parameters of the model are in it, in fp16{folded}",
        "not checked: its answers, which only a Mac computes",
    )


def _show(found: "Export") -> None:
    compared = [one for one in found.files if one.verification]
    if compared:
        columns = ("file", "size", *COLUMNS)
        show_table(columns, map(_row, compared), numbers=columns[1:])
    for file in found.files:
        show_lines(f"{file.path}, {format_size(file.size_bytes)}")


def _row(file: "ExportedFile") -> tuple[str, ...]:
    found = file.verification
    assert found is not None
    name = next(iter(found.metrics))
    return (
        Path(file.path).name,
        format_size(file.size_bytes),
        f"{found.same_labels:.1%}",
        f"{found.largest_logit_difference:.1e}",
        f"{name} {found.metrics[name]:.4f}",
        f"{found.pytorch_metrics[name]:.4f}",
        f"{found.milliseconds_per_text:.1f}",
        f"{found.pytorch_milliseconds_per_text:.1f}",
    )
