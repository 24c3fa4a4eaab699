"""Fetch models and data from the Hugging Face Hub and the web, and upload models to the Hub.

No other module uses the network. A revision is resolved to a commit once, and all files are of that
commit. What was fetched is served from the cache when the Hub does not answer or ``HF_HUB_OFFLINE``
is set.

``huggingface_hub`` does the transfers and reads its environment variables. It lacks three things,
which are here: a limit to the wait for the first answer, the comparison of what arrived with the
published sha256, and errors that say what to do.
"""

import glob
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, Literal

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    get_session,
    get_token,
    snapshot_download,
)
from huggingface_hub import errors as hub_errors
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from finetune import errors
from finetune.errors import (
    ChecksumDiffers,
    DataNotFound,
    HubNotReachable,
    ModelUnsupported,
    UsageError,
)
from finetune.files import file_sha256, read_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHARDS_INDEX = "model.safetensors.index.json"
MAX_PAUSE_SECONDS = 10
# A repository that the token can't even see is refused, when it is to be made, as a conflict.
MAY_NOT_WRITE = {401, 403, 409}
LIMIT_WINDOW_SECONDS = 300  # of the Hub's rate limit, where a 429 names no time

Kind = Literal["model", "dataset"]
# httpx2's or, before huggingface_hub 2, httpx's.
HTTPError: Any = hub_errors.HTTPError  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Snapshot:
    """Files in a folder, and the Hub's commit that they are of, if they are of the Hub."""

    folder: Path
    commit: str | None


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, and the paths of its files.

    Where the Hub does not answer, these are the files in the cache, and ``unreachable`` says so.
    """

    kind: Kind
    name: str
    commit: str
    files: frozenset[str]
    unreachable: HubNotReachable | None = None

    @property
    def folder(self) -> Path:
        """Where the cache keeps the files of this commit."""
        return _cache_of(self.kind, self.name) / "snapshots" / self.commit

    def has_cached(self, names: Iterable[str]) -> bool:
        """Return whether the cache holds all of these files."""
        return all((self.folder / name).is_file() for name in names)

    def fetch(self, names: Iterable[str]) -> Snapshot:
        """Return the folder with these files, downloaded if the cache lacks one, and verified.

        Raises:
            DataNotFound: If there is no such file; ``ModelUnsupported`` for a model.
            ChecksumDiffers: If a file arrived damaged. It is removed from the cache.
            HubNotReachable: If the Hub does not answer and the cache lacks a file.
        """
        needed = sorted(names)
        if missing := set(needed) - self.files:
            self.refuse(f"has no file {min(missing)}", remedy="look for it at {page}")
        with _hub_errors_explained(self.kind, self.name):
            if not self.has_cached(needed):
                snapshot_download(
                    self.name,
                    repo_type=self.kind,
                    revision=self.commit,
                    allow_patterns=[glob.escape(name) for name in needed],
                )
            for name in needed:
                _verify(self.folder / name)
        return Snapshot(self.folder, self.commit)

    def refuse(self, reason: str, *, remedy: str) -> None:
        """Raise that the Hub does not answer or, if it does, that a repository lacks something."""
        error = ModelUnsupported if self.kind == "model" else DataNotFound
        page = _page(self.kind, self.name)
        raise self.unreachable or error(
            f"the {self.kind} {self.name!r} {reason}", remedy=remedy.format(page=page)
        )


@dataclass(frozen=True)
class Upload:
    """What the Hub has taken: the page of the files, their commit, and whether others see them."""

    url: str
    commit: str
    is_public: bool


def fetch_model(repository: str, *, revision: str | None, with_weights: bool = True) -> Snapshot:
    """Return a folder with the config, tokenizer and safetensors of a repository's top level.

    The weights, if they are asked for, come last, so that a cache that holds them holds everything.

    Raises:
        FinetuneError: As :func:`resolve` and :meth:`Repository.fetch` do.
        ModelUnsupported: If it has no config or no safetensors. No weights are fetched then.
    """
    model = resolve("model", repository, revision=revision)
    if CONFIG not in model.files:
        model.refuse(f"has no {CONFIG}", remedy="choose a model in the format of transformers")
    if with_weights and not model.files & {WEIGHTS, SHARDS_INDEX}:
        model.refuse(
            "has no safetensors; pickled weights are not loaded",
            remedy="look at {page}/discussions for a converted revision and give it as --revision"
            " refs/pr/N, or choose another model",
        )
    config_and_tokenizer = model.fetch(filter(_is_config_or_tokenizer, model.files))
    if not with_weights:
        return config_and_tokenizer
    if WEIGHTS in model.files:
        return model.fetch([WEIGHTS])
    try:
        return model.fetch(read_shard_names(model.folder))
    except ValueError as error:
        reason = f"the weights of the model {repository!r} can't be found: {error}"
        raise ModelUnsupported(reason, remedy="choose another model or --revision") from error


def read_shard_names(folder: Path) -> list[str]:
    """Return the names of the safetensors files that hold a model's weights, by their index.

    Raises:
        ValueError: If it is damaged, or names anything but safetensors files of its folder.
    """
    try:
        names = set(read_json(folder / SHARDS_INDEX)["weight_map"].values())
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{SHARDS_INDEX} has no weight_map") from error
    for name in names:
        if Path(str(name)).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{SHARDS_INDEX} names {name}, no safetensors file of its folder")
    return sorted(names)


def fetch_dataset(repository: str, names: Iterable[str], *, commit: str) -> Snapshot:
    """Return a folder with files of a dataset; the Hub is not asked if all are in the cache."""
    needed = frozenset(names)
    dataset = Repository("dataset", repository, commit, needed)
    if not dataset.has_cached(needed):
        dataset = resolve("dataset", repository, revision=commit)
    return dataset.fetch(needed)


def resolve(kind: Kind, repository: str, *, revision: str | None) -> Repository:
    """Resolve a revision to a commit and list its files, in one request of bounded time.

    Raises:
        ModelNotFound: If the Hub has no such model or revision; ``DataNotFound`` for a dataset.
        ModelIsGated: If the Hub refuses access to the model; ``DataNotFound`` for a dataset.
        HubNotReachable: If the Hub does not answer and the cache holds nothing of the revision.
    """
    revision = revision or constants.DEFAULT_REVISION
    if not _stays_inside(revision):
        not_found = errors.ModelNotFound if kind == "model" else DataNotFound
        raise not_found(
            f"the {kind} {repository!r} has no revision {revision!r}",
            remedy="take a branch, a tag or a commit",
        )
    with _hub_errors_explained(kind, repository):
        try:
            info = _ask(kind, repository, revision, timeout_seconds=constants.HF_HUB_ETAG_TIMEOUT)
        except HubNotReachable as error:
            return _resolve_in_cache(kind, repository, revision, because=error)
        if info.sha != revision:  # given a commit, the library does not store the branch
            ref = _cache_of(kind, repository) / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(info.sha)
    names = (file.rfilename for file in info.siblings or ())
    files = frozenset(filter(_stays_inside, names))
    return Repository(kind, repository, info.sha, files)


def fetch_file(url: str, *, sha256: str, to: Path) -> Path:
    """Download a file from the web, unless it is there already; ``to`` is whole or absent.

    Raises:
        ChecksumDiffers: If what arrived is not the published file.
        HubNotReachable: If the address does not answer, or ``HF_HUB_OFFLINE`` is set.
    """
    if to.is_file() and file_sha256(to) == sha256:
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=to.parent) as scratch:
        unverified = Path(scratch) / to.name
        try:
            _download(url, to=unverified)
        except (HTTPError, hub_errors.OfflineModeIsEnabled) as error:
            reason = f"{url} can't be downloaded: {_first_line(error)}"
            raise HubNotReachable(reason, remedy=_way_online()) from error
        if file_sha256(unverified) != sha256:
            remedy = "run again; if it happens again, the file was changed or a proxy answers"
            raise ChecksumDiffers(f"the file at {url} is not the published one", remedy=remedy)
        os.replace(unverified, to)
    return to


def upload_model(
    files: Mapping[str, Path], repository: str, *, public: bool, revision: str | None, message: str
) -> Upload:
    """Upload files to a model's repository in one commit; the repository is made if there is none.

    Args:
        files: By their paths in the repository.
        repository: ``OWNER/NAME``.
        public: Whether everybody may see a new repository, and may see an existing one.
        revision: A branch, made from ``main`` if there is none; None: ``main``.
        message: Of the commit.

    Raises:
        UsageError: If there is no token, the Hub does not let it write, or the repository is
            public and should not be.
        HubNotReachable: If the Hub does not answer, or ``HF_HUB_OFFLINE`` is set.
    """
    check_repository_name(repository)
    _check_token()
    operations = [CommitOperationAdd(name, path) for name, path in files.items()]
    with _upload_errors_explained(repository):
        is_public = _open_repository(repository, public=public)
        if revision is not None:
            HfApi().create_branch(repository, branch=revision, exist_ok=True)
        commit = HfApi().create_commit(
            repository, operations, commit_message=message, revision=revision
        )
    return Upload(page_of_upload(repository, revision=revision), commit.oid, is_public)


def check_repository_name(repository: str) -> None:
    """Raise ``UsageError`` unless this can be the name of a repository, with its owner."""
    try:
        validate_repo_id(repository)
    except hub_errors.HFValidationError:
        is_valid = False
    else:
        is_valid = "/" in repository
    if not is_valid:
        raise UsageError(
            f"{repository!r} can't be the name of a repository on the Hub",
            remedy="write OWNER/NAME, in letters, digits, '-', '_' and '.'",
        )


def page_of_upload(repository: str, *, revision: str | None) -> str:
    """Return the address where a browser shows a model's files."""
    page = _page("model", repository)
    return page if revision is None else f"{page}/tree/{revision}"


