"""What every source of data becomes: a table of texts and their classes."""

from collections.abc import Sequence

from datasets import ClassLabel, Dataset, Features, Value


def make_table(texts: Sequence[str], labels: Sequence[str], *, classes: Sequence[str]) -> Dataset:
    """Return a table with the columns ``text`` and ``label``.

    Args:
        texts: One a row.
        labels: Class of each text, by name.
        classes: Names of all classes; a label is stored as the position of its name.
    """
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(classes))})
    return Dataset.from_dict({"text": list(texts), "label": list(labels)}, features=features)
