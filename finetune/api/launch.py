"""``finetune run --num-processes``: the same command in several processes of this host."""

import logging
import signal
import socket
import sys
from collections.abc import Mapping
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from finetune.errors import Interrupted, ProcessLost

_REMEDY = "--resume-from-checkpoint auto goes on from the last checkpoint"


def run_in_processes(count: int) -> int:
    """Start this process's command in several with torch's elastic launcher; wait for their end.

    Returns:
        The exit code: 0, or that of the process that failed first, which has said why.

    Raises:
        ProcessLost: If a process was killed.
        Interrupted: If a signal has stopped this one, and so the others.
    """
    # Its own account of what has failed stands beside ours.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    command = ["-m", "finetune", *sys.argv[1:]]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return _exit_code(error.failures)
    except SignalException as stop:
        raise Interrupted("stopped", remedy=_REMEDY, signal_number=stop.sigval.value) from None
    return 0


def _exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    # The others fail in the same second as one that was killed, since it no longer answers.
    rank, cause = min(failures.items(), key=lambda one: (not _was_killed(one[1]), one[1].timestamp))
    if cause.exitcode > 0:
        return cause.exitcode
    raise ProcessLost(
        f"process {rank} on {socket.gethostname()} was killed by {cause.signal_name()}",
        remedy=_REMEDY,
    )


def _was_killed(failure: ProcessFailure) -> bool:
    """Return whether a signal ended a process, but that by which the launcher ends the others."""
    return failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM
