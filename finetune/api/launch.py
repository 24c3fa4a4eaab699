"""``finetune run --num-processes``: the same command in several processes of this host."""

import logging
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
    rank, first = min(failures.items(), key=lambda one: one[1].timestamp)
    if first.exitcode > 0:
        return first.exitcode
    raise ProcessLost(
        f"process {rank} on {socket.gethostname()} was killed by {first.signal_name()}",
        remedy=_REMEDY,
    )
