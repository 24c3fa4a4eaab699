from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Command, flags, have_same_bits, weights_of

import finetune
from finetune.errors import ConfigurationInvalid, UsageError
from finetune.files import read_json


def test_the_package_offers_its_verbs_and_nothing_that_is_not_there() -> None:
    assert {"run", "evaluate", "predict"} <= set(finetune.__all__)
    assert all(callable(getattr(finetune, name)) for name in finetune.__all__)
    with pytest.raises(AttributeError, match="fine_tune"):
        finetune.fine_tune  # noqa: B018


def test_run_is_the_command(
    tiny_folder: Path, finished_run: Path, tmp_path: Path, command: Command
) -> None:
    outcome = command("run", "--model", tiny_folder, "--output-dir", tmp_path / "run", *flags())
    assert outcome.code == 0, outcome.errors
    assert have_same_bits(weights_of(tmp_path / "run"), weights_of(finished_run))


def test_run_takes_a_file_with_options_on_top_and_returns_what_it_writes(
    tiny_folder: Path, tmp_path: Path
) -> None:
    file, run = tmp_path / "mine.yaml", tmp_path / "run"
    file.write_text("data: {data: questions}\ntraining: {max_steps: 5, seed: 3}")
    paths: dict[str, Any] = {"model": tiny_folder, "output_dir": run}
    results = finetune.run(
        file, device="cpu", max_steps=1, assignments=["data.max_train_samples=16"], **paths
    )
    assert results.output_dir == str(run)
    assert results.to_json() == read_json(run / "all_results.json")
    assert (results.training.train_samples, results.training.epoch) == (16, 1.0)
    assert "seed: 3\n" in (run / "config.yaml").read_text()


@pytest.mark.parametrize("options", [{"batchsize": 8}, {"learning_rte": 1e-5}, {"freeze": True}])
def test_an_option_that_does_not_exist_is_refused_before_any_work(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationInvalid, match=r"unknown option .* finetune.run\(\)"):
        finetune.run(**options)


def test_a_wrong_value_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigurationInvalid, match="batch_size"):
        finetune.run(batch_size=0)


def test_an_unknown_device_is_answered_with_those_that_there_are() -> None:
    device: Any = "tpu"
    with pytest.raises(UsageError, match="tpu"):
        finetune.run(device=device)
