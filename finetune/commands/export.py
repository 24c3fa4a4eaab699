"""``finetune export``: writes the model of a run for onnxruntime, or for use without PyTorch."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from finetune.commands import flags
from finetune.commands.console import format_size, show_facts, show_lines
from finetune.errors import FinetuneError
from finetune.events import Info, WarningMessage, emit
from finetune.files import read_bytes, write_sums
from finetune.ownership import OwnFolder, check_output_file
from finetune.runs.folder import BundleFolder, RunFolder, open_run_folder
from finetune.tasks.tables import format_number

if TYPE_CHECKING:
    import pyarrow

    from finetune.runs.trained import TrainedModel

# The order of floating-point operations explains differences up to this size.
MAX_LOGIT_DIFFERENCE = 1e-4
# The int8 model is dropped if the main metric, such as accuracy, falls by more than this.
MAX_INT8_LOSS = 0.005
# Rows with which a bundle is checked.
MAX_BUNDLE_ROWS = 1_000
# Starts the model card of a bundle, which describes the use of the model with transformers.
USE_OF_BUNDLE = """\
## Use

After `pip install -r requirements.txt`, `python classify.py "a text"` classifies a text, and
`python classify.py texts.txt` the lines of a file. In Python:

```python
from classify import Classifier

Classifier().predict(["Put a text here"])
```

