"""Functions captured as CUDA graphs."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch

Tensors = Mapping[str, torch.Tensor]
Function = Callable[[Sequence[Tensors]], torch.Tensor]
Shapes = tuple[tuple[tuple[str, torch.Size], ...], ...]


class CapturedFunction:
    """Calls a function as a CUDA graph, because kernel launches limit the speed of small models.

    The caller runs the function once before, to allocate memory that a capture can't, such
    as the cuBLAS workspace. All graphs share a memory pool as large as the largest graph, which
    should be captured first. The function may change tensors in place, and must not depend on
    changing host values. ``failure`` is the reason if the function can't be captured.
    """

    def __init__(
        self, function: Function, *, is_out_of_memory: Callable[[BaseException], bool]
    ) -> None:
        self.failure: str | None = None
        self._function = function
        self._is_out_of_memory = is_out_of_memory
        self._replays: dict[Shapes, Function] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # The allocator gives freed memory only to the stream that had it.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._is_warm = False

    def prepare(self, arguments: Sequence[Tensors]) -> Callable[[], torch.Tensor] | None:
        """Capture the call if its shapes are new. Return a function that replays it.

        Return None if the caller must call the function itself: for this call or, after a
        ``failure``, for all calls. If this method runs out of memory, nothing has changed.
        """
        if self.failure is not None or not self._is_warm:
            self._is_warm = True
            return None
        shapes = tuple(
            tuple((name, tensor.shape) for name, tensor in each.items()) for each in arguments
        )
        if shapes not in self._replays:
            try:
                self._replays[shapes] = self._capture(arguments)
            except RuntimeError as error:
                if self._is_out_of_memory(error):
                    raise
                self.clear()
                self.failure = str(error).partition("\n")[0]
                return None
        replay = self._replays[shapes]
        return lambda: replay(arguments)

    def clear(self) -> None:
        """Drop all captures. Call this before replacing tensors that they change."""
        self._replays.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._is_warm = False

    def _capture(self, arguments: Sequence[Tensors]) -> Function:
        # A graph reads and writes tensors at fixed addresses.
        fixed = [{name: tensor.clone() for name, tensor in each.items()} for each in arguments]
        # The graph pool can't use cached memory.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # After a failed capture, the generator would wait for its end.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = self._function(fixed)
                # Operations that can't be captured may fail only here.
                graph.capture_end()
            # Catch everything: while a capture is open, no checkpoint could be saved.
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                generator.graphsafe_set_state(random_state)
                raise

        def replay(arguments: Sequence[Tensors]) -> torch.Tensor:
            for mine, argument in zip(fixed, arguments, strict=True):
                for name, tensor in mine.items():
                    tensor.copy_(argument[name])
            graph.replay()
            return result.clone()

        return replay
