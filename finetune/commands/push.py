"""``finetune push``: uploads the model of a finished run to the Hugging Face Hub."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

import finetune
from finetune.commands import flags
from finetune.commands.console import format_size, show_lines, show_table
from finetune.errors import NotARunError, UsageError
from finetune.events import Info, emit
from finetune.files import intact
from finetune.runs.folder import RunFolder, open_run_folder

EXAMPLES = """\b
Examples:
  finetune push runs/demo ada/demo --dry-run     list what would be uploaded
  finetune push runs/demo ada/demo --public
"""


def push(
    run: str | Path,
    repository: str,
    *,
    public: bool = False,
    revision: str | None = None,
    report: bool = True,
    adapter: bool = False,
    allow_private_data: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Upload the model of a finished run, its card and its report.

    Return the URL, the file sizes in bytes and the commit, which is None in a dry run.

    Args:
        public: Make the repository public.
        revision: Branch to upload to. Default: main.
        report: Upload ``report.html``, which shows misclassified texts.
        adapter: Upload the LoRA adapter instead of the model.
        allow_private_data: Upload the report even if the data was marked with --private-data.
        dry_run: List the files and their sizes without uploading them. This needs no network.
    """
    from finetune.hub import page_of_upload, upload_model

    url = page_of_upload(repository, revision=revision)
    folder = open_run_folder(Path(run))
    paths = _find_files(folder, adapter=adapter)
    if report and folder.report_file.is_file():
        if folder.read_config().data.private_data and not allow_private_data:
            raise UsageError(
                f"the data of {folder.path} is marked as private, and its report shows texts",
                remedy="add --without-report, or --allow-private-data to upload the report",
            )
        paths[folder.report_file.name] = folder.report_file
    files = {name: path.stat().st_size for name, path in paths.items()}
    if dry_run:
        return {"url": url, "public": public, "files": files, "commit": None}
    size = format_size(sum(files.values()))
    emit(Info(f"uploading {len(files)} files, {size}, to {repository}"))
    message = f"Upload {Path(run).resolve().name} (finetune {finetune.__version__})"
    commit, is_public = upload_model(
        paths, repository, public=public, revision=revision, message=message
    )
    return {"url": url, "public": is_public, "files": files, "commit": commit}


def _find_files(folder: RunFolder, *, adapter: bool) -> dict[str, Path]:
    """Return the files of the model or of its LoRA adapter, by name."""
    model_folder = folder.adapter_folder if adapter else folder.model_folder
    if not folder.has_finished:
        raise NotARunError(
            f"the run in {folder.path} has not finished",
            remedy=f"finish it with {folder.resume_command}",
        )
    if not any(model_folder.glob("*.safetensors")):
        remedy = "drop --adapter" if adapter else f"repeat the run with finetune run {folder.path}"
        raise UsageError(f"{model_folder} has no weights", remedy=remedy)
    paths = sorted(model_folder.iterdir())
    return {path.name: intact(path) for path in paths if path.is_file() and path.name[0] != "."}


@click.command(epilog=EXAMPLES)
@flags.run_argument
@click.argument("repository", metavar="OWNER/NAME")
@click.option(
    "--without-report", "report", flag_value=False, default=True, help="Leave out report.html."
)
@flags.options_of(push, "report")
@flags.with_display
def command(*, display: flags.Display, **options: Any) -> None:
    """Upload the model in the run folder RUN to the Hugging Face Hub, as OWNER/NAME.

    The tokenizer, the model card and the report are uploaded as well. The command needs a token:
    run `hf auth login`, or set HF_TOKEN.
    """
    display.run(push, _show, **options)


def _show(pushed: Mapping[str, Any]) -> None:
    rows = [(name, format_size(size_bytes)) for name, size_bytes in pushed["files"].items()]
    show_table(("file", "size"), rows, numbers=("size",))
    done = "uploaded to" if pushed["commit"] else "would be uploaded to"
    show_lines(f"{done} {pushed['url']}, {'public' if pushed['public'] else 'private'}")