The folder `model` of the run needs PyTorch:
"""
EXAMPLES = """\b
Examples:
  finetune export onnx runs/demo --verify
  finetune export onnx runs/demo --int8 --output-dir exported
  finetune export bundle runs/demo
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
        int8: Also write int8 weights, unless accuracy falls by more than 0.5 points on the
            validation split.
        verify: Compare all predictions on the test split with PyTorch.
    """
    folder = open_run_folder(Path(run))
    from finetune import export
    from finetune.runs.runtime import note_verified
    from finetune.runs.trained import TrainedModel
    from finetune.tasks.metrics import MULTI

    path = Path(output_dir).expanduser() if output_dir else folder.onnx_folder
    output = OwnFolder(path, "onnx")
    output.check()
    export.import_runtime()
    trained = TrainedModel.load(folder, device="cpu")
    emit(Info(f"exporting {folder.path} to {path}"))
    export.write_onnx(trained.text_model, output)
    options, task = trained.config.model, trained.text_model.task
    if options.long_texts == "windows":
        size = f"windows of {options.max_length} tokens that overlap by {options.stride}"
        message = f"the run reads long texts in {size}, and the ONNX model reads one window"
        remedy = f"average the logits of all windows, as the code in {folder.card_file} does"
        emit(WarningMessage(message, remedy=remedy))
    if task.problem_type == MULTI:
        emit(Info("a text has the classes whose sigmoid reaches the threshold in config.json"))
    verification, file = None, output.path / export.MODEL_FILE
    if verify:
        verification = _compare_with_pytorch(folder, trained, file)
    files = [_describe(file, verification)]
    if int8:
        files += _write_int8(folder, trained, output)
    if verify:
        note_verified(output.path, folder, trained.text_model.tokenizer)
    write_sums(output.path)
    return {"folder": str(output.path), "files": files}


def _describe(file: Path, verification: Mapping[str, Any] | None) -> dict[str, Any]:
    size = file.stat().st_size
    return {"path": str(file), "size_bytes": size, "verification": verification}


def _compare_with_pytorch(
    folder: RunFolder, trained: "TrainedModel", file: Path
) -> Mapping[str, Any]:
    from finetune import export

    rows = _load_rows(folder, "test")
    pytorch, exported = export.predictors(trained, file)
    compared = export.compare(pytorch, exported, rows)
    labels, difference = compared["same_labels"], compared["largest_logit_difference"]
    if labels not in (None, 1) or difference > MAX_LOGIT_DIFFERENCE:
        differ = "" if labels is None else f"{1 - labels:.1%} of the labels differ, and "
        raise FinetuneError(
            f"{file.name} does not predict like the model of the run: {differ}"
            f"logits differ by up to {difference:.1e}",
            remedy=f"use {folder.model_folder} with transformers, and report this as a bug",
        )
    return compared


def _write_int8(
    folder: RunFolder, trained: "TrainedModel", output: OwnFolder
) -> list[dict[str, Any]]:
    """Write the int8 model and return its description, or warn if it is not accurate."""
    from finetune import export

    rows, compared = _load_rows(folder, "validation", "test"), dict[str, Any]()

    def is_accurate(file: Path) -> bool:
        _, fp32, in_int8 = export.predictors(trained, output.path / export.MODEL_FILE, file)
        compared.update(export.compare(fp32, in_int8, rows))
        metric, value = next(iter(compared["metrics"].items()))
        before = compared["reference_metrics"][metric]
        if value >= before - MAX_INT8_LOSS:
            return True
        words, count = metric.replace("_", " "), f"{compared['samples']:,} rows"
        change = f"{words} falls from {format_number(before)} to {format_number(value)} on {count}"
        message = f"{export.QUANTIZED_FILE} is not written, because with int8 weights {change}"
        emit(WarningMessage(message, remedy=f"use {export.MODEL_FILE}"))
        return False

    export.write_int8(output, is_accurate)
    file = output.path / export.QUANTIZED_FILE
    return [_describe(file, compared)] if file.is_file() else []


def _load_rows(folder: RunFolder, *splits: str) -> "pyarrow.Table":
    """Return the rows of the first of some splits that the run has, or its training rows."""
    from finetune.runs.evaluate import load_split
    from finetune.runs.manifest import Manifest

    # A run without labels may have only the descriptions of its classes.
    present = Manifest.read(folder).splits
    split = next((name for name in splits if name in present), "train")
    rows = load_split(folder, split)
    emit(Info(f"comparing predictions on {len(rows):,} {split} rows"))
    return rows


def export_bundle(
    run: str | Path,
    *,
    output_dir: str | Path | None = None,
    zip: bool = False,  # noqa: A002
) -> dict[str, Any]:
    """Export the model of a run to a folder that predicts without PyTorch and this package.

    Return the folder, its size, and how its predictions compare with the run.

    Args:
        output_dir: Folder to write; an earlier bundle in it is replaced. Default: RUN/bundle.
        zip: Also write the folder as one file, with the suffix .zip.
    """
    folder = open_run_folder(Path(run))
    from finetune import export
    from finetune.runs.trained import TrainedModel

    path = Path(output_dir).expanduser() if output_dir else folder.bundle_folder
    output, archive = BundleFolder(path), path.with_name(f"{path.name}.zip")
    output.check()
    if zip and not output.is_ours:
        check_output_file(archive)
    export.import_runtime()
    trained = TrainedModel.load(folder, device="cpu")
    emit(Info(f"exporting {folder.path} to {path}"))
    card = read_bytes(folder.card_file).decode() if folder.card_file.is_file() else ""
    card = card.replace("## Use\n", USE_OF_BUNDLE, 1)
    rows = _texts_of_run(folder)
    verification = export.write_bundle(folder, trained, output, card=card, rows=rows)
    if zip:
        shutil.make_archive(str(path), "zip", root_dir=path.parent, base_dir=path.name)
    size = sum(file.stat().st_size for file in output.files())
    return {"folder": str(path), "size_bytes": size, "verification": verification}


def _texts_of_run(folder: RunFolder) -> list[list[str]]:
    """Return test texts of a run, or its unlabeled texts, and maybe their pairs."""
    rows = folder.read(folder.predictions_file, list)[:MAX_BUNDLE_ROWS]
    if not rows:
        from finetune.runs.evaluate import load_split

        rows = load_split(folder, "train")[:MAX_BUNDLE_ROWS].to_pylist()
    names = [name for name in ("text", "text_pair") if name in rows[0]]
    return [[row[name] for row in rows] for name in names]


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


@command.command("bundle", epilog=EXAMPLES, short_help="Export to a folder without PyTorch.")
@flags.run_argument
@flags.options_of(export_bundle)
@flags.with_display
def bundle_command(*, display: flags.Display, **options: Any) -> None:
    """Export the model in the run folder RUN to a folder that needs no PyTorch.

    It has classify.py, which needs onnxruntime, tokenizers and numpy. In a checkout, pip install
    '.[onnx]' installs the packages that the export needs.
    """
    display.run(export_bundle, _show_bundle, **options)


def _show_bundle(exported: Mapping[str, Any]) -> None:
    compared = exported["verification"]
    same, samples = compared["same_labels"], compared["samples"]
    show_lines(f"{exported['folder']}, {format_size(exported['size_bytes'])}")
    difference = format_number(compared["largest_difference"], digits=2)
    show_facts(
        {"same labels as the run": f"{same:.1%} of {samples:,}", "largest difference": difference}
    )
    show_lines(f'Next: python {quote(exported["folder"])}/classify.py "a text"')


def _show_onnx(exported: Mapping[str, Any]) -> None:
    for file, reference in zip(exported["files"], ("PyTorch", "fp32"), strict=False):
        show_lines(f"{file['path']}, {format_size(file['size_bytes'])}")
        if compared := file["verification"]:
            same, metric = compared["same_labels"], next(iter(compared["metrics"]))
            difference = f"{compared['largest_logit_difference']:.1e}"
            facts = {"largest difference": f"{difference} of the largest value"}
            if same is not None:
                change = compared["largest_probability_difference"]
                facts = {
                    f"same labels as {reference}": f"{same:.1%} of {compared['samples']:,}",
                    "largest difference": difference,
                    "largest change of a probability": format_number(change, digits=2),
                }
            values = (compared[name][metric] for name in ("metrics", "reference_metrics"))
            facts[metric] = f", {reference} ".join(map(format_number, values))
            facts["speed"] = f"{format_number(compared['speed'], digits=2)} times {reference}"
            show_facts(facts)
            if reference == "fp32" and compared["speed"] <= 1:
                show_lines("int8 is not faster than fp32 on this CPU")
