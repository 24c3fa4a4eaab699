"""``finetune export``: writes the model of a run for onnxruntime."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import format_size, show_facts, show_lines
from finetune.errors import FinetuneError
from finetune.events import Info, emit
from finetune.ownership import OwnFolder
from finetune.runs.folder import RunFolder, open_run_folder

if TYPE_CHECKING:
    from finetune.export.onnx import Verification
    from finetune.runs.trained import TrainedModel
    from finetune.tokenization.examples import Examples

# Differences that the order of floating-point operations explains.
MAX_LOGIT_DIFFERENCE = 1e-4
EXAMPLES = """\b
Examples:
  finetune export onnx runs/demo --verify
  finetune export onnx runs/demo --int8 --output-dir exported
"""


@dataclass(frozen=True)
class ExportedFile:
    """An ONNX file and, if it was verified, how it compares with the model of the run."""

    path: str
    size_bytes: int
    verification: "Verification | None"


@dataclass(frozen=True)
class OnnxExport:
    """A folder with ONNX files, the config of the model and its tokenizer."""

    folder: str
    files: Sequence[ExportedFile]


def export_onnx(
    run: str | Path,
    *,
    output_dir: str | Path | None = None,
    int8: bool = False,
    verify: bool = False,
) -> OnnxExport:
    """Export the model of a run to ONNX, or raise if the export predicts something else.

    Args:
        output_dir: Folder to write; an earlier export in it is replaced. Default: RUN/onnx.
        int8: Also write int8 weights, and compare their predictions with PyTorch.
        verify: Compare all predictions on the test split with PyTorch.
    """
    folder, own, trained = _prepare(Path(run), output_dir)
    from finetune.export import onnx

    onnx.write_onnx(trained.text_model, own, quantizes=int8)
    trained = replace(trained, predictor=replace(trained.predictor, precision="fp32"))
    examples = _load_test_examples(folder, trained) if verify or int8 else None
    files = []
    for name, is_compared in ((onnx.MODEL_FILE, verify), (onnx.QUANTIZED_FILE, int8)):
        file, verification = own.path / name, None
        if is_compared and examples is not None:
            emit(Info(f"comparing {name} with PyTorch on {len(examples.lengths):,} test rows"))
            verification = onnx.verify(trained, onnx.OnnxModel(file), examples)
        if file.is_file():
            files.append(ExportedFile(str(file), file.stat().st_size, verification))
    if found := files[0].verification:
        labels, difference = found.same_labels, found.largest_logit_difference
        if labels < 1 or difference > MAX_LOGIT_DIFFERENCE:
            raise FinetuneError(
                f"{files[0].path} does not predict like the model of the run: {1 - labels:.1%} of "
                f"the labels differ, and logits differ by up to {difference:.1e}",
                remedy="use the model of the run with transformers, and report this",
            )
    return OnnxExport(str(own.path), files)


def _prepare(
    run: Path, output_dir: str | Path | None
) -> "tuple[RunFolder, OwnFolder, TrainedModel]":
    """Return a run, the folder to export to (new, empty or an earlier export), and the model."""
    folder = open_run_folder(run)
    from finetune.export.onnx import import_runtime
    from finetune.runs.trained import TrainedModel

    path = Path(output_dir).expanduser() if output_dir else folder.onnx_folder
    own = OwnFolder(path, "onnx")
    own.check()
    import_runtime()
    trained = TrainedModel.load(folder, device="cpu")
    emit(Info(f"exporting {folder.path} to {path}"))
    return folder, own, trained


def _load_test_examples(folder: RunFolder, trained: "TrainedModel") -> "Examples":
    from finetune.runs.encoding import encode_rows
    from finetune.runs.evaluate import load_split

    rows, text_model = load_split(folder, "test"), trained.text_model
    with_plain_mask = replace(text_model.structure, takes_4d_mask=False)
    text_model = replace(text_model, structure=with_plain_mask)
    return encode_rows(rows, "test", text_model, config=trained.config)


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Export the model of a run for another runtime."""


@command.command("onnx", epilog=EXAMPLES, short_help="Export to ONNX, for onnxruntime and others.")
@flags.run_argument
@flags.options_of(export_onnx)
@flags.with_display
def onnx_command(*, display: flags.Display, **options: Any) -> None:
    """Export the model in the run folder RUN to ONNX, for onnxruntime and others.

    In a checkout, pip install '.[onnx]' installs what this needs.
    """
    display.run(export_onnx, _show_onnx, **options)


def _show_onnx(exported: OnnxExport) -> None:
    for file in exported.files:
        show_lines(f"{file.path}, {format_size(file.size_bytes)}")
        if found := file.verification:
            metric = next(iter(found.metrics))
            show_facts(
                {
                    "same labels as PyTorch": f"{found.same_labels:.1%} of {found.samples:,}",
                    "largest difference": f"{found.largest_logit_difference:.1e}",
                    metric: f"{found.metrics[metric]:.4f}, "
                    f"PyTorch {found.pytorch_metrics[metric]:.4f}",
                }
            )
