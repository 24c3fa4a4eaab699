"""Share a small model, one finished run of it, and the command within this process."""

from tiny_runs import command, finished_run, tiny_folder

__all__ = ["command", "finished_run", "tiny_folder"]
