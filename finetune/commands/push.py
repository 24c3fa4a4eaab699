"""``finetune push``."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

import finetune
from finetune.commands.console import format_size, show_json, show_lines, show_table
from finetune.commands.options import output_options
from finetune.commands.progress import showing
from finetune.errors import NotARun, UsageError
from finetune.events import Emit, Info, WarningMessage, ignore
from finetune.runs.folder import RunFolder, open_run_folder

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class PushedFile:
    """A file of a repository.

    Args:
        name: Its path there.
        size_bytes: Of the file.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Push:
    """What is on the Hub, or in a dry run would be.

    Args:
        url: The page that shows the files.
        public: Whether everybody may see them.
        files: As uploaded.
        commit: That they are of; None in a dry run.
    """

    url: str
    public: bool
    files: Sequence[PushedFile]
    commit: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what ``finetune push --json`` prints."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class Upload:
    """What ``finetune push`` is given.

    Args:
        run: The run folder.
        repository: ``OWNER/NAME`` on the Hub; made if there is none.
        public: Whether everybody may see it.
        revision: A branch in place of ``main``.
        report: Whether ``report.html`` is among the files.
        allow_private_data: Upload it although the run's data are marked as private.
    """

    run: str | Path
    repository: str
    public: bool = False
    revision: str | None = None
    report: bool = True
    allow_private_data: bool = False

    def find_files(self) -> Mapping[str, Path]:
        """Return the files to upload, by their paths in the repository.

        Raises:
            NotARun: If the run has not finished.
            UsageError: If its data are private.
        """
        folder = open_run_folder(Path(self.run))
        if not folder.has_finished:
            raise NotARun(
                f"the run in {folder.path} has not finished",
                remedy="finish it with --resume-from-checkpoint",
            )
        paths = sorted(folder.model_folder.iterdir())
        if self.report and folder.report_file.is_file():
            _check_data_may_go(folder, allow_private_data=self.allow_private_data)
            paths.append(folder.report_file)
        return {path.name: path for path in paths if path.is_file() and path.name[0] != "."}


def push(upload: Upload, *, emit: Emit = ignore) -> Push:
    """Upload a finished run's model, its card and its report, as ``finetune push`` does.

    Raises:
        NotARun: If the run has not finished.
        UsageError: If its data are private, there is no token, or the token may not write.
        HubNotReachable: If the Hub does not answer.
    """
    paths, repository, public = upload.find_files(), upload.repository, upload.public
    files = _describe(paths)
    from finetune.hub import upload_model

    size_mib = sum(file.size_bytes for file in files) / 2**20
    emit(Info(f"uploading {len(files)} files, {size_mib:,.1f} MiB, to {repository}"))
    message = f"Upload {Path(upload.run).resolve().name} (finetune {finetune.__version__})"
    done = upload_model(paths, repository, public=public, revision=upload.revision, message=message)
    if public and not done.is_public:
        message = f"{repository} was private before, and still is"
        emit(WarningMessage(message, remedy=f"its settings are at {done.url}/settings"))
    return Push(done.url, done.is_public, files, done.commit)


def dry_run(upload: Upload) -> Push:
    """Return what :func:`push` would upload; the network is not used."""
    from finetune.hub import check_repository_name, page_of_upload

    check_repository_name(upload.repository)
    url = page_of_upload(upload.repository, revision=upload.revision)
    return Push(url, upload.public, _describe(upload.find_files()))


def _check_data_may_go(folder: RunFolder, *, allow_private_data: bool) -> None:
    if folder.read_config().data.private_data and not allow_private_data:
        raise UsageError(
            f"the data of {folder.path} are marked as private, and its report shows texts",
            remedy="leave the report out with --without-report, or give --allow-private-data",
        )


def _describe(paths: Mapping[str, Path]) -> list[PushedFile]:
    return [PushedFile(name, path.stat().st_size) for name, path in paths.items()]


EXAMPLES = """\b
Examples:
  finetune push runs/demo ada/demo --dry-run     list what would be uploaded
  finetune push runs/demo ada/demo --public
"""


@click.command(epilog=EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="Let everybody see it.  [default: private]")
@click.option("--revision", metavar="BRANCH", help="Branch to upload to.  [default: main]")
@click.option(
    "--without-report",
    "report",
    flag_value=False,
    default=True,
    help="Leave out report.html, which shows texts that the model gets wrong.",
)
@click.option(
    "--allow-private-data",
    is_flag=True,
    help="Upload the report of a run whose data are marked with --private-data, too.",
)
@click.option(
    "--dry-run", "is_dry_run", is_flag=True, help="List the files and their sizes, and stop."
)
@output_options
def command(
    run: Path,
    repository: str,
    *,
    is_dry_run: bool,
    as_json: bool,
    quiet: bool,
    no_progress: bool,
    **options: Any,
) -> None:
    """Upload the model of the run folder RUN to the Hugging Face Hub, as OWNER/NAME.

    With it go its tokenizer, its card and its report. A token is needed: run `hf auth login`, or
    set HF_TOKEN.
    """
    with showing(quiet=quiet, no_progress=no_progress) as emit:
        upload = Upload(run=run, repository=repository, **options)
        found = dry_run(upload) if is_dry_run else push(upload, emit=emit)
    if as_json:
        show_json(found.to_json())
        return
    rows = [(file.name, format_size(file.size_bytes)) for file in found.files]
    show_table(("file", "size"), rows, numbers=("size",))
    done = "would be uploaded to" if is_dry_run else "uploaded to"
    show_lines(f"{done} {found.url}, {'public' if found.public else 'private'}")
