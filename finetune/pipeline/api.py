"""The Python API: what the commands do, as functions.

Each imports what it needs when it is called, and first looks for what may be wrong with the call:
torch, datasets and metrics take seconds.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune import events
from finetune.config.load import LoadedConfig, check_option, load_config
from finetune.config.schema import SECTION_OF_OPTION, Config
from finetune.devices.names import DeviceName
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.runs.folder import RunFolder, open_run_folder

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
    dry_run: bool = False,
    emit: events.Emit = lambda event: None,
    **options: Any,
) -> dict[str, Any]:
    """Fine-tune a classifier, as ``finetune run`` does.

    Args:
        config: A YAML file or the name of a recipe.
        resume_from_checkpoint: A run folder to go on with, or a checkpoint in it.
        assignments: More options, as ``section.option=value``.
        dry_run: Only work out what the run would do, and return that.
        emit: Is called with the events of ``finetune.events``; by default nobody is told.
        options: The command's flags, with underscores: ``freeze_core=True``.

    Returns:
        The figures of ``all_results.json``, and ``output_dir``.

    Raises:
        FinetuneError: With an exit code and a remedy.
    """
    for option in options:
        check_option(option, origin="finetune.run()")
    resume_from = None if resume_from_checkpoint is None else _run_of(Path(resume_from_checkpoint))
    if resume_from is None:
        file = None if config is None else str(config)
    elif config is None and not dry_run:
        file = str(open_run_folder(resume_from, needs_model=False).config_file)
    else:
        raise ConfigurationInvalid(
            f"a run that goes on has its configuration in {resume_from}",
            remedy="leave out --config and --dry-run",
        )
    loaded = load_config(file=file, environment=os.environ, flags=options, assignments=assignments)
    if resume_from is not None:
        saved = load_config(file=file, environment={}, flags={}, assignments=())
        _check_changes(loaded, saved=saved.config)
    if dry_run:
        from finetune.pipeline.dry_run import dry_run as describe_run

        return describe_run(loaded.config, emit=emit)
    from finetune.pipeline.run import run as run_config

    return run_config(loaded.config, emit=emit, resume_from=resume_from)


def _run_of(path: Path) -> Path:
    """Return the run folder of a path that may be, as the Trainer takes it, a checkpoint's."""
    is_checkpoint = path.absolute().parent.name == RunFolder(path).checkpoints_folder.name
    return path.absolute().parents[1] if is_checkpoint else path


def _check_changes(loaded: LoadedConfig, *, saved: Config) -> None:
    """Refuse changes that would make the rest of a run another run than its beginning."""
    for option, section in SECTION_OF_OPTION.items():
        now, before = (
            getattr(getattr(config, section), option) for config in (loaded.config, saved)
        )
        if now != before and option not in MAY_CHANGE_ON_RESUMING:
            raise ConfigurationInvalid(
                f"{loaded.origins[option]} changes a run that has begun",
                remedy="leave it out, or start a new run with it",
            )


def evaluate(
    run: str | Path,
    *,
    split: str = "test",
    device: DeviceName = "auto",
    emit: events.Emit = lambda event: None,
) -> dict[str, Any]:
    """Try a run's model on a split of its data, as ``finetune evaluate`` does.

    Args:
        run: The run folder.
        split: ``test``, ``validation`` or ``train``.
        device: ``auto``, ``mps``, ``cpu`` or ``cuda``.
        emit: Is called with the events of ``finetune.events``.

    Returns:
        ``accuracy``, ``macro_f1``, ``loss``, ``per_class``, ``confusion_matrix``, ``samples``.
    """
    open_run_folder(Path(run))
    from finetune.pipeline.score import evaluate as evaluate_run

    return evaluate_run(Path(run), split=split, device=device, emit=emit)


def predict(
    run: str | Path,
    texts: Sequence[str],
    *,
    device: DeviceName = "auto",
    emit: events.Emit = lambda event: None,
) -> list[dict[str, Any]]:
    """Classify texts, as ``finetune predict`` does.

    Args:
        run: The run folder.
        texts: In any number; the answers have their order.
        device: ``auto``, ``mps``, ``cpu`` or ``cuda``.
        emit: Is called with the events of ``finetune.events``.

    Returns:
        ``text``, ``label`` and ``probability`` of each.
    """
    open_run_folder(Path(run))
    from finetune.pipeline.predict import load_predictor

    if isinstance(texts, str):
        raise UsageError("a text was given in place of a list of texts", remedy="write [text]")
    return load_predictor(Path(run), device=device, emit=emit)(texts)
