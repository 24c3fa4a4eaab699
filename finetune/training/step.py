"""An optimizer step: forward, loss, backward, all-reduce, clipping, step.

What needs memory comes first and changes nothing but gradients. If memory runs out there, it is
repeated with the same random numbers in smaller micro-batches, and gives the same gradients.
"""

import os
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from finetune import distributed
from finetune.devices.base import Device, move_to_device
from finetune.devices.batch_size import BatchSize
from finetune.devices.captured import CapturedFunction, Tensors
from finetune.errors import UsageError
from finetune.model.freeze import has_gradient_checkpointing
from finetune.tokenization.examples import Inputs
from finetune.training.contrastive import contrastive_losses
from finetune.training.micro_batches import AnyMicroBatch, MicroBatch, WindowBatch
from finetune.training.optimizers import (
    Hyperparameters,
    Schedule,
    build_optimizer,
    make_state,
    set_learning_rate,
    trained_by,
)

# Logits in fp32, [examples, outputs], and labels give the loss of each example: fp32, [examples].
# A contrastive loss, which compares the examples with each other, reads their loss weights too.
Losses = Callable[..., torch.Tensor]

# Set by ``accelerate launch``. Each process of a run has the whole model.
_SPLIT_MODELS = tuple(f"ACCELERATE_USE_{name}" for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"))
# Biases and norms have fewer numbers: most of a model's tensors, and few of its numbers.
_SMALL_NUMBERS = 2**16


@dataclass(frozen=True)
class TrainingState:
    """A model on its device, in the precision of the run, with the optimizer of what trains.

    In fp16 ``scaler`` scales losses. ``captured`` is a step without its learning rate, as CUDA
    graphs, where the device has them.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: Device
    precision: str
    scaler: torch.amp.GradScaler
    losses: Losses
    hyperparameters: Hyperparameters
    captured: CapturedFunction | None = None

    def step(
        self, number: int, cut: Callable[[int], Iterable[AnyMicroBatch]], batch_size: BatchSize
    ) -> torch.Tensor:
        """Take a step of a number, from 0; return its loss, a scalar on the device.

        ``cut`` gives the micro-batches of at most so many examples. The batch size is halved while
        memory runs out, on all ranks together.

        Raises:
            BatchDoesNotFitError: If not even one example fits.
        """
        random_state = self.device.random_state()
        while True:
            try:
                with distributed.oom_on_all_ranks(self.device.memory):
                    finish = self.compute_gradients(cut(batch_size.examples))
                break
            except (RuntimeError, MemoryError) as error:
                batch_size.raise_unless_smaller_fits(error)
            # Only here: while the error is handled, its traceback keeps the tensors alive.
            self.discard_gradients()
            self.device.set_random_state(random_state)
            batch_size.halve()
        set_learning_rate(self.optimizer, self.schedule.learning_rate_at(number))
        return finish()

    def take_step(self, number: int, micro_batches: Iterable[AnyMicroBatch]) -> torch.Tensor:
        """Take a step of micro-batches as they are, whatever memory there is; return its loss."""
        finish = self.compute_gradients(micro_batches)
        set_learning_rate(self.optimizer, self.schedule.learning_rate_at(number))
        return finish()

    def compute_gradients(
        self, micro_batches: Iterable[AnyMicroBatch]
    ) -> Callable[[], torch.Tensor]:
        """Do all of a step that needs memory; return a function that does the rest.

        It changes nothing but gradients, and waits neither for the device nor for other ranks.
        """
        make_state(self.optimizer)
        if any(one.grad is not None for one in trained_by(self.optimizer)):
            self.optimizer.zero_grad(set_to_none=True)
        if self.captured:
            micro_batches = list(micro_batches)
            tensors = [one.tensors() for one in micro_batches if isinstance(one, MicroBatch)]
            has_windows = len(tensors) < len(micro_batches)
            if not has_windows and (replay := self.captured.prepare(tensors)):
                return replay
        losses = []
        for micro_batch in micro_batches:
            if isinstance(micro_batch, WindowBatch) and len(micro_batch.slice_sizes) > 1:
                loss = self._backward_by_slices(micro_batch)
            else:
                logits = list(map(self.logits, micro_batch.slices()))
                loss = weighted_loss(torch.cat(logits), micro_batch, self.losses)
                torch.autograd.backward(self.scaler.scale(loss))
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        flat_gradients = None
        if distributed.world_size() > 1:
            flat_gradients = self._copy_gradients()
        else:
            self._clip_gradients()
        return partial(self._finish_step, loss, flat_gradients)

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Return the model's logits in fp32, computed in the precision of the run."""
        with self.device.autocast(self.precision):
            logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()

    def _finish_step(self, loss: torch.Tensor, flat_gradients: torch.Tensor | None) -> torch.Tensor:
        if flat_gradients is not None:
            distributed.all_reduce_sum(loss)
            distributed.all_reduce_sum(flat_gradients)
            gradients = self._gradients()
            torch._foreach_copy_(gradients, _views(flat_gradients, gradients))
            self._clip_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _backward_by_slices(self, batch: WindowBatch) -> torch.Tensor:
        """Go backward through one example in slices of its windows; return its loss.

        The first pass gives the logits of all windows, and so the gradient of the loss by each
        logit, from which the second goes backward with the same dropout.
        """
        random_state = self.device.random_state()
        # With a graph, though none is kept: the second pass has to take the same kernels.
        logits = torch.cat([self.logits(inputs).detach() for inputs in batch.slices()])
        loss = weighted_loss(logits.requires_grad_(), batch, self.losses)
        [gradient] = torch.autograd.grad(loss, [logits])
        self.device.set_random_state(random_state)
        gradients = torch.split(gradient, batch.slice_sizes)
        for inputs, of_slice in zip(batch.slices(), gradients, strict=True):
            loss_of_slice = (self.logits(inputs) * of_slice).sum()
            torch.autograd.backward(self.scaler.scale(loss_of_slice))
        return loss

    def _gradients(self) -> list[torch.Tensor]:
        return [one.grad for one in trained_by(self.optimizer) if one.grad is not None]

    def _copy_gradients(self) -> torch.Tensor:
        """Return all gradients end to end, of shape [numbers], for one all-reduce."""
        gradients = self._gradients()
        # In bf16, products give gradients of 16 bits: half as much goes between the devices.
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        flat = gradients[0].new_empty(sum(one.numel() for one in gradients), dtype=dtype)
        torch._foreach_copy_(_views(flat, gradients), gradients)
        return flat

    def _clip_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)
        norm, max_norm = total_norm(self._gradients()), self.hyperparameters.max_grad_norm
        if self.device.fused_adamw_scales_gradients:
            # The kernel divides by it, as by the scale of a GradScaler.
            self.optimizer.grad_scale = (norm / max_norm).clamp(min=1)  # type: ignore[attr-defined]
        else:
            clip_grads_with_norm_(trained_by(self.optimizer), max_norm, norm)

    @property
    def took_last_step(self) -> bool:
        """Whether the last step was taken: in fp16 it isn't if gradients overflow; waits."""
        return not self.scaler.is_enabled() or self.scaler.state_dict()["_growth_tracker"] > 0

    @property
    def cuda_graph_error(self) -> str | None:
        """Why steps are launched operation by operation on a device that has CUDA graphs."""
        if self.captured or not self.device.captures:
            return self.captured.failure if self.captured else None
        if self.scaler.is_enabled():
            return "gradients are scaled in fp16"
        if has_gradient_checkpointing(self.model):
            return "gradient checkpointing repeats random numbers"
        return None

    @property
    def schedule(self) -> Schedule:
        """The learning rate of each step."""
        return self.hyperparameters.schedule

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by name."""
        return {name: one for name, one in self.model.named_parameters() if one.requires_grad}

    def discard_gradients(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self.optimizer.zero_grad(set_to_none=True)
        # The scaler remembers that gradients have been unscaled until a scale is set, which there
        # is from the first loss on.
        self.scaler.scale(torch.zeros((), device=self.device.torch_device))
        self.scaler.update(self.scaler.get_scale())
        if self.captured:
            self.captured.clear()


def prepare_training(
    model: nn.Module,
    *,
    head: Set[str],
    device: Device,
    precision: str,
    losses: Losses,
    hyperparameters: Hyperparameters,
    frozen_in_bf16: bool = False,
) -> TrainingState:
    """Move a model to a device, in place, and give it an optimizer.

    ``head`` has the names of the head's parameters. It and all that trains stay fp32. With
    ``frozen_in_bf16`` other matrices are kept as autocast to bf16 rounds them at every step.
    ``UsageError`` if the user has configured Accelerate to split the model.
    """
    for name in _SPLIT_MODELS:
        if os.environ.get(name, "").lower() in ("true", "1"):
            raise UsageError(
                f"Accelerate is configured to split the model ({name}), which a run does not do",
                remedy="choose multi-GPU or multi-CPU with accelerate config, or use torchrun",
            )
    optimizer = build_optimizer(model, hyperparameters, head=head, device=device)
    if frozen_in_bf16 and precision == "bf16":
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not parameter.requires_grad and name not in head:
                parameter.data = parameter.data.to(torch.bfloat16)
    move_to_device(model, device.torch_device)
    scaler = torch.amp.GradScaler(device.torch_device.type, enabled=precision == "fp16")
    state = TrainingState(model, optimizer, device, precision, scaler, losses, hyperparameters)
    if state.cuda_graph_error:
        return state
    return replace(state, captured=device.capture(partial(_captured_step, state)))


def _captured_step(state: TrainingState, micro_batches: Sequence[Tensors]) -> torch.Tensor:
    loss = state.compute_gradients(map(MicroBatch.from_tensors, micro_batches))()
    # The next captured shape may reuse the gradients' memory.
    state.optimizer.zero_grad(set_to_none=True)
    return loss


def weighted_loss(logits: torch.Tensor, micro_batch: AnyMicroBatch, losses: Losses) -> torch.Tensor:
    """Return the sum of the examples' weighted losses: a scalar in fp32."""
    weights, arguments = micro_batch.loss_weights, [micro_batch.labels]
    if losses is contrastive_losses:
        arguments.append(weights)
    return (losses(micro_batch.aggregate(logits), *arguments) * weights).sum()


def total_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all tensors as one vector: a scalar on their device, not yet read.

    Small tensors are joined first: MPS needs an operation for the norm of each tensor.
    """
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    for tensor in tensors:
        (small if tensor.numel() <= _SMALL_NUMBERS else large).append(tensor)
    joined = [torch.cat([one.reshape(-1) for one in small])] if small else []
    return get_total_norm(joined + large)


def _views(flat: torch.Tensor, shaped: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [one.numel() for one in shaped])
    return [part.view_as(one) for part, one in zip(parts, shaped, strict=True)]
