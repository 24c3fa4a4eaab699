"""The exceptions of the package, each with a message, a remedy and an exit code."""

import errno
import os
import re
import signal
import traceback
from collections.abc import Sequence

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


# The kind and the remedy of errors of the operating system.
_BY_ERRNO: dict[int | None, tuple[type[FinetuneError], str]] = {
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST),
        (UsageError, "check the path, or choose another one"),
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), (UsageError, "change its permissions, or choose another path")
    ),
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO),
        (FinetuneError, "free disk space, or choose a path on another disk"),
    ),
}


def system_error(error: BaseException) -> OSError | None:
    """Return the OSError behind an exception; a Rust library reports it only in its message."""
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None


def explain(error: BaseException) -> FinetuneError | None:
    """Return the message and remedy for a system error; None if no user can cause it."""
    if (cause := system_error(error)) and cause.errno in _BY_ERRNO:
        kind, remedy = _BY_ERRNO[cause.errno]
        place = cause.filename or ("standard output" if cause is error else "a file")
        return kind(f"{place}: {cause.strerror}", remedy=remedy)
    if isinstance(error, ImportError):
        remedy = "install finetune-mps and its packages again"
        return FinetuneError(f"a package can't be imported: {error}", remedy=remedy)
    # pathlib raises these.
    if isinstance(error, RuntimeError) and re.search("home directory|^Symlink loop", str(error)):
        return UsageError(str(error), remedy="check the path, and write it without ~")
    return None
