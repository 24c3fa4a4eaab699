"""Fetch models and data from the Hugging Face Hub and the web.

No other module touches the network. What was fetched once is served from the cache when the Hub
does not answer or ``HF_HUB_OFFLINE`` is set. ``huggingface_hub`` does the transfers and honours
its variables: ``HF_ENDPOINT``, ``HF_TOKEN``, ``HF_HOME``, ``HF_HUB_ETAG_TIMEOUT``,
``HF_HUB_DOWNLOAD_TIMEOUT``. What it leaves out is done here: a limit to how long it waits for the
first answer, the comparison of a download with its published checksum, and errors that say what
to do.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Literal

from huggingface_hub import (
    HfApi,
    constants,
    get_session,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)

# HTTPError is httpx2's or, before huggingface_hub 2, httpx's.
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from finetune.errors import (
    ChecksumDiffers,
    DataNotFound,
    FinetuneError,
    HubNotReachable,
    ModelIsGated,
    ModelNotFound,
    ModelUnsupported,
)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHARDS_INDEX = "model.safetensors.index.json"

Kind = Literal["model", "dataset"]


def fetch_model(repository: str, *, revision: str | None) -> Path:
    """Return a folder with a model's config, tokenizer and safetensors.

    Only files of the repository's top level are fetched, and of several formats of the weights only
    safetensors. They come last, so a cache that holds them holds everything.

    Args:
        repository: Id on the Hub, such as ``bert-base-uncased`` or ``owner/name``.
        revision: Branch, tag or commit; ``None`` for the main branch.

    Raises:
        ModelNotFound: If the Hub knows no such repository or revision.
        ModelIsGated: If the Hub wants a token that may read it.
        ModelUnsupported: If it has no config or no safetensors. No file has been fetched then.
        ChecksumDiffers: If weights arrived damaged. They are removed from the cache.
        HubNotReachable: If the Hub does not answer and the cache does not hold the model.
    """
    with _hub_errors_explained("model", repository):
        listed = _list_files("model", repository, revision=revision)
        if listed is not None:
            _refuse_unsupported(repository, names=listed)
        folder, fetch = _fetch_config_and_tokenizer(repository, listed, revision=revision)
        names = {path.name for path in folder.iterdir()} if listed is None else listed
        for name in _weight_files(folder, names=names):
            _verify(fetch(name))
    return folder


def fetch_tokenizer(repository: str, *, revision: str | None) -> Path:
    """Return a folder with a model's config and tokenizer, and no weights unless they are cached.

    Arguments and errors are those of :func:`fetch_model`.
    """
    with _hub_errors_explained("model", repository):
        listed = _list_files("model", repository, revision=revision)
        if listed is not None:
            _refuse_without_config(repository, names=listed)
        folder, _ = _fetch_config_and_tokenizer(repository, listed, revision=revision)
    return folder


def list_dataset_files(repository: str, *, revision: str | None) -> set[str]:
    """Return the paths of a dataset repository's files or, offline, of those in the cache.

    Raises:
        DataNotFound: If the Hub has no such repository or revision, or keeps it from us.
        HubNotReachable: If the Hub does not answer and the cache holds nothing of it.
    """
    with _hub_errors_explained("dataset", repository):
        names = _list_files("dataset", repository, revision=revision)
        if names is not None:
            return names
        folder = Path(
            snapshot_download(
                repository, repo_type="dataset", revision=revision, local_files_only=True
            )
        )
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def fetch_dataset_file(repository: str, path: str, *, revision: str | None) -> Path:
    """Return one file of a dataset repository; see :func:`fetch_model` for the cache.

    Args:
        repository: Id on the Hub, ``owner/name``.
        path: Path of the file inside the repository.
        revision: Branch, tag or commit; ``None`` for the main branch. A commit that is in the cache
            is not asked for again.

    Raises:
        DataNotFound: If the Hub has no such repository, revision or file, or keeps it from us.
        ChecksumDiffers: If the file arrived damaged. It is removed from the cache.
        HubNotReachable: If the Hub does not answer and the cache does not hold the file.
    """
    with _hub_errors_explained("dataset", repository):
        is_commit = re.fullmatch("[0-9a-f]{40}", revision or "") is not None
        is_cached = is_commit and isinstance(
            try_to_load_from_cache(repository, path, repo_type="dataset", revision=revision), str
        )
        is_offline = is_cached or _list_files("dataset", repository, revision=revision) is None
        local = hf_hub_download(
            repository,
            path,
            repo_type="dataset",
            revision=revision,
            local_files_only=is_offline,
        )
        return _verify(Path(local))


def fetch_file(url: str, *, sha256: str, to: Path) -> Path:
    """Download a file from the web to ``to``, unless it is there already, and return ``to``.

    The file appears under its name only when it is complete and verified.

    Args:
        url: Its address.
        sha256: The published checksum, in hexadecimal digits.
        to: Where it goes; folders are made as needed.

    Raises:
        ChecksumDiffers: If what arrived is not the published file.
        HubNotReachable: If the address does not answer, or ``HF_HUB_OFFLINE`` is set.
    """
    if to.is_file() and _file_sha256(to) == sha256:
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=to.parent) as scratch:
        unverified = Path(scratch) / to.name
        try:
            _download(url, to=unverified)
        except (HTTPError, OfflineModeIsEnabled) as error:
            raise HubNotReachable(
                f"{url} can't be downloaded: {_first_line(error)}", remedy=_way_online()
            ) from error
        if _file_sha256(unverified) != sha256:
            raise ChecksumDiffers(
                f"the file at {url} is not the published one",
                remedy="run again; if it stays so, the file was changed or a proxy answers",
            )
        os.replace(unverified, to)
    return to


def ask_hub(*, model: str, timeout_seconds: float) -> None:
    """Ask the Hub for a model's list of files, as a run does first, and forget the answer.

    The asking goes on in a thread, since the time-outs of a request leave out the search for the
    server's address, which a dead name server can draw out.

    Args:
        model: Id on the Hub; a model that it does not know is an answer too.
        timeout_seconds: How long to wait, all in all.

    Raises:
        HubNotReachable: If the Hub does not answer in time, or ``HF_HUB_OFFLINE`` is set.
        ModelIsGated: If the Hub refuses the user's token, whatever it is asked for.
    """
    failures: SimpleQueue[FinetuneError | None] = SimpleQueue()

    def ask() -> None:
        failures.put(_why_silent(model, timeout_seconds=timeout_seconds))

    Thread(target=ask, daemon=True).start()
    try:
        failure = failures.get(timeout=timeout_seconds)
    except Empty:
        failure = _not_reachable(f"no answer within {timeout_seconds:g} s")
    if failure is not None:
        raise failure


def cache_folder(name: str) -> Path:
    """Return the folder beside the Hub's cache for files from elsewhere; it may not exist yet."""
    return Path(constants.HF_ASSETS_CACHE, "finetune", name)