def ask_hub(*, model: str, timeout_seconds: float) -> None:
    """Ask the Hub for a model, as a run does first; that it has no such model is an answer too.

    Raises:
        HubNotReachable: If the Hub does not answer in time, or ``HF_HUB_OFFLINE`` is set.
        ModelIsGated: If the Hub refuses the user's token.
    """
    with suppress(errors.ModelNotFound):
        _ask("model", model, None, timeout_seconds=timeout_seconds)


def endpoint() -> str:
    """Return the Hub's address, without a user's name and password."""
    return _without_password(constants.ENDPOINT)


def cache_folder(name: str) -> Path:
    """Return the folder beside the Hub's cache for other files; it may not exist yet."""
    return Path(constants.HF_ASSETS_CACHE, "finetune", name)


def _check_token() -> None:
    """Raise unless there is a token; one that is no header would be shown by the client's error."""
    token = get_token()
    if token is None:
        raise UsageError(
            "uploading to the Hub needs a token, and there is none",
            remedy=f"make one that may write at {endpoint()}/settings/tokens, then run "
            "`hf auth login` or set HF_TOKEN",
        )
    if not re.fullmatch("[!-~]+", token):
        raise UsageError(
            "the token for the Hub has characters that no token has",
            remedy="run `hf auth login` again, or set HF_TOKEN anew",
        )


