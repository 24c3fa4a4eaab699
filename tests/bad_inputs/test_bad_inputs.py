"""Each way to pass bad input leads to an exit code and a two-line error, and writes no files.

Tests in other folders check the wording.
"""

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_runs import Command, finetune_in_a_child, flags

YAML: dict[str, bytes] = {
    "no sections": b"seed: 1",
    "a list": b"- seed",
    "unknown option": b"training: {sead: 1}",
    "duplicate key": b"training: {seed: 1, seed: 2}",
    "tag of Python": b"training: !!python/object/apply:os.system [ls]",
    "unclosed": b"training: {seed: 1",
    "not UTF-8": b"training: {seed: \xff}",
    "deep": b"[" * 5000,
    "circular": b"training: &all\n  seed: *all",
    "another section": b"data: {seed: 1}",
    "a list of names": b"data: {data: [trec]}",
    "a mapping": b"output: {output_dir: {name: runs}}",
    "large": b"#" * (2**20 + 1),
}

ENVIRONMENT = {
    "FINETUNE_SEED": "x",
    "FINETUNE_SEEED": "1",
    "FINETUNE_LEARNING_RATE": "",
    "FINETUNE_MODEL__MODEL": "minilm",
}

ROWS = "".join(f"text number {number},{'ab'[number % 2]}\n" for number in range(40))
FILES: dict[str, bytes] = {
    "only a header.csv": b"text,label\n",
    "texts missing.csv": b"text,label\n" + b",a\n,b\n" * 20,
    "ragged.csv": f"text,label\n{ROWS}too,many,fields\n".encode(),
    "NUL.csv": f"text,label\n{ROWS}a\0b,a\n".encode(),
    "binary.csv": bytes(range(256)) * 20,
    "UTF-16 cut.csv": f"text,label\n{ROWS}".encode("utf-16")[:-1],
    "gzip.csv": b"\x1f\x8b\x08\0" + bytes(60),
    "cut.jsonl": b'{"text": "a", "label": "b"}\n{"text": "a", "la',
    "nested.jsonl": b'{"text": {"en": "hello"}, "label": {"is": "a"}}\n' * 20,
    "not UTF-8.jsonl": b'{"text": "\xff\xfe\xfd", "label": "a"}\n' * 20,
    "unknown format.xlsx": b"PK\x03\x04",
}

TABLES: dict[str, Any] = {
    "no rows": pa.table({"text": pa.array([], pa.string()), "label": pa.array([], pa.string())}),
    "all null": pa.table({"text": [None] * 9, "label": [None] * 9}),
    "lists": pa.table({"text": [["a"], ["b"]] * 9, "label": [["c"], ["d"]] * 9}),
}

# A file in the model folder and its content, or None if the file is missing.
MODELS: list[tuple[str, bytes | None]] = [
    ("config.json", None),
    ("config.json", b"{}"),
    ("config.json", b'{"model_type": "no_such_model"}'),
    ("config.json", b'{"model_type": "gpt2"}'),
    ("config.json", b'{"model_type": "bert", "hidden_size": "wide"}'),
    ("config.json", b'{"model_type": "bert", "quantization_config": {"quant_method": "gptq"}}'),
    ("config.json", b'{"model_type": "bert", "auto_map": {"AutoModel": "evil.Model"}}'),
    ("model.safetensors", None),
    ("model.safetensors", b"\xff" * 100),
    ("model.safetensors", b"\x80\x04}q\x00."),
    ("tokenizer.json", None),
    ("tokenizer.json", b'{"model": {"type": "WordPiece", "vocab": {}}}'),
    ("tokenizer_config.json", b"{"),
    ("tokenizer_config.json", b'{"model_max_length": 2, "pad_token": "[PAD]"}'),
]