def _list_files(kind: Kind, repository: str, *, revision: str | None) -> set[str] | None:
    """Return the names of a repository's files, or ``None`` if the Hub does not answer.

    This comes before every download because it is the one request with a limit on its time: the
    library's own listing has none, and its ``hf_hub_download`` goes on trying for minutes.
    """
    try:
        return _ask_for_files(
            kind,
            repository,
            revision=revision,
            timeout_seconds=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except HubNotReachable:
        return None


def _ask_for_files(
    kind: Kind, repository: str, *, revision: str | None, timeout_seconds: float
) -> set[str]:
    hub = HfApi()
    ask = hub.model_info if kind == "model" else hub.dataset_info
    try:
        facts = ask(repository, revision=revision, timeout=timeout_seconds)
    except HfHubHTTPError as error:
        if error.response.status_code == 429 or error.response.status_code >= 500:
            raise _not_reachable(_first_line(error)) from error
        raise
    except json.JSONDecodeError as error:
        raise _not_reachable("another server answers, such as a hotel's network") from error
    except OfflineModeIsEnabled as error:
        raise _not_reachable("HF_HUB_OFFLINE is set") from error
    except HTTPError as error:
        raise _not_reachable(_first_line(error)) from error
    return {file.rfilename for file in facts.siblings or ()}


def _why_silent(model: str, *, timeout_seconds: float) -> FinetuneError | None:
    try:
        _ask_for_files("model", model, revision=None, timeout_seconds=timeout_seconds)
    except HubNotReachable as error:
        return error
    except RepositoryNotFoundError:
        return None  # that it has no such model only the Hub can tell
    except HfHubHTTPError as error:
        if error.response.status_code == 401:
            return _explain(error, kind="model", repository=model)
        return _not_reachable(_first_line(error))
    return None


def _not_reachable(reason: str) -> HubNotReachable:
    return HubNotReachable(
        f"the Hub at {constants.ENDPOINT} can't be reached: {reason}", remedy=_way_online()
    )


def _fetch_config_and_tokenizer(
    repository: str, listed: set[str] | None, *, revision: str | None
) -> tuple[Path, Callable[[str], Path]]:
    """Return the folder that they lie in, and the function that fetches another file of it."""
    is_offline = listed is None
    config = hf_hub_download(repository, CONFIG, revision=revision, local_files_only=is_offline)
    folder = Path(config).parent

    def fetch(name: str) -> Path:
        return Path(
            hf_hub_download(repository, name, revision=folder.name, local_files_only=is_offline)
        )

    names = {path.name for path in folder.iterdir()} if listed is None else listed
    for name in sorted(filter(_is_config_or_tokenizer, names)):
        fetch(name)
    return folder, fetch


def _refuse_without_config(repository: str, *, names: set[str]) -> None:
    if CONFIG not in names:
        raise ModelUnsupported(
            f"the model {repository!r} has no {CONFIG}",
            remedy="choose a model in the format of the transformers library",
        )


def _refuse_unsupported(repository: str, *, names: set[str]) -> None:
    _refuse_without_config(repository, names=names)
    if not names & {WEIGHTS, SHARDS_INDEX}:
        raise ModelUnsupported(
            f"the model {repository!r} has no safetensors; pickled weights are not loaded",
            remedy=f"look at {_page('model', repository)}/discussions for a converted revision and "
            "give it as --revision refs/pr/N, or choose another model",
        )


def _is_config_or_tokenizer(name: str) -> bool:
    return "/" not in name and name.endswith((".json", ".txt", ".model"))


def _weight_files(folder: Path, *, names: set[str]) -> list[str]:
    """Return the names of the files that make up the weights."""
    if SHARDS_INDEX in names and WEIGHTS not in names:
        return sorted(set(json.loads((folder / SHARDS_INDEX).read_text())["weight_map"].values()))
    return [WEIGHTS]


def _verify(path: Path) -> Path:
    """Return ``path`` if the file is what the Hub published, else remove it from the cache.

    The cache names a large file by the sha256 that the Hub told, and links to it; the library
    itself compares no more than the size. A cache without symbolic links has no such names.
    """
    blob = path.parent / path.readlink() if path.is_symlink() else path
    if re.fullmatch("[0-9a-f]{64}", blob.name) and _file_sha256(path) != blob.name:
        for damaged in (path.resolve(), blob, path):
            damaged.unlink(missing_ok=True)
        raise ChecksumDiffers(
            f"{path.name} arrived damaged from the Hub and was removed",
            remedy="run again to download it anew",
        )
    return path


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(url: str, *, to: Path) -> None:
    timeout_seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, timeout=timeout_seconds) as answer, to.open("wb") as file:
        answer.raise_for_status()
        for chunk in answer.iter_bytes():
            file.write(chunk)


