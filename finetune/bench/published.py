"""What others have published, to be shown beside what is measured and never among it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedRow:
    """A row of the article's table.

    Args:
        mode: What trained; the head alone is the classifier over a frozen encoder.
        device: As the article calls it.
        batch_size: Rows of an update.
        rows_per_second: As published, though a thousand rows in 18 minutes are fewer.
        duration: Of a pass over a thousand rows of 512 tokens.
    """

    mode: str
    device: str
    batch_size: int
    rows_per_second: float
    duration: str


ARTICLE_SOURCE = (
    "published in May 2022, not measured here: the article on TREC, on a MacBook Pro with a base "
    "M1 and 8 GB; with all of the model in training a batch of 1 was the largest that fitted MPS"
)
ARTICLE_ROWS = (
    PublishedRow("full", "CPU", 32, 0.69, "24 min 13 s"),
    PublishedRow("full", "MPS", 1, 1.25, "about 18 min"),
    PublishedRow("head only", "CPU", 64, 1.95, "8 min 32 s"),
    PublishedRow("head only", "MPS", 64, 4.18, "3 min 59 s"),
)
ARTICLE_INFERENCE_SOURCE = "published by the same article, not measured here"
ARTICLE_INFERENCE = {8: (0.079, 0.189), 64: (0.547, 0.345), 256: (3.69, 1.56)}
"""Seconds of a batch on the CPU and on MPS, by batch size."""
APPLE_SOURCE = (
    "Apple published a chart of speed-ups over the CPU in May 2022 (pytorch.org, Introducing "
    "Accelerated PyTorch Training on Mac), measured on a Mac Studio with an M1 Ultra; it names "
    "no numbers, so that none stand here"
)