def _open_repository(repository: str, *, public: bool) -> bool:
    """Make a repository if there is none; return whether it is public."""
    try:
        found = _ask("model", repository, None, timeout_seconds=constants.HF_HUB_ETAG_TIMEOUT)
    except errors.ModelNotFound:
        HfApi().create_repo(repository, private=not public)
        return public
    if not (found.private or public):
        raise UsageError(
            f"{repository} is public on the Hub: everybody would see the model",
            remedy="give --public if that is right, or choose another name",
        )
    return not found.private


def _ask(kind: Kind, repository: str, revision: str | None, *, timeout_seconds: float) -> Any:
    """Return what the Hub says of a repository; after a 429 with a short pause, ask again.

    A thread asks, since the time-outs of a request do not cover the look-up of the server's
    address, which a dead name server can delay.
    """
    answers: SimpleQueue[Any] = SimpleQueue()

    def ask_once() -> None:
        try:
            ask = HfApi().repo_info
            answers.put(ask(repository, repo_type=kind, revision=revision, timeout=timeout_seconds))
        except Exception as error:  # raised below, in the thread that waits
            answers.put(error)

    for may_ask_again in (True, False):
        Thread(target=ask_once, daemon=True).start()
        try:
            answer = answers.get(timeout=timeout_seconds)
        except Empty:
            answer = HTTPError(f"no answer within {timeout_seconds:g} s")
        pause_seconds = _pause_seconds(answer)
        if not (may_ask_again and 0 <= pause_seconds <= MAX_PAUSE_SECONDS):
            break
        time.sleep(pause_seconds)
    if isinstance(answer, Exception):
        failure = f"the Hub at {endpoint()} can't be reached"
        raise _explain(answer, kind, repository, failure) from answer
    return answer


