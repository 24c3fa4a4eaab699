"""What others have published, to be shown beside what is measured and never among it."""

from finetune.bench.results import BenchTable

ARTICLE_TEXTS = 1000
ARTICLE_TOKENS = 512

_ARTICLE = (
    "Published in May 2022, not measured here: the article on TREC, on a MacBook Pro with a base "
    "M1 and 8 GB"
)
# The article's own rates, though a thousand rows in 18 minutes are fewer.
_TRAINING = BenchTable(
    group="training",
    title="The article's",
    columns=("mode", "device", "batch", "rows/s", f"{ARTICLE_TEXTS:,} rows"),
    rows=(
        ("full", "CPU", "32", "0.69", "24 min 13 s"),
        ("full", "MPS", "1", "1.25", "about 18 min"),
        ("head only: the classifier", "CPU", "64", "1.95", "8 min 32 s"),
        ("head only: the classifier", "MPS", "64", "4.18", "3 min 59 s"),
    ),
    source=f"{_ARTICLE}; with all of the model in training a batch of 1 was the largest that "
    "fitted MPS",
)
_INFERENCE = BenchTable(
    group="inference",
    title="The article's",
    columns=("workload", "phase", "CPU, ms a step", "MPS, ms a step"),
    rows=(
        ("batch 8", "evaluation", "79", "189"),
        ("batch 64", "evaluation", "547", "345"),
        ("batch 256", "evaluation", "3,690", "1,560"),
    ),
    source=_ARTICLE,
)
_APPLE = BenchTable(
    group="apple",
    title="Apple's",
    columns=(),
    rows=(),
    source="Apple published a chart of speed-ups over the CPU in May 2022 (pytorch.org, "
    "Introducing Accelerated PyTorch Training on Mac), measured on a Mac Studio with an M1 Ultra; "
    "it names no numbers, so that none stand here",
)
PUBLISHED = {table.group: table for table in (_TRAINING, _INFERENCE, _APPLE)}
"""By group."""
