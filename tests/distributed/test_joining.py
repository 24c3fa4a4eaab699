"""Processes that are started again find one another, and not those before them."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from finetune.distributed.joining import store_of_this_start
from finetune.distributed.launch import Launch


def join(store: HashStore, rank: int, *, after_seconds: float = 0) -> bytes:
    """Join as one of two; return what the first has then written for the second."""
    time.sleep(after_seconds)
    own = store_of_this_start(store, Launch(rank, 2), seconds=60)
    if rank == 0:
        own.set("address", f"{time.monotonic()}")
    return own.get("address")


def test_a_process_that_starts_again_waits_for_the_main_one_that_starts_again() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        first = list(threads.map(lambda rank: join(store, rank), range(2)))
        second = list(
            threads.map(lambda rank: join(store, rank, after_seconds=0.3 * (1 - rank)), range(2))
        )
    assert first[0] == first[1] != second[0] == second[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_others_never_come_gives_up(rank: int) -> None:
    with pytest.raises(RuntimeError, match="timeout"):
        store_of_this_start(HashStore(), Launch(rank, 2), seconds=0.1)