def _resolve_in_cache(
    kind: Kind, repository: str, revision: str, *, because: HubNotReachable
) -> Repository:
    reason = f"the {kind} {repository!r} is not in the cache, and {because.message}"
    unreachable = HubNotReachable(reason, remedy=because.remedy)
    cache = _cache_of(kind, repository)
    ref = cache / "refs" / revision
    folder = cache / "snapshots" / (ref.read_text() if ref.is_file() else revision)
    if not folder.is_dir():
        raise unreachable from because
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    files = frozenset(path.as_posix() for path in paths)
    return Repository(kind, repository, folder.name, files, unreachable)


def _stays_inside(path: str) -> bool:
    """Return whether a path that is read in a folder is one of that folder."""
    return not os.path.isabs(path) and ".." not in Path(path).parts


def _cache_of(kind: Kind, repository: str) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type=kind))


def _is_config_or_tokenizer(name: str) -> bool:
    return "/" not in name and name.endswith((".json", ".txt", ".model"))


def _verify(path: Path) -> None:
    """Remove a file from the cache, and raise, if it is not what the Hub published.

    The cache names a large file by its published sha256, and links to it. A cache without symbolic
    links has no such names.
    """
    blob = path.parent / path.readlink() if path.is_symlink() else path
    if re.fullmatch("[0-9a-f]{64}", blob.name) and file_sha256(path) != blob.name:
        for damaged in (path.resolve(), blob, path):
            damaged.unlink(missing_ok=True)
        reason = f"{path.name} arrived damaged from the Hub and was removed"
        raise ChecksumDiffers(reason, remedy="run again to download it again")


def _download(url: str, *, to: Path) -> None:
    timeout_seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, timeout=timeout_seconds) as answer, to.open("wb") as file:
        answer.raise_for_status()
        for chunk in answer.iter_bytes():
            file.write(chunk)


@contextmanager
def _hub_errors_explained(kind: Kind, repository: str) -> Iterator[None]:
    # hf_xet, the Hub's transfer protocol, reports every failure as a bare RuntimeError.
    try:
        yield
    except (HTTPError, hub_errors.HFValidationError, OSError, RuntimeError) as error:
        failure = f"the download of the {kind} {repository!r} broke off"
        raise _explain(error, kind, repository, failure) from error


@contextmanager
def _upload_errors_explained(repository: str) -> Iterator[None]:
    try:
        yield
    except (HTTPError, hub_errors.OfflineModeIsEnabled, RuntimeError, ValueError) as error:
        if getattr(getattr(error, "response", None), "status_code", 0) in MAY_NOT_WRITE:
            raise _may_not_write(repository, getattr(error, "server_message", None)) from error
        failure = f"the upload to {repository} broke off"
        raise _explain(error, "model", repository, failure) from error
    except errors.ModelIsGated as error:
        raise _may_not_write(repository, None) from error


