"""Runs whose files somebody has edited, stopped ones and finished ones: no edit goes unnoticed."""

import random
import shutil
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from tiny_runs import Command, run_tiny

import finetune
from finetune.commands.resuming import Work, choose_work
from finetune.config.load import load_config
from finetune.config.schema import OPTIONS
from finetune.errors import ConfigurationInvalid, DataDiffers, FinetuneError, Interrupted, NotARun
from finetune.events import Event, Info, Step
from finetune.runs.digests import check_files
from finetune.runs.folder import RunFolder

SHORT: dict[str, Any] = {"max_train_samples": 32, "seed": 5}


def edit(option: str, before: Any) -> Any:
    """Return another valid value of an option."""
    hint = OPTIONS[option].type
    literal = next((one for one in (hint, *get_args(hint)) if get_origin(one) is Literal), None)
    choices = get_args(literal)
    if choices:
        return next(one for one in choices if one != before)
    if isinstance(before, bool) or hint in (bool, bool | None):
        return not before
    if isinstance(before, float):
        return before / 2 + 0.01
    if isinstance(before, int):
        return before + 1
    other = "4GiB" if option == "memory" else "other"
    return other if hint in (str, str | None) else 7


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run of four steps with checkpoints after the first three."""
    run = tmp_path_factory.mktemp("runs") / "stopped"

    def stop(event: Event) -> None:
        if isinstance(event, Step) and event.step == 4:
            raise KeyboardInterrupt

    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 4, "emit": stop}
    with pytest.raises(Interrupted):
        run_tiny(run, model=tiny_folder, **SHORT, **options)
    return run


# They are refused for want of the option that they go with.
CONTRADICTING = {
    *("focal_gamma", "texts_file", "lora_alpha", "lora_dropout", "lora_targets", "merge")
}


@pytest.mark.parametrize("option", OPTIONS)
def test_an_edited_option_of_a_stopped_run_is_refused_or_named(
    option: str, stopped_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(stopped_run, tmp_path / "run")
    content = yaml.safe_load((run / "config.yaml").read_text())
    options = content[OPTIONS[option].section]
    before, after = options[option], edit(option, options[option])
    options[option] = after
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    emitted: list[Event] = []
    words = f"{option} is {after}, and was {before}"
    if OPTIONS[option].resumable:
        choose_work(Work(load_config().config), run, emit=emitted.append)
        assert [words in event.message for event in emitted if isinstance(event, Info)] == [True]
    else:
        with pytest.raises(ConfigurationInvalid) as refused:
            choose_work(Work(load_config().config), run, emit=emitted.append)
        assert words in refused.value.message or option in CONTRADICTING
        assert str(before) in refused.value.remedy or option in CONTRADICTING


def test_a_stopped_run_without_its_manifest_is_refused(stopped_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stopped_run, tmp_path / "run")
    (run / "manifest.json").unlink()
    with pytest.raises(NotARun, match=r"manifest\.json"):
        finetune.run(resume_from_checkpoint=run)


def test_the_checkpoint_that_is_named_is_resumed(stopped_run: Path, tmp_path: Path) -> None:
    run, emitted = shutil.copytree(stopped_run, tmp_path / "run"), list[Event]()
    finetune.run(resume_from_checkpoint=run / "checkpoints" / "step-2", emit=emitted.append)
    assert [event.step for event in emitted if isinstance(event, Step)] == [3, 4]


@pytest.mark.parametrize("name", ["best", "best-2", "step-99", "step-2x"])
def test_a_checkpoint_that_is_not_there_is_refused(name: str, stopped_run: Path) -> None:
    with pytest.raises(NotARun, match=f"no checkpoint .*{name}") as refused:
        finetune.run(resume_from_checkpoint=stopped_run / "checkpoints" / name)
    assert "step-3, step-2, step-1" in refused.value.remedy


def test_a_named_checkpoint_that_is_damaged_is_not_replaced_by_another(
    stopped_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(stopped_run, tmp_path / "run")
    (run / "checkpoints" / "step-2" / "model.safetensors").write_bytes(b"half")
    with pytest.raises(FinetuneError, match="step-2 is damaged"):
        finetune.run(resume_from_checkpoint=run / "checkpoints" / "step-2")


def files_of(run: Path) -> list[Path]:
    return sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())


@pytest.mark.slow
def test_random_edits_of_every_file_of_a_finished_run_are_noticed(
    finished_run: Path, tmp_path: Path
) -> None:
    run, rng = shutil.copytree(finished_run, tmp_path / "run"), random.Random(0)
    for name in files_of(finished_run):
        whole = (run / name).read_bytes()
        for _ in range(100):
            edited, place = bytearray(whole), rng.randrange(len(whole))
            match rng.randrange(4):
                case 0:
                    edited[place] ^= rng.randrange(1, 256)
                case 1:
                    del edited[place : place + rng.randrange(1, 9)]
                case 2:
                    edited[place:place] = rng.choice([b" ", b"\n", b"0", b"NaN"])
                case 3:
                    edited = edited[:place]
            if edited != whole:
                (run / name).write_bytes(edited)
                with pytest.raises(DataDiffers):
                    check_files(RunFolder(run), in_full=True)
        (run / name).write_bytes(whole)
    check_files(RunFolder(run), in_full=True)


LINES = ("predict {} Who?", "evaluate {}", "report {}", "compare {} {other}",
         "push {} a/b --dry-run", "export onnx {}", "run --resume-from-checkpoint {}",
         "run --num-train-epochs 9 --resume-from-checkpoint {}")  # fmt: skip


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("file", ["all_results.json", "model/tokenizer.json"])
def test_every_command_names_the_file_that_was_edited(
    line: str, file: str, command: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    with (run / file).open("a") as opened:
        opened.write(" ")
    words = line.format(run, other=finished_run).split()
    command(*words).assert_refused(3, f"finished: {file}", "--accept-changes")


def test_changes_that_are_accepted_are_the_run(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    with (run / "model" / "README.md").open("a") as opened:
        opened.write("My words.\n")
    push = ("push", run, "a/b", "--dry-run")
    command(*push).assert_refused(3, "README.md")
    assert command(*push, "--accept-changes").code == 0
    assert command(*push).code == 0
    assert (run / "model" / "README.md").read_text().endswith("My words.\n")


@pytest.mark.parametrize("line", ["compare {} {other}", "run --resume-from-checkpoint {}"])
def test_changes_are_accepted_where_runs_are_compared_or_resumed(
    line: str, command: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    (run / "environment.json").write_text("{}")
    words = line.format(run, other=finished_run).split()
    command(*words).assert_refused(3, "environment.json", "--accept-changes")
    outcome = command(*words, "--accept-changes")
    assert outcome.code == 0, outcome.errors
    assert command(*words).code == 0


def test_a_new_run_has_no_changes_to_accept(command: Command) -> None:
    command("run", "--accept-changes").assert_refused(2, "--resume-from-checkpoint")


def test_weights_are_read_in_full_where_they_leave_the_machine(
    command: Command, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    weights = run / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    command("push", run, "a/b", "--dry-run").assert_refused(3, "model.safetensors")
    command("evaluate", run).assert_refused(3, "model.safetensors")