# A file in a finished run, its content or None, and the command that reads it.
RUNS: list[tuple[str, bytes | None, str]] = [
    ("config.yaml", None, "evaluate"),
    ("config.yaml", b"\xff", "predict"),
    ("manifest.json", b'{"sources": [], "splits": {}}', "evaluate"),
    ("all_results.json", b"{}", "run"),
    ("predictions.jsonl", None, "report"),
    ("predictions.jsonl", b'{"label": "no such class"}\n', "report"),
    ("metrics.jsonl", None, "report"),
    ("metrics.jsonl", b"[1]\n", "report"),
    ("metrics.jsonl", b'{"kind": "step", "step": "x", "loss": "y"}\n', "report"),
    ("environment.json", b"3", "report"),
    ("warnings.jsonl", b'{"message": 3}\n', "report"),
    ("all_results.json", b"[]", "report"),
    ("model/config.json", b"[]", "predict"),
    ("model/config.json", b'{"id2label": 3}', "predict"),
    ("model/inference.json", b'{"max_length": -5, "stride": -1}', "predict"),
    ("model/tokenizer_config.json", b"[]", "predict"),
    ("model/tokenizer.json", b"{}", "predict"),
    ("manifest.json", b"[]", "evaluate"),
    ("model/config.json", None, "predict"),
    ("model/config.json", b'{"id2label": {"1": "a"}}', "evaluate"),
    ("model/model.safetensors", b"half", "predict"),
]


def read_files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the working directory of the command."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def expect_rejection(command: Command, folder: Path, code: int, *arguments: str | Path) -> None:
    """Expect an exit code and a two-line error, and unchanged files."""
    before = read_files(folder)
    command(*arguments).assert_rejected(code)
    assert read_files(folder) == before


@pytest.mark.parametrize(
    "line", ["evaluate {}", "predict --output {} {} text", "run --data questions --output-dir {}"]
)
def test_file_name_that_is_too_long_is_rejected(line: str, command: Command, folder: Path) -> None:
    expect_rejection(command, folder, 2, *line.format("n" * 300, "n" * 300).split())


@pytest.mark.parametrize("line", ["run --num-train-epochs 0", "predict . --format xml"])
def test_invalid_option_is_rejected_in_a_child_process(line: str, folder: Path) -> None:
    child = finetune_in_a_child(*line.split())
    assert (child.returncode, child.stdout) == (2, "")
    error, remedy = child.stderr.splitlines()
    assert error.startswith("error: ")
    assert remedy.startswith("  try: ")


@pytest.mark.parametrize("name", YAML)
def test_invalid_config_file_is_rejected(name: str, command: Command, folder: Path) -> None:
    (folder / "mine.yaml").write_bytes(YAML[name])
    expect_rejection(command, folder, 2, "run", "--config", "mine.yaml")


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_invalid_environment_variable_is_rejected(
    variable: str, command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, ENVIRONMENT[variable])
    expect_rejection(command, folder, 2, "config", "show")


@pytest.mark.parametrize("name", [*FILES, *TABLES])
def test_invalid_data_file_is_rejected(name: str, command: Command, folder: Path) -> None:
    if name in FILES:
        (folder / name).write_bytes(FILES[name])
    else:
        pq.write_table(TABLES[name], folder / name)
    expect_rejection(command, folder, 3, "data", "check", "--data", name)


@pytest.mark.parametrize(("file", "content"), MODELS)
def test_damaged_model_folder_is_rejected(
    file: str, content: bytes | None, command: Command, tiny_folder: Path, folder: Path
) -> None:
    shutil.copytree(tiny_folder, folder / "model")
    write(folder / "model" / file, content)
    expect_rejection(command, folder, 2, "run", "--model", "model", *flags())


@pytest.mark.parametrize(("file", "content", "verb"), RUNS)
def test_damaged_run_folder_is_rejected(
    file: str, content: bytes | None, verb: str, command: Command, finished_run: Path, folder: Path
) -> None:
    shutil.copytree(finished_run, folder / "run")
    write(folder / "run" / file, content)
    arguments = {
        "run": ("run", "--resume-from-checkpoint", "run"),
        "evaluate": ("evaluate", "run", "--device", "cpu"),
        "predict": ("predict", "run", "Who ?", "--device", "cpu"),
        "report": ("report", "run"),
    }
    expect_rejection(command, folder, 2, *arguments[verb])


def write(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
