"""A function whose kernels are launched together, as one CUDA graph for each shape."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from finetune.devices.base import CapturedFunction, Tensors

Shapes = tuple[tuple[tuple[str, torch.Size], ...], ...]


@dataclass(frozen=True)
class _Graph:
    """A captured call, with the tensors that it reads and writes at fixed addresses."""

    graph: torch.cuda.CUDAGraph
    arguments: Sequence[Tensors]
    result: torch.Tensor

    def replay(self, arguments: Sequence[Tensors]) -> torch.Tensor:
        for mine, given in zip(self.arguments, arguments, strict=True):
            for name, tensor in mine.items():
                tensor.copy_(given[name])
        self.graph.replay()
        return self.result.clone()


class CudaGraphs(CapturedFunction):
    """Calls a function as a CUDA graph: a small model's step is bound by its launches.

    The first call is left to the caller: it makes what libraries make once, such as cuBLAS's
    workspace, which a capture can't. All graphs share a memory pool, so that they need no more
    memory than the largest; the first shape should therefore be the largest.

    Args:
        function: What is captured. It may change tensors that stay where they are, and must not
            depend on numbers of the host that change.
        is_out_of_memory: Whether an error says so; such an error is raised.
    """

    def __init__(
        self,
        function: Callable[[Sequence[Tensors]], torch.Tensor],
        *,
        is_out_of_memory: Callable[[BaseException], bool],
    ) -> None:
        self._function = function
        self._is_out_of_memory = is_out_of_memory
        self._graphs: dict[Shapes, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # The allocator gives freed memory only to the stream that had it.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._is_warm = False
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the function can't be captured, or None."""
        return self._failure

    def prepare(self, arguments: Sequence[Tensors]) -> Callable[[], torch.Tensor] | None:
        """Capture a call if its shapes are new; return what makes it, or None."""
        if self._failure is not None or not self._is_warm:
            self._is_warm = True
            return None
        shapes = _shapes(arguments)
        if shapes not in self._graphs:
            try:
                self._graphs[shapes] = self._capture(arguments)
            except RuntimeError as error:
                if self._is_out_of_memory(error):
                    raise
                self.clear()
                self._failure = str(error).partition("\n")[0]
                return None
        graph = self._graphs[shapes]
        return lambda: graph.replay(arguments)

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._is_warm = False

    def _capture(self, arguments: Sequence[Tensors]) -> _Graph:
        mine = [{name: one.clone() for name, one in each.items()} for each in arguments]
        # What the cache holds is of no use to the graphs' pool.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # A capture that fails would leave the generator waiting for its end.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = self._function(mine)
                # An operation that can't be captured may show here alone.
                graph.capture_end()
            # Whatever it is: with an open capture nothing could be saved.
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                generator.graphsafe_set_state(random_state)
                raise
        return _Graph(graph, mine, result)


def _shapes(arguments: Sequence[Tensors]) -> Shapes:
    return tuple(tuple((name, one.shape) for name, one in each.items()) for each in arguments)
