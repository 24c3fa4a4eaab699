"""A training step: loss, gradients and the weight update.

The part of a step that needs memory comes first and changes only gradients. If memory runs out, it
is repeated with the same random numbers in smaller micro-batches, and gives the same gradients.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from copy import copy
from functools import partial

import torch
from torch import nn

from finetune import distributed
from finetune.devices.base import BatchSize, Device, move_to_device
from finetune.devices.captured import CapturedFunction, Tensors
from finetune.evaluation.predict import Predictor
from finetune.tasks.base import Task
from finetune.tokenization.examples import Inputs
from finetune.training.micro_batches import MicroBatch
from finetune.training.optimizers import (
    build_optimizer,
    clip_gradients,
    flatten,
    gradients_of,
    make_state,
    set_learning_rate,
    trained_by,
    unflatten,
)
from finetune.training.plan import Plan, contrastive_losses

# Maps fp32 logits, [examples, outputs], and labels to the loss of each example: fp32, [examples].
# A contrastive loss, which compares examples with each other, also reads their loss weights.
Losses = Callable[..., torch.Tensor]
Cut = Callable[[int], Iterable[MicroBatch]]


class Trainer:
    """Trains a model on a device, in place, according to a plan.

    ``head`` contains the head's parameter names. The head and all trainable parameters are kept in
    fp32. With ``frozen_in_bf16``, frozen matrices are stored in bf16, to which autocast would round
    them at every step. In fp16, ``scaler`` scales losses. ``captured`` is a step without its
    learning rate, as CUDA graphs, if the device has them.
    """

    captured: CapturedFunction | None = None

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        task: Task,
        device: Device,
        head: Set[str],
        batch_size: BatchSize | None = None,
        eval_batch_size: BatchSize | None = None,
        frozen_in_bf16: bool = False,
    ) -> None:
        self.model, self.plan, self.task, self.device = model, plan, task, device
        self.losses: Losses = contrastive_losses if plan.method.is_contrastive else task.losses
        self.optimizer = build_optimizer(model, plan, head=head, device=device)
        if frozen_in_bf16 and plan.precision == "bf16":
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and not parameter.requires_grad and name not in head:
                    parameter.data = parameter.data.to(torch.bfloat16)
        move_to_device(model, device.torch_device)
        is_fp16 = plan.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.torch_device.type, enabled=is_fp16)
        self.batch_size = batch_size or BatchSize(1, "batch size", device)
        eval_batch_size = eval_batch_size or self.batch_size
        self.predictor = Predictor(model, device, plan.precision, eval_batch_size)
        if not self.cuda_graph_error:
            # A copy, so that the graphs don't keep the trainer alive.
            self.captured = device.capture(copy(self)._captured_step)

    def step(self, number: int, cut: Cut) -> torch.Tensor:
        """Take a step, numbered from 0. Return its loss, a scalar on the device.

        ``cut`` returns the micro-batches for a batch size. When memory runs out, all ranks halve
        the batch size together. Raise ``BatchDoesNotFitError`` if a single example doesn't fit.
        """
        random_state = self.device.random_state()
        while True:
            try:
                with distributed.oom_on_all_ranks(self.device.memory):
                    finish = self.compute_gradients(cut(self.batch_size.examples))
                break
            except (RuntimeError, MemoryError) as error:
                self.batch_size.raise_unless_smaller_fits(error)
            # Not in the except block, whose traceback keeps the tensors alive.
            self.discard_gradients()
            self.device.set_random_state(random_state)
            self.batch_size.halve()
        set_learning_rate(self.optimizer, self.plan.rate_at(number))
        return finish()

    def take_step(self, number: int, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Take a step with these micro-batches, without repeating it if memory runs out."""
        finish = self.compute_gradients(micro_batches)
        set_learning_rate(self.optimizer, self.plan.rate_at(number))
        return finish()

    def compute_gradients(self, micro_batches: Iterable[MicroBatch]) -> Callable[[], torch.Tensor]:
        """Compute the gradients of a step. Return a function that updates the weights.

        Change only gradients, and wait neither for the device nor for other ranks.
        """
        make_state(self.optimizer)
        if any(parameter.grad is not None for parameter in trained_by(self.optimizer)):
            self.optimizer.zero_grad(set_to_none=True)
        if self.captured:
            micro_batches = list(micro_batches)
            has_windows = any(each.members is not None for each in micro_batches)
            tensors = [each.tensors() for each in micro_batches]
            if not has_windows and (replay := self.captured.prepare(tensors)):
                return replay
        losses = []
        for micro_batch in micro_batches:
            if micro_batch.members is not None and micro_batch.parts:
                loss = self._backward_by_slices(micro_batch)
            else:
                logits = list(map(self.logits, micro_batch.slices()))
                loss = self.loss(torch.cat(logits), micro_batch)
                torch.autograd.backward(self.scaler.scale(loss))
            losses.append(loss.detach())
        loss = torch.stack(losses).sum()
        flat_gradients = None
        if distributed.world_size() > 1:
            # With bf16, gradients have 16 bits anyway, and sending them takes half the bytes.
            dtype = torch.bfloat16 if self.plan.precision == "bf16" else torch.float32
            flat_gradients = flatten(gradients_of(self.optimizer), dtype=dtype)
        else:
            self._clip_gradients()
        return partial(self._change_weights, loss, flat_gradients)

    def _backward_by_slices(self, batch: MicroBatch) -> torch.Tensor:
        """Backpropagate through one example in slices of its windows. Return its loss.

        The first pass computes the logits of all windows, and thus the gradient of the loss with
        respect to each logit. The second pass backpropagates these gradients with the same dropout.
        """
        random_state = self.device.random_state()
        # The graph is not needed, but the second pass must use the same kernels.
        logits = torch.cat([self.logits(inputs).detach() for inputs in batch.slices()])
        loss = self.loss(logits.requires_grad_(), batch)
        [gradient] = torch.autograd.grad(loss, [logits])
        self.device.set_random_state(random_state)
        gradients = torch.split(gradient, [rows for rows, _ in batch.parts])
        for inputs, slice_gradient in zip(batch.slices(), gradients, strict=True):
            slice_loss = (self.logits(inputs) * slice_gradient).sum()
            torch.autograd.backward(self.scaler.scale(slice_loss))
        return loss

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Compute logits in the precision of the run, and return them in fp32."""
        with self.device.autocast(self.plan.precision):
            logits: torch.Tensor = self.model(**inputs).logits
        return logits.float()

    def loss(self, logits: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """Return the weighted sum of example losses: a scalar in fp32."""
        weights, arguments = micro_batch.loss_weights, [micro_batch.labels]
        if self.losses is contrastive_losses:
            arguments.append(weights)
        return (self.losses(micro_batch.aggregate(logits), *arguments) * weights).sum()

    def _change_weights(
        self, loss: torch.Tensor, flat_gradients: torch.Tensor | None
    ) -> torch.Tensor:
        if flat_gradients is not None:
            distributed.all_reduce_sum(loss)
            distributed.all_reduce_sum(flat_gradients)
            unflatten(flat_gradients, gradients_of(self.optimizer))
            self._clip_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _captured_step(self, micro_batches: Sequence[Tensors]) -> torch.Tensor:
        loss = self.compute_gradients(map(MicroBatch.from_tensors, micro_batches))()
        # The next captured shape can reuse the memory of the gradients.
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _clip_gradients(self) -> None:
        self.scaler.unscale_(self.optimizer)
        clip_gradients(self.optimizer, self.plan.max_grad_norm, device=self.device)

    def discard_gradients(self) -> None:
        """Drop the gradients of a step that is not taken."""
        self.optimizer.zero_grad(set_to_none=True)
        # The scaler remembers that gradients were unscaled until a scale is set. It has a scale
        # from the first loss on.
        self.scaler.scale(torch.zeros((), device=self.device.torch_device))
        self.scaler.update(self.scaler.get_scale())
        if self.captured:
            self.captured.clear()

    @property
    def cuda_graph_error(self) -> str | None:
        """Why steps can't be captured as CUDA graphs, or None if they can or needn't be."""
        if self.captured or not self.device.captures:
            return self.captured.failure if self.captured else None
        if self.scaler.is_enabled():
            return "gradients are scaled in fp16"
        if any(getattr(each, "gradient_checkpointing", False) for each in self.model.modules()):
            return "gradient checkpointing repeats random numbers"
        return None

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by name."""
        parameters = self.model.named_parameters()
        return {name: parameter for name, parameter in parameters if parameter.requires_grad}
