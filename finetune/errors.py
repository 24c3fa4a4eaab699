"""The exceptions of the package, each with a message, a remedy and an exit code."""

import errno
import os
import re
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

MAX_NAMES = 8


class FinetuneBaseError(BaseException):
    """Work ended early. The message says what is wrong, and the remedy says what to do."""

    exit_code: int = 1

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        # Python tracebacks show only the message and the notes.
        self.add_note(f"try: {remedy}")


class FinetuneError(FinetuneBaseError, Exception):
    """The base of all errors of this package, except interruptions."""


class LossNotFiniteError(FinetuneError):
    """A loss is NaN or infinite; ``examples`` are indices in the split, if known."""

    def __init__(self, message: str, *, remedy: str, examples: Sequence[int] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.examples = examples


class CheckpointDamagedError(FinetuneError):
    """The bytes of a checkpoint changed after they were written."""


class ProcessLostError(FinetuneError):
    """Another process of the same run ended, or does not reply."""


class UsageError(FinetuneError):
    """The command, its options or its configuration are wrong."""

    exit_code = 2


class ConfigurationError(UsageError):
    """A key is unknown, a value has the wrong type or range, or two contradict each other."""


class NotARunError(UsageError):
    """The folder is not a run folder, or it is incomplete."""


class ModelNotFoundError(UsageError):
    """There is no such folder, and no such Hub repository that the user can read."""


class ModelUnsupportedError(UsageError):
    """The model can't be loaded safely or is not a text classifier with layers."""


class DataError(FinetuneError):
    """The data can't be used."""

    exit_code = 3


class DataNotFoundError(DataError):
    """A data file, a column or a dataset does not exist."""


class DataUnreadableError(DataError):
    """A data file can't be parsed."""


class SeveralTablesError(DataUnreadableError):
    """A file or folder has several tables, and none was chosen."""

    def __init__(self, path: object, names: Sequence[str]) -> None:
        super().__init__(
            f"{path} holds {len(names)} tables: {', '.join(names[:MAX_NAMES])}",
            remedy="choose one with --table, or rename them to train, validation and test",
        )
        self.names = names


class DeviceNotAvailableError(FinetuneError):
    """The requested device can't be used on this machine."""

    exit_code = 4


class BatchDoesNotFitError(FinetuneError):
    """The device ran out of memory."""

    exit_code = 5


class HubNotReachableError(FinetuneError):
    """The network or the Hub does not reply, and a needed file is not in the cache."""

    exit_code = 6


class InterruptionError(FinetuneBaseError, KeyboardInterrupt):
    """A signal stopped the command; the default is Ctrl-C."""

    def __init__(self, message: str, *, remedy: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message, remedy=remedy)
        # A shell reports the same code for a process that the signal killed.
        self.exit_code = 128 + signal_number


def packages_of(error: BaseException) -> list[str]:
    """Return the package of each function in the traceback, the innermost last."""
    frames = traceback.walk_tb(error.__traceback__)
    return [str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames]


class Row(NamedTuple):
    """An exception, and the error that it becomes.

    The exception has one of the ``classes`` or a subclass. One of the ``packages``, if there are
    any, is in its traceback. ``pattern`` is in its code, class and message.
    """

    classes: str
    packages: str
    pattern: str
    error: type[FinetuneError]
    message: str
    remedy: str


_OF_FILES: tuple[Row, ...] = (
    Row("OSError", "", "^(ENOENT|ENOTDIR|EISDIR|ELOOP|ENAMETOOLONG|EEXIST) ", UsageError,
        "{place}: {strerror}", "check the path, or choose another one"),
    Row("OSError", "", "^(EACCES|EPERM) ", UsageError,
        "{place}: {strerror}", "change its permissions, or choose another path"),
    Row("OSError", "", "^(ENOSPC|EDQUOT|EFBIG|EROFS|EIO|EINTR|EBUSY|ENOLCK|ESTALE) ", FinetuneError,
        "{place}: {strerror}", "free disk space, or choose a path on another disk"),
)  # fmt: skip
_OF_SYSTEM: tuple[Row, ...] = (
    *_OF_FILES,
    Row("ImportError", "", "", FinetuneError,
        "a package can't be imported: {reason}", "install finetune-mps and its packages again"),
    Row("RuntimeError", "", "home directory|Symlink loop", UsageError,  # of pathlib
        "{reason}", "check the path, and write it without ~"),
)  # fmt: skip
_CACHE_FAILS = (
    "set HF_HOME to a folder that you can write to, with enough free space; or set HF_HUB_OFFLINE=1"
    " to use the version in the cache"
)
_UNREACHABLE = (
    HubNotReachableError,
    "{failure}: {reason}",
    "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, and run again; if the Hub limits requests, "
    "wait 5 minutes",
)
_NO_MODEL = (
    ModelUnsupportedError,
    "{name} does not load as a text classifier: {reason}",
    "choose an encoder that transformers knows, such as bert-base-uncased",
)


def _of_hub(not_found: type[FinetuneError]) -> tuple[Row, ...]:
    return (
        # The Hub also says that about gated and private repositories.
        Row("HFValidationError RepositoryNotFoundError", "", "", not_found,
            "folder not found: {name}, and no {work} with this name on the Hub",
            "check the spelling; if {page} is gated or private, accept its terms there, and set "
            "HF_TOKEN to your token"),
        Row("RevisionNotFoundError", "", "", not_found,
            "the {work} {name!r} has no such revision", "choose a revision from {page}/tree/main"),
        *(
            row._replace(pattern=row.pattern + ".*{cache}", remedy=_CACHE_FAILS)
            for row in _OF_FILES
        ),
        *_OF_SYSTEM,
        # 409: the token can't even see the repository that it tries to create.
        Row("HTTPError OSError", "", "^(401|403|409) |^ LocalTokenNotFoundError", not_found,
            "your token gives no access to the {work} {name!r}: {reason}",
            "make a token with access at {endpoint}/settings/tokens, then run `hf auth login` or "
            "set HF_TOKEN; or choose an OWNER that you belong to"),
        Row("HTTPError OSError", "", "", *_UNREACHABLE),
        Row("RuntimeError ValueError", "huggingface_hub hf_xet", "", *_UNREACHABLE),
    )  # fmt: skip


# By the work that failed. The first row that fits is used.
EXPLANATIONS: dict[str, tuple[Row, ...]] = {
    "": _OF_SYSTEM,
    "model": _of_hub(ModelNotFoundError),
    "dataset": _of_hub(DataNotFoundError),
    # Files from anywhere make libraries raise errors of any kind.
    "model files": (
        Row("ValueError", "", "", *_NO_MODEL),
        *_OF_FILES,
        Row("OSError", "", "", *_NO_MODEL),
        Row("Exception", "transformers tokenizers torch safetensors huggingface_hub", "",
            *_NO_MODEL),
    ),
    # zipfile raises RuntimeError for passwords, NotImplementedError for unknown compression, and
    # ValueError for damaged offsets and names. zlib has a class called error.
    "archive": (
        Row("BadZipFile OSError EOFError error LZMAError RuntimeError ValueError", "", "",
            DataUnreadableError, "{path} can't be unpacked: {reason}",
            "copy or download it again, or unpack it and pass a table"),
    ),
    "joining processes": (
        Row("RuntimeError ValueError", "", "", ProcessLostError,
            "process {rank} of {world_size} can't join the others: {reason}",
            "see the errors of the others; check that each host can reach MASTER_ADDR"),
    ),
    "joined processes": (
        Row("RuntimeError", "", "", ProcessLostError,
            "another process of the run ended or no longer answers ({reason})",
            "see the error of that process, then continue from the last checkpoint with "
            "--resume-from-checkpoint auto"),
    ),
}  # fmt: skip


def system_error(error: BaseException) -> OSError | None:
    """Return the OSError behind an exception; Rust and PyTorch report it only in their messages."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"(?:\(os error |unable to .* \()(\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def without_password(text: str) -> str:
    """Return a text without the user names and passwords of its URLs."""
    return re.sub(r"(https?://)[^/\s@]*@", r"\1", text)


def reason_of(error: BaseException) -> str:
    """Return the first line of a message, or the class of an exception without a message."""
    reason = (without_password(str(error).strip()) or type(error).__name__).splitlines()[0]
    # The message of a LookupError is only the key.
    return f"{type(error).__name__}: {reason}" if isinstance(error, LookupError) else reason


def explain(error: BaseException, work: str = "", **words: object) -> FinetuneError | None:
    """Return the error that an exception becomes, or None if no user can cause it.

    Its code, such as ``ENOENT`` or ``404``, comes from the system or the server.
    """
    if isinstance(error, FinetuneError):
        return error
    code = getattr(getattr(error, "response", None), "status_code", "")
    classes, packages = {kind.__name__ for kind in type(error).__mro__}, {*packages_of(error)}
    if cause := system_error(error):
        code = errno.errorcode.get(cause.errno or 0, code)
        place = cause.filename or words.get("path") or words.get("name") or "a file"
        if place == "a file" and packages_of(error)[-1:] in (["click"], ["rich"]):
            place = "standard output"
        classes.add("OSError")
        words |= {"place": place, "strerror": cause.strerror}
    words |= {"work": work, "reason": reason_of(error)}
    for row in EXPLANATIONS[work]:
        is_from = not row.packages or packages & {*row.packages.split()}
        pattern = row.pattern.format(cache=re.escape(str(words.get("cache"))))
        has_text = re.search(pattern, f"{code} {type(error).__name__}: {error}")
        if has_text and is_from and classes & {*row.classes.split()}:
            return row.error(row.message.format(**words), remedy=row.remedy.format(**words))
    return None


@contextmanager
def explained(work: str = "", **words: object) -> Iterator[None]:
    """Raise the errors that exceptions become, and other exceptions as they are."""
    try:
        yield
    except FinetuneError:
        raise
    except Exception as error:
        if known := explain(error, work, **words):
            raise known from error
        raise
