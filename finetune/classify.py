"""Classifies texts with the model in this folder. It needs onnxruntime, tokenizers and numpy.

python classify.py "a text"
python classify.py texts.txt          one text per line; - reads standard input
from classify import Classifier       Classifier().predict(["a text"])
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

BATCH_TOKENS = 512  # in one call of the model; more leave the processor cache
CHUNK_TEXTS = 1024  # within a chunk, texts of similar lengths share a batch
COLUMNS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}


class Classifier:
    """The model of a folder, by default of the folder of this file."""

    def __init__(self, folder: str | Path = Path(__file__).parent) -> None:
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it would be sent to Microsoft
        import onnxruntime

        self.options = json.loads(Path(folder, "inference.json").read_text(encoding="utf-8"))
        self.classes: list[str] = self.options["classes"]
        self.outputs = max(len(self.classes), 1)
        self.tokenizer = Tokenizer.from_file(str(Path(folder, "tokenizer.json")))
        self.tokenizer.no_padding()
        length, stride, side = map(self.options.get, ("max_length", "stride", "truncation_side"))
        self.has_windows = self.options["long_texts"] == "windows"
        # With windows, a longer text becomes several, which overlap by `stride` tokens.
        self.tokenizer.enable_truncation(length, stride=stride * self.has_windows, direction=side)
        settings, file = onnxruntime.SessionOptions(), str(Path(folder, "model.onnx"))
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(file, settings, ["CPUExecutionProvider"])

    def predict(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        min_confidence: float = 0.0,
        all_scores: bool = False,
    ) -> list[dict[str, Any]]:
        """Return the prediction of each text, or of each text and its pair.

        All values of a blank text are None. The label is None if its probability is too low.
        """
        if (pairs is not None) != self.options["reads_pairs"]:
            raise ValueError("the model reads " + ("single texts" if pairs else "pairs of texts"))
        rows = list(zip(texts, strict=True) if pairs is None else zip(texts, pairs, strict=True))
        filled = [number for number, row in enumerate(rows) if all(map(str.strip, row))]
        example = self._read(np.zeros(self.outputs, np.float32), 0.0, all_scores)
        blank = {k: dict.fromkeys(v) if isinstance(v, dict) else None for k, v in example.items()}
        results: list[dict[str, Any]] = [blank] * len(rows)
        for start in range(0, len(filled), CHUNK_TEXTS):
            chunk = filled[start : start + CHUNK_TEXTS]
            for number, logits in zip(chunk, self._logits([rows[i] for i in chunk]), strict=True):
                results[number] = self._read(logits, min_confidence, all_scores)
        return results

    def _logits(self, rows: Sequence[tuple[str, ...]]) -> NDArray[np.float32]:
        """Return the logits of texts or pairs, [rows, outputs]: the mean of their windows."""
        encodings = self.tokenizer.encode_batch_fast([row if row[1:] else row[0] for row in rows])
        texts = [[text, *(text.overflowing if self.has_windows else ())] for text in encodings]
        windows, counts = [*chain.from_iterable(texts)], np.array([*map(len, texts)])
        order = sorted(range(len(windows)), key=lambda number: -len(windows[number]))
        logits = np.empty((len(windows), self.outputs), np.float32)
        while order:
            size = max(1, BATCH_TOKENS // len(windows[order[0]]))
            batch, order = order[:size], order[size:]
            inputs = self._pad([windows[number] for number in batch])
            logits[batch] = self.session.run(["logits"], inputs)[0]
        sums = np.add.reduceat(logits, np.cumsum(counts) - counts, dtype=np.float64)
        return np.asarray(sums / counts[:, None], np.float32)

    def _pad(self, encodings: Sequence[Any]) -> dict[str, NDArray[np.int64]]:
        """Return the inputs of the model, each [encodings, longest]."""
        padding = dict(zip(COLUMNS, [*self.options["padding"], 0], strict=True))
        arrays, longest = {}, max(map(len, encodings))
        for name in (value.name for value in self.session.get_inputs()):
            array = np.full((len(encodings), longest), padding[name], np.int64)
            for row, encoding in enumerate(encodings):
                first = longest - len(encoding) if self.options["pads_left"] else 0
                array[row, first : first + len(encoding)] = getattr(encoding, COLUMNS[name])
            arrays[name] = array
        return arrays

    def _read(
        self, logits: NDArray[np.float32], min_confidence: float, all_scores: bool
    ) -> dict[str, Any]:
        """Return the prediction of logits, [outputs]."""
        if self.options["task"] == "regression":
            return {"value": float(logits[0])}
        if self.options["task"] == "single":
            powers = np.exp(logits - logits.max())
            scores, best = (powers / powers.sum()).tolist(), int(logits.argmax())
            label = self.classes[best] if scores[best] >= min_confidence else None
            result = {"label": label, "probability": scores[best]}
        else:
            sigmoids = np.exp(-np.logaddexp(0, -logits))
            chosen = sigmoids >= np.array(self.options["thresholds"], np.float32)
            scores = sigmoids.tolist()
            kept = [i for i in np.flatnonzero(chosen) if scores[i] >= min_confidence]
            labels = [self.classes[i] for i in kept] if kept or not chosen.any() else None
            result = {"labels": labels, "label_probabilities": [scores[i] for i in kept]}
        scores_by_class = dict(zip(self.classes, scores, strict=True))
        return result | ({"probabilities": scores_by_class} if all_scores else {})


def read_rows(texts: list[str], pairs: list[str], *, has_pairs: bool) -> Iterator[list[str]]:
    """Yield texts or pairs, from arguments or a file, whose lines have a tab between both."""
    is_file = texts[0] == "-" or texts[0].endswith(".txt") or os.path.isfile(texts[0])
    if pairs or len(texts) > 1 or not is_file:
        yield from ([*row] for row in zip(texts, *([pairs] if has_pairs else []), strict=True))
        return
    with open(0 if texts[0] == "-" else texts[0], encoding="utf-8-sig", newline="\n") as file:
        for line in file:
            text = line.removesuffix("\n").removesuffix("\r")
            yield [*text.partition("\t")[::2]] if has_pairs else [text]


def main() -> None:
    """Classify the texts of the command line, and print a JSON object per text."""
    parser = argparse.ArgumentParser(description="Classify texts.")
    parser.add_argument("texts", nargs="+", help="texts, or a file with one text per line")
    parser.add_argument("--text-pair", action="append", default=[], help="second text of each text")
    parser.add_argument("--min-confidence", type=float, default=0.0, help="else give no label")
    parser.add_argument("--all-scores", action="store_true", help="print all probabilities")
    options = vars(parser.parse_args())
    classifier, texts, pairs = Classifier(), options.pop("texts"), options.pop("text_pair")
    rows = read_rows(texts, pairs, has_pairs=classifier.options["reads_pairs"])
    with open(1, "w", encoding="utf-8", closefd=False) as output:
        while chunk := list(islice(rows, CHUNK_TEXTS)):
            predictions = classifier.predict(*zip(*chunk, strict=True), **options)
            for row, prediction in zip(chunk, predictions, strict=True):
                line = dict(zip(("text", "text_pair"), row, strict=False)) | prediction
                output.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