def _may_not_write(repository: str, answer: str | None) -> UsageError:
    because = f": {_first_line(answer)}" if answer else ""
    return UsageError(
        f"the Hub does not let your token write to {repository}{because}",
        remedy=f"make one that may at {endpoint()}/settings/tokens, then run `hf auth login` or "
        "set HF_TOKEN; or choose an OWNER to whom you belong",
    )


def _explain(error: Exception, kind: Kind, repository: str, failure: str) -> errors.FinetuneError:
    """Return our error for one of the library's; ``failure`` is what it kept from being done."""
    what, page = f"the {kind} {repository!r}", _page(kind, repository)
    not_found = errors.ModelNotFound if kind == "model" else DataNotFound
    refused = errors.ModelIsGated if kind == "model" else DataNotFound
    status = error.response.status_code if isinstance(error, hub_errors.HfHubHTTPError) else 0
    of: type[errors.FinetuneError] = HubNotReachable
    reason, remedy = f"{failure}: {_first_line(error)}", _way_online()
    match error:
        case hub_errors.GatedRepoError():
            of, reason = refused, f"{what} is only for users who accepted its terms"
            remedy = f"accept them at {page} and set HF_TOKEN to a token of yours"
        case hub_errors.HFValidationError():
            of, reason = not_found, f"there is no folder {repository}, which is no name on the Hub"
            remedy = "check the spelling"
        case hub_errors.RepositoryNotFoundError():
            of, reason = not_found, f"there is no folder and on the Hub no {kind} {repository!r}"
            remedy = f"check the spelling; if {page} is private, set HF_TOKEN"
        case hub_errors.RevisionNotFoundError():
            of, reason = not_found, f"{what} has no such revision"
            remedy = f"choose one of those at {page}/tree/main"
        case _ if status in (401, 403):
            of, reason = refused, f"the Hub refuses {what} to this HF_TOKEN"
            remedy = "make a token that may read it at https://huggingface.co/settings/tokens"
        case _ if status == 429:
            reason = f"the Hub limits requests; wait {_pause_seconds(error)} s"
            remedy = "then run again; with a token in HF_TOKEN the limit is higher"
        case hub_errors.OfflineModeIsEnabled():
            reason = f"{failure}: HF_HUB_OFFLINE is set"
        case OSError(errno=int(), strerror=cause):
            of = errors.FinetuneError
            reason = f"the cache in {constants.HF_HUB_CACHE} can't be written: {cause}"
            remedy = "make room there, or set HF_HOME to a folder on another disk"
        case json.JSONDecodeError():
            reason = f"{failure}: another server answers, such as a hotel's network"
    return of(reason, remedy=remedy)


def _pause_seconds(answer: object) -> int:
    """Return the seconds to wait if the Hub has limited our requests, and -1 if it has not."""
    if not isinstance(answer, hub_errors.HfHubHTTPError) or answer.response.status_code != 429:
        return -1
    named = answer.response.headers.get("Retry-After", "")
    return int(named) if named.isdigit() else LIMIT_WINDOW_SECONDS


def _page(kind: Kind, repository: str) -> str:
    return f"{endpoint()}/{'datasets/' if kind == 'dataset' else ''}{repository}"


def _first_line(error: Exception | str) -> str:
    return _without_password((str(error) or type(error).__name__).strip().splitlines()[0])


def _without_password(text: str) -> str:
    """Return a text whose addresses name no user and password, as ``HF_ENDPOINT`` may.

    Nor do they have queries, which in addresses for uploads are a signature.
    """
    return re.sub(r"(https?://)(?:[^/\s@]*@)?([^\s?]*)(?:\?\S*)?", r"\1\2", text)


def _way_online() -> str:
    if constants.is_offline_mode():
        return "unset HF_HUB_OFFLINE and run again"
    return "check the network and HF_ENDPOINT and run again"
