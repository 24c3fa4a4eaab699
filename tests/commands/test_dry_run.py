from pathlib import Path
from typing import Any

import pytest
from tiny_runs import QUICK, run_tiny

from finetune.commands import run as api
from finetune.errors import DataNotFound, FinetuneError, ModelNotFound, RunFolderNotEmpty


def dry_run(**options: Any) -> dict[str, Any]:
    facts = api.dry_run(**(QUICK | options))
    return {**facts.to_json(), "output_dir": facts.output_dir}


def test_a_dry_run_reports_what_the_run_does(tiny_folder: Path, tmp_path: Path) -> None:
    options = {"train_layers": 1, "num_train_epochs": 1.5}
    facts = dry_run(model=str(tiny_folder), output_dir=str(tmp_path / "run"), **options)
    assert list(tmp_path.iterdir()) == []
    results = run_tiny(tmp_path / "run", model=tiny_folder, **options)
    same = results.keys() & facts.keys() - {"schema_version"}
    assert same >= {"mode", "device", "trained_parameters", "real_token_share", "output_dir"}
    assert {name: facts[name] for name in same} == {name: results[name] for name in same}
    assert facts["total_steps"] / facts["steps_per_epoch"] == results["epoch"]
    assert facts["rows"]["train"] == results["train_samples"]
    assert sum(facts["batches_by_width"].values()) == facts["steps_per_epoch"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "no/such/folder"}, ModelNotFound),
        ({"data": "trec", "data_dir": "no/such/folder"}, DataNotFound),
        ({"output_dir": "the finished run"}, RunFolderNotEmpty),
    ],
)
def test_a_dry_run_fails_where_the_run_would(
    options: dict[str, str],
    error: type[FinetuneError],
    tiny_folder: Path,
    finished_run: Path,
) -> None:
    if "output_dir" in options:
        options = {"output_dir": str(finished_run)}
    with pytest.raises(error):
        dry_run(**({"model": str(tiny_folder)} | options))
