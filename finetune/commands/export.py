"""``finetune export``."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands.console import format_size, show_json, show_lines, show_table
from finetune.commands.options import output_options
from finetune.commands.progress import showing
from finetune.errors import FinetuneError
from finetune.events import Emit, Info, ignore
from finetune.runs.folder import open_run_folder

if TYPE_CHECKING:
    from finetune.export.coreml import Program
    from finetune.export.verify import Verification
    from finetune.runs.folder import RunFolder
    from finetune.runs.trained import TrainedModel


SCHEMA_VERSION = 1
# What the same arithmetic in another order may change.
MAX_LOGIT_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class ExportedFile:
    """A model in a file of its own.

    Args:
        path: Where it is.
        size_bytes: Of the file.
        verification: How it compares with the run's model; None where that was not asked for.
    """

    path: str
    size_bytes: int
    verification: "Verification | None"


@dataclass(frozen=True)
class CoreMLExport:
    """A Core ML program, and what was checked of it: all but its answers, which need a Mac."""

    path: str
    size_bytes: int
    program: "Program"

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune export coreml --json`` prints."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


@dataclass(frozen=True)
class Export:
    """What an export has written: a folder with config and tokenizer beside the model's files."""

    folder: str
    files: Sequence[ExportedFile]

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune export --json`` prints."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


def export_onnx(
    run: str | Path,
    *,
    output_dir: str | Path | None = None,
    int8: bool = False,
    verify: bool = False,
    emit: Emit = ignore,
) -> Export:
    """Write a run's model as ONNX, as ``finetune export onnx`` does.

    Args:
        run: The run folder.
        output_dir: Where; by default the folder ``onnx`` of the run. An earlier export is replaced.
        int8: Write a second file whose matrices are int8, and compare it with the run's model.
        verify: Compare the first file too.
        emit: Is called with the events of ``finetune.events``.

    Raises:
        UsageError: If the packages of the extra ``onnx`` are missing, or the output folder holds
            something else.
        FinetuneError: If the exported model answers otherwise than the run's.
    """
    folder = open_run_folder(Path(run))
    from finetune.export.onnx import MODEL_FILE, QUANTIZED_FILE, import_runtime, write_onnx
    from finetune.runs.trained import TrainedModel

    import_runtime()
    target = Path(output_dir) if output_dir else folder.onnx_folder
    trained = TrainedModel.load(folder, device="cpu", emit=emit)
    emit(Info(f"exporting {folder.path} to {target}"))
    write_onnx(trained.text_model, target, quantizes=int8)
    written = {MODEL_FILE: verify} | ({QUANTIZED_FILE: True} if int8 else {})
    compared = [target / name for name, is_compared in written.items() if is_compared]
    found = _verify(folder, trained, compared, emit=emit)
    files = [
        ExportedFile(str(target / name), (target / name).stat().st_size, found.get(name))
        for name in written
    ]
    _refuse_difference(found.get(MODEL_FILE), target / MODEL_FILE)
    return Export(str(target), files)


def export_coreml(
    run: str | Path, *, output_dir: str | Path | None = None, emit: Emit = ignore
) -> CoreMLExport:
    """Write a run's model as a Core ML program, as ``finetune export coreml`` does.

    Args:
        run: The run folder.
        output_dir: Where; by default the folder ``coreml`` of the run. An earlier export is
            replaced.
        emit: Is called with the events of ``finetune.events``.

    Raises:
        UsageError: If the package of the extra ``coreml`` is missing, or the output folder holds
            something else.
        ModelUnsupported: If coremltools can't convert the model.
        FinetuneError: If what was written is not the run's model.
    """
    folder = open_run_folder(Path(run))
    from finetune.export.coreml import MODEL_FILE, import_converter, read_program, write_coreml
    from finetune.runs.trained import TrainedModel

    import_converter()
    target = Path(output_dir) if output_dir else folder.coreml_folder
    trained = TrainedModel.load(folder, device="cpu", emit=emit)
    emit(Info(f"exporting {folder.path} to {target}"))
    write_coreml(trained.text_model, target, max_length=trained.config.model.max_length)
    file = target / MODEL_FILE
    emit(Info("reading the program"))
    program = read_program(file, trained.text_model)
    size_bytes = sum(one.stat().st_size for one in file.rglob("*") if one.is_file())
    return CoreMLExport(str(file), size_bytes, program)


def _verify(
    folder: "RunFolder", trained: "TrainedModel", files: Sequence[Path], *, emit: Emit
) -> "dict[str, Verification]":
    """Compare files with a run's model on its test split; return the results by name."""
    if not files:
        return {}
    from finetune.export.onnx import OnnxModel
    from finetune.export.verify import verify
    from finetune.runs.encoding import encode_rows
    from finetune.runs.evaluate import load_split

    rows = load_split(folder, "test", emit=emit)
    text_model = trained.text_model
    plain = replace(text_model, structure=replace(text_model.structure, takes_4d_mask=False))
    examples = encode_rows(rows, "test", plain, config=trained.config, emit=emit)
    trained = replace(trained, predictor=replace(trained.predictor, precision="fp32"))
    found = {}
    for file in files:
        emit(Info(f"comparing {file.name} with PyTorch on {len(rows):,} test rows"))
        found[file.name] = verify(trained, OnnxModel(file), examples)
    return found


def _refuse_difference(found: "Verification | None", file: Path) -> None:
    if found is None:
        return
    if found.same_labels < 1 or found.largest_logit_difference > MAX_LOGIT_DIFFERENCE:
        raise FinetuneError(
            f"{file} does not answer as the run's model: {1 - found.same_labels:.1%} of the labels "
            f"differ, logits by up to {found.largest_logit_difference:.1e}",
            remedy="use the run's model with transformers, and report this",
        )


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
