"""``finetune export``: writes the model of a run for onnxruntime."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import format_size, show_facts, show_lines
from finetune.errors import FinetuneError
from finetune.events import Info, WarningMessage, emit
from finetune.ownership import OwnFolder
from finetune.runs.folder import RunFolder, open_run_folder
from finetune.tasks.tables import format_number

if TYPE_CHECKING:
    from finetune.runs.trained import TrainedModel
    from finetune.tokenization.examples import Examples

# The order of floating-point operations explains differences up to this size.
MAX_LOGIT_DIFFERENCE = 1e-4
EXAMPLES = """\b
Examples:
  finetune export onnx runs/demo --verify
  finetune export onnx runs/demo --int8 --output-dir exported
"""


def export_onnx(
    run: str | Path,
    *,
    output_dir: str | Path | None = None,
    int8: bool = False,
    verify: bool = False,
) -> dict[str, Any]:
    """Export the model of a run to ONNX. With ``verify``, raise if the predictions differ.

    Return the folder and the files, with their sizes and how they compare with the model.

    Args:
        output_dir: Folder to write; an earlier export in it is replaced. Default: RUN/onnx.
        int8: Also write int8 weights, and compare their predictions with PyTorch.
        verify: Compare all predictions on the test split with PyTorch.
    """
    folder = open_run_folder(Path(run))
    from finetune import export
    from finetune.runs.trained import TrainedModel
    from finetune.tasks.metrics import MULTI

    path = Path(output_dir).expanduser() if output_dir else folder.onnx_folder
    output = OwnFolder(path, "onnx")
    output.check()
    export.import_runtime()
    trained = TrainedModel.load(folder, device="cpu")
    emit(Info(f"exporting {folder.path} to {path}"))
    export.write_onnx(trained.text_model, output, quantizes=int8)
    options, task = trained.config.model, trained.text_model.task
    if options.long_texts == "windows":
        size = f"windows of {options.max_length} tokens that overlap by {options.stride}"
        message = f"the run reads long texts in {size}, and the ONNX model reads one window"
        remedy = f"average the logits of all windows, as the code in {folder.card_file} does"
        emit(WarningMessage(message, remedy=remedy))
    if task.problem_type == MULTI:
        emit(Info("a text has the classes whose sigmoid reaches the threshold in config.json"))
    trained = replace(trained, predictor=replace(trained.predictor, precision="fp32"))
    examples = _load_test_examples(folder, trained) if verify or int8 else None
    files: list[dict[str, Any]] = []
    for name, is_compared in ((export.MODEL_FILE, verify), (export.QUANTIZED_FILE, int8)):
        file, verification = output.path / name, None
        if is_compared and examples is not None:
            emit(Info(f"comparing {name} with PyTorch on {len(examples.lengths):,} test rows"))
            verification = export.verify(trained, export.OnnxModel(file), examples)
        if file.is_file():
            size_bytes = file.stat().st_size
            files.append(
                {"path": str(file), "size_bytes": size_bytes, "verification": verification}
            )
    if compared := files[0]["verification"]:
        labels, difference = compared["same_labels"], compared["largest_logit_difference"]
        if labels not in (None, 1) or difference > MAX_LOGIT_DIFFERENCE:
            differ = "" if labels is None else f"{1 - labels:.1%} of the labels differ, and "
            raise FinetuneError(
                f"{export.MODEL_FILE} does not predict like the model of the run: {differ}"
                f"logits differ by up to {difference:.1e}",
                remedy=f"use {folder.model_folder} with transformers, and report this as a bug",
            )
    return {"folder": str(output.path), "files": files}


def _load_test_examples(folder: RunFolder, trained: "TrainedModel") -> "Examples":
    from finetune.runs.evaluate import load_split
    from finetune.runs.manifest import Manifest
    from finetune.runs.prepare import encode_rows

    # A run without labels may have only the descriptions of its classes.
    split = "test" if "test" in Manifest.read(folder).splits else "train"
    rows, text_model = load_split(folder, split), trained.text_model
    with_plain_mask = replace(text_model.structure, takes_4d_mask=False)
    text_model = replace(text_model, structure=with_plain_mask)
    return encode_rows(rows, "test", text_model, config=trained.config)


@click.group(epilog=EXAMPLES)
def command() -> None:
    """Export the model of a run to another format."""


@command.command("onnx", epilog=EXAMPLES, short_help="Export to ONNX, for onnxruntime and others.")
@flags.run_argument
@flags.options_of(export_onnx)
@flags.with_display
def onnx_command(*, display: flags.Display, **options: Any) -> None:
    """Export the model in the run folder RUN to ONNX, for onnxruntime and others.

    In a checkout, pip install '.[onnx]' installs the packages that this needs.
    """
    display.run(export_onnx, _show_onnx, **options)


def _show_onnx(exported: Mapping[str, Any]) -> None:
    for file in exported["files"]:
        show_lines(f"{file['path']}, {format_size(file['size_bytes'])}")
        if compared := file["verification"]:
            same, metric = compared["same_labels"], next(iter(compared["metrics"]))
            difference = f"{compared['largest_logit_difference']:.1e}"
            if same is None:
                facts = {"largest difference": f"{difference} of the largest value"}
            else:
                labels = f"{same:.1%} of {compared['samples']:,}"
                facts = {"same labels as PyTorch": labels, "largest difference": difference}
            values = (compared[name][metric] for name in ("metrics", "pytorch_metrics"))
            show_facts(facts | {metric: ", PyTorch ".join(map(format_number, values))})
