"""How many bytes of tensors are alive while training runs.

Under ``FakeTensorMode`` tensors have shapes and no values, so that a step of any size runs
within a second and without the memory. PyTorch's own ``MemTracker`` fails on frozen parameters and
takes 12 seconds a step.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follow every storage from the operation that makes it until the last tensor on it dies.

    Attributes:
        live_bytes: Of the storages alive now, of those made while the mode was on.
        peak_bytes: The most that ``live_bytes`` has been since ``reset_peak``. Operations allocate
            within themselves as well, which is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alive: set[int] = set()

    def reset_peak(self) -> None:
        """Follow the peak from now on."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address not in self._alive:
            size_bytes = storage.nbytes()
            self._alive.add(address)
            self.live_bytes += size_bytes
            weakref.finalize(storage, self._forget, address, size_bytes)

    def _forget(self, address: int, size_bytes: int) -> None:
        self._alive.remove(address)
        self.live_bytes -= size_bytes