@contextmanager
def _hub_errors_explained(kind: Kind, repository: str) -> Iterator[None]:
    # hf_xet, the Hub's transfer protocol, tells every failure as a bare RuntimeError.
    try:
        yield
    except (HTTPError, HFValidationError, OSError, RuntimeError) as error:
        raise _explain(error, kind=kind, repository=repository) from error


def _explain(error: Exception, *, kind: Kind, repository: str) -> FinetuneError:
    """Return our error for one of the library's."""
    what, page = f"the {kind} {repository!r}", _page(kind, repository)
    not_found = ModelNotFound if kind == "model" else DataNotFound
    refused = ModelIsGated if kind == "model" else DataNotFound
    match error:
        case LocalEntryNotFoundError():
            return HubNotReachable(
                f"{what} is not in the cache, and the Hub can't be reached", remedy=_way_online()
            )
        case GatedRepoError():
            return refused(
                f"{what} is only for users who accepted its terms",
                remedy=f"accept them at {page} and set HF_TOKEN to a token of yours",
            )
        case RepositoryNotFoundError() | HFValidationError():
            return not_found(
                f"there is no folder and on the Hub no {kind} {repository!r}",
                remedy=f"check the spelling; if {page} is private, set HF_TOKEN",
            )
        case RevisionNotFoundError():
            return not_found(
                f"{what} has no such revision", remedy=f"choose one of those at {page}/tree/main"
            )
        case RemoteEntryNotFoundError():
            return not_found(
                f"{what} lacks the file {error.response.url.path.rpartition('/')[2]}",
                remedy=f"look for it at {page}/tree/main",
            )
        case HfHubHTTPError(response=response) if response.status_code in (401, 403):
            return refused(
                f"the Hub refuses {what} to this HF_TOKEN",
                remedy="make a token that may read it at https://huggingface.co/settings/tokens",
            )
        case OSError(errno=int()):
            return FinetuneError(
                f"the cache in {constants.HF_HUB_CACHE} can't be written: {error.strerror}",
                remedy="make room there, or set HF_HOME to a folder on another disk",
            )
    return HubNotReachable(
        f"the download of {what} broke off: {_first_line(error)}",
        remedy="run again; files that are complete are not downloaded anew",
    )


def _page(kind: Kind, repository: str) -> str:
    return f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repository}"


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def _way_online() -> str:
    if constants.is_offline_mode():
        return "unset HF_HUB_OFFLINE and run again"
    return "check the network and HF_ENDPOINT and run again"
