"""``finetune run`` as a function.

The libraries that training needs take seconds to import, so they are imported once the call is
known to be right.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from finetune.config.load import LoadedConfig, check_option, load_config
from finetune.config.options import Options
from finetune.config.schema import SECTION_OF_OPTION, Config
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.events import Emit, ignore
from finetune.runs.folder import RunFolder, open_run_folder

if TYPE_CHECKING:
    from finetune.runs.results import DryRun, RunResults

MAY_CHANGE_ON_RESUMING = frozenset(
    {
        "device",
        "batch_size",
        "eval_batch_size",
        "logging_steps",
        "save_strategy",
        "feature_cache",
        "cache_dir",
        "cache_gib",
    }
)


def run(
    config: str | Path | None = None,
    *,
    resume_from_checkpoint: str | Path | None = None,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Unpack[Options],
) -> "RunResults":
    """Fine-tune a classifier and write its run folder, as ``finetune run`` does.

    Args:
        config: A YAML file or the name of a recipe.
        resume_from_checkpoint: The folder of an interrupted run, or a checkpoint in it.
        assignments: More options, as ``section.option=value``.
        emit: Is called with the events of ``finetune.events``.
        options: The command's flags, with underscores: ``freeze_core=True``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    if resume_from_checkpoint is None:
        loaded = _load(config, assignments, options)
        from finetune.api.training import train_new

        return train_new(loaded.config, emit=emit)
    if config is not None:
        raise ConfigurationInvalid(
            "a run is resumed with its own configuration", remedy="leave out --config"
        )
    folder = open_run_folder(_run_of(Path(resume_from_checkpoint)), needs_model=False)
    if folder.has_finished:
        raise UsageError(
            f"the run in {folder.path} has finished",
            remedy="use it with finetune evaluate or predict, or start another run",
        )
    loaded = _load(folder.config_file, assignments, options)
    _check_changes(loaded, folder)
    from finetune.api.training import train_on

    return train_on(loaded.config, folder, emit=emit)


def dry_run(
    config: str | Path | None = None,
    *,
    assignments: Sequence[str] = (),
    emit: Emit = ignore,
    **options: Unpack[Options],
) -> "DryRun":
    """Prepare a run up to its first update, write nothing, and return what it would do.

    Whatever would keep the run from starting is raised here too. The arguments are those of
    :func:`run`.
    """
    loaded = _load(config, assignments, options)
    from finetune.api.dry_run import describe

    return describe(loaded.config, emit=emit)


def _load(config: str | Path | None, assignments: Sequence[str], options: Options) -> LoadedConfig:
    for option in options:
        check_option(option, origin="finetune.run()")
    return load_config(
        file=None if config is None else str(config),
        environment=os.environ,
        flags=dict(options),
        assignments=assignments,
    )


def _run_of(path: Path) -> Path:
    """Return the run folder of a path that may be, as the Trainer takes it, a checkpoint's."""
    is_checkpoint = path.absolute().parent.name == RunFolder(path).checkpoints_folder.name
    return path.absolute().parents[1] if is_checkpoint else path


def _check_changes(loaded: LoadedConfig, folder: RunFolder) -> None:
    """Refuse options that would make the rest of a run another run than its beginning."""
    file = str(folder.config_file)
    saved = load_config(file=file, environment={}, flags={}, assignments=()).config
    for option, section in SECTION_OF_OPTION.items():
        now, before = (_value(config, section, option) for config in (loaded.config, saved))
        if now != before and option not in MAY_CHANGE_ON_RESUMING:
            raise ConfigurationInvalid(
                f"{loaded.origins[option]} changes a run that has begun",
                remedy="leave it out, or start a new run with it",
            )


def _value(config: Config, section: str, option: str) -> Any:
    return getattr(getattr(config, section), option)
