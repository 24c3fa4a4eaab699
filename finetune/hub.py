"""Downloads models and data from the Hugging Face Hub, and uploads models.

No other module uses the network. A revision is resolved to a commit once, and all files come from
that commit. If the Hub doesn't respond, or ``HF_HUB_OFFLINE`` is set, they come from the cache.
"""

import glob
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import (
    CommitOperationAdd,
    HfApi,
    constants,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub import errors as hub_errors
from huggingface_hub.file_download import repo_folder_name

from finetune import errors
from finetune.errors import HubNotReachableError, UsageError
from finetune.files import write_text_atomically

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
SHARDS_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
RepoType = Literal["model", "dataset"]


@dataclass(frozen=True)
class Repository:
    """A repository at one commit. If the Hub is ``unreachable``, only its cached files exist."""

    repo_type: RepoType
    name: str
    commit: str
    files: frozenset[str] = frozenset()
    unreachable: HubNotReachableError | None = None

    def fetch(self, names: Iterable[str]) -> Path:
        """Return the folder with these files. Download files that aren't in the cache."""
        folder = _cache_of(self.repo_type, self.name) / "snapshots" / self.commit
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            if self.unreachable:
                raise self.unreachable
            # A download would retry for 20 s. This fails at once if the Hub doesn't respond.
            ask_hub(self.repo_type, self.name, self.commit)
            failure = f"the download of {self.name} was interrupted"
            with _explained(self.repo_type, self.name, failure):
                snapshot_download(
                    self.name,
                    repo_type=self.repo_type,
                    revision=self.commit,
                    allow_patterns=list(map(glob.escape, missing)),
                )
        return folder


def resolve(repo_type: RepoType, name: str, *, revision: str | None) -> Repository:
    """Resolve a revision to a commit and list its files."""
    revision = revision or constants.DEFAULT_REVISION
    try:
        info = ask_hub(repo_type, name, revision)
    except HubNotReachableError as error:
        reference = _cache_of(repo_type, name) / "refs" / revision
        commit = reference.read_text() if reference.is_file() else revision
        folder = _cache_of(repo_type, name) / "snapshots" / commit
        message = f"the {repo_type} {name!r} is not in the cache, and {error.message}"
        unreachable = HubNotReachableError(message, remedy=error.remedy)
        if not folder.is_dir():
            raise unreachable from error
        paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        files = frozenset(map(Path.as_posix, paths))
        return Repository(repo_type, name, commit, files, unreachable)
    if info.sha != revision:  # downloading by commit doesn't store the branch
        reference = _cache_of(repo_type, name) / "refs" / revision
        with suppress(OSError):  # the cache may be read-only
            reference.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(reference, info.sha, flushes=False)
    files = frozenset(sibling.rfilename for sibling in info.siblings or ())
    return Repository(repo_type, name, info.sha, files)


def fetch_model(name: str, *, revision: str | None, with_weights: bool = True) -> Path:
    """Return the folder with a model's config, tokenizer and weights, named after the commit."""
    model = resolve("model", name, revision=revision)
    files = [file for file in model.files if "/" not in file]
    weights = [WEIGHTS] if WEIGHTS in files else list(filter(_SHARD.fullmatch, files))
    if CONFIG not in files:
        raise model.unreachable or errors.ModelUnsupportedError(
            f"the model {name!r} has no {CONFIG}", remedy="choose a model in transformers format"
        )
    if with_weights and not weights:
        raise model.unreachable or errors.ModelUnsupportedError(
            f"the model {name!r} has no safetensors; pickled weights are not loaded",
            remedy=f"look for a converted revision at {_page('model', name)}/discussions and set "
            "it with --revision refs/pr/N, or choose another model",
        )
    folder = model.fetch(file for file in files if file.endswith((".json", ".txt", ".model")))
    # Weights come last, so that a cache with weights contains all files.
    return model.fetch(weights) if with_weights else folder


def has_weights(name: str, *, revision: str | None) -> bool:
    """Return whether a model's weights are in the cache, at its newest known revision."""
    with suppress(hub_errors.HFValidationError):
        files = (WEIGHTS, SHARDS_INDEX)
        cached = (try_to_load_from_cache(name, file, revision=revision) for file in files)
        return any(isinstance(path, str) for path in cached)
    return False


def upload_model(
    files: Mapping[str, Path], name: str, *, public: bool, revision: str | None, message: str
) -> tuple[str, bool]:
    """Upload files in one commit. Return the commit, and whether the repository is public."""
    api = HfApi()
    with _explained("model", name, f"the upload to {name} was interrupted"):
        try:
            is_public = not api.repo_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT).private
        except hub_errors.RepositoryNotFoundError:
            is_public = public
            api.create_repo(name, private=not public, token=True)
        if is_public and not public:
            raise UsageError(
                f"{name} is public on the Hub: everyone could see the model",
                remedy="add --public if that is intended, or choose another name",
            )
        if revision is not None:
            api.create_branch(name, branch=revision, exist_ok=True)
        added = [CommitOperationAdd(path, file) for path, file in files.items()]
        commit = api.create_commit(name, added, commit_message=message, revision=revision)
    return commit.oid, is_public


def page_of_upload(name: str, *, revision: str | None) -> str:
    """Return the URL of an uploaded model."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UsageError(
            f"{name!r} is not a valid repository name on the Hub",
            remedy="write OWNER/NAME, with letters, digits, '-', '_' and '.'",
        )
    return _page("model", name) + (f"/tree/{revision}" if revision else "")


def ask_hub(
    repo_type: RepoType,
    name: str,
    revision: str | None = None,
    *,
    timeout_seconds: float | None = None,
) -> Any:
    """Ask the Hub about a repository, in one request with a timeout."""
    timeout = timeout_seconds or constants.HF_HUB_ETAG_TIMEOUT
    with _explained(repo_type, name, f"the Hub at {endpoint()} can't be reached"):
        return HfApi().repo_info(name, repo_type=repo_type, revision=revision, timeout=timeout)


def endpoint() -> str:
    """Return the URL of the Hub, without user name and password."""
    return errors.without_password(constants.ENDPOINT)


def cache_folder(name: str) -> Path:
    """Return a folder for other files next to the Hub cache. It need not exist."""
    return Path(constants.HF_ASSETS_CACHE, "finetune", name)


def _cache_of(repo_type: RepoType, name: str) -> Path:
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=repo_type))


def _page(repo_type: RepoType, name: str) -> str:
    return f"{endpoint()}/{'datasets/' if repo_type == 'dataset' else ''}{name}"


def _explained(repo_type: RepoType, name: str, failure: str) -> AbstractContextManager[None]:
    """Explain errors of the Hub client. ``failure`` describes what failed."""
    words = {
        "page": _page(repo_type, name),
        "endpoint": endpoint(),
        "cache": constants.HF_HUB_CACHE,
    }
    return errors.explained(repo_type, name=name, failure=failure, **words)
