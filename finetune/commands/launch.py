"""``finetune run --num-processes``: the same command in several processes of this host."""

import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from finetune.distributed.launch import import_environment, module_command
from finetune.errors import ProcessLost
from finetune.training.interruption import STOP_SIGNALS

# A stopped process finishes its step and writes a checkpoint; a second signal cuts that off.
_STOPPING_SECONDS = 600


def run_in_processes(count: int, arguments: Sequence[str]) -> int:
    """Run a command in several processes with torch's elastic launcher; return the exit code.

    It is that of the process that failed first, or that of the signal that has stopped this
    process and so the others.
    """
    # The launcher would log the failures that the processes have reported.
    logging.disable(logging.ERROR)
    os.environ |= import_environment()
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_STOPPING_SECONDS))
    # nohup and shells start processes with signals that are to be ignored.
    handled = [one.name for one in STOP_SIGNALS if signal.getsignal(one) != signal.SIG_IGN]
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        signals_to_handle=",".join(handled),
        # Without a folder of logs, which would stay.
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    executable, *options = module_command("finetune")
    try:
        elastic_launch(config, executable)(*options, *arguments)
    except ChildFailedError as error:
        return _exit_code(error.failures)
    except SignalException as stop:
        return 128 + stop.sigval
    return 0


def _exit_code(failures: Mapping[int, ProcessFailure]) -> int:
    def was_killed(failure: ProcessFailure) -> bool:
        # By SIGTERM the launcher ends the others.
        return failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM

    # The others fail in the same second as one that was killed, since it no longer replies.
    rank, cause = min(failures.items(), key=lambda one: (not was_killed(one[1]), one[1].timestamp))
    if cause.exitcode > 0:
        return cause.exitcode
    raise ProcessLost(
        f"process {rank} on {socket.gethostname()} was killed by {cause.signal_name()}",
        remedy="--resume-from-checkpoint auto goes on from the last checkpoint",
    )
