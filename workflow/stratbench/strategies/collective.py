"""Defines the base of strategies whose workers take every step together.

This module imports torch inside functions only, as `strategies.base` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from stratbench.strategies.base import Strategy, Worker
from stratbench.workload.network.precision import (
    convert_scores_for_loss,
    create_autocast_context,
    get_weights_and_compute_dtypes,
)
from stratbench.workload.tasks import compute_loss_and_weight, divide_or_zero

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from stratbench.cell.settings import Settings
    from stratbench.workload.network.chunked_loss import ChunkedLoss


class Collective(Strategy):
    """Base class of the strategies in which all workers take every step together.

    A subclass wraps the model. Forward, backward, precision and the optimizer's step are the same for all
    strategies, so that a comparison shows the effect of the strategy alone.
    """

    #: Model as the strategy has wrapped it.
    module: nn.Module
    #: Module that a step calls: the wrapped model, compiled if the settings require it.
    compiled: nn.Module
    #: Wrapper that makes the model return its loss instead of scores (setting `loss_chunks`). None: the model
    #: returns scores.
    chunked: ChunkedLoss | None = None

    def wrap(self, model: nn.Module, worker: Worker) -> nn.Module:
        """Return the model wrapped in a module whose forward and backward synchronise the workers."""
        raise NotImplementedError

    def setup(self, model: nn.Module, worker: Worker) -> None:
        self.worker, self.model = worker, model
        # Forward may begin with a wait for another worker's buffers, so no phase is free of waits.
        if any(True for _ in model.buffers()):
            self.own_phases = ()
        if worker.settings.loss_chunks > 1:
            self.chunked = self.make_chunked_loss()
        self.module = self.wrap(model, worker)
        self.compiled = compile_if_requested(self.module, worker.settings)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.local = self.updated_tensors()
        self.optimizer = self.make_optimizer()
        self.reset()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer of the tensors in `self.local`, as the settings define it.

        No other code builds an optimizer. Its state should exist before the first step, as the moments do
        here: the plan assumes that the first step needs the memory of any step.
        """
        kind, settings = self.get_optimizer_class()
        optimizer = kind(self.local, **settings)
        self.create_optimizer_states(optimizer, self.local)
        return optimizer

    def get_optimizer_class(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        """Return the class of the optimizer, and the keyword arguments to construct it."""
        import torch

        s = self.worker.settings
        common = {
            "lr": s.lr,
            "weight_decay": s.weight_decay,
            "foreach": s.optimizer_impl == "foreach",
            # The fused optimizer needs no wait for the loss scaler: its kernels read the overflow flag on the
            # device.
            "fused": s.optimizer_impl == "fused",
        }
        if s.optimizer == "adamw":
            return torch.optim.AdamW, common | {"betas": tuple(s.betas), "eps": s.eps}
        if self.local[0].device.type != "cuda" or any(
            getattr(module, "sparse", False) for module in self.model.modules()
        ):
            common["fused"] = False
        return torch.optim.SGD, common | {"momentum": s.momentum, "nesterov": s.nesterov}

    def create_optimizer_states(
        self, optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor]
    ) -> None:
        """Create the optimizer's state for each of `tensors`, as the optimizer's first step would."""
        import torch

        s = self.worker.settings
        fused = s.optimizer_impl == "fused"
        for t in tensors:
            if s.optimizer == "adamw":
                optimizer.state[t] = {
                    # Fused kernels read the step count on the device, and other implementations on the host.
                    "step": torch.zeros(
                        (), dtype=torch.float32, device=t.device if fused else "cpu"
                    ),
                    "exp_avg": torch.zeros_like(t),
                    "exp_avg_sq": torch.zeros_like(t),
                }
            elif s.momentum:
                # Without this buffer, torch's fused SGD reads uninitialised memory if the loss scaler skips
                # the first step. As in torch, a first step from zero sets the buffer to the gradient.
                optimizer.state[t]["momentum_buffer"] = torch.zeros_like(t)

    def reset(self) -> None:
        self.steps, self.scaler = 0, None
        #: Sums of target weights, one per part of the current batch. Empty if the task has no weights.
        self.part_weights: list[Tensor] = []
        if self.worker.settings.precision == "fp16":
            from stratbench.strategies.scaler import SharedScaler

            parts = self.traits(self.worker.world_size).optimizer_parts
            self.scaler = SharedScaler(self.worker.device, shared=parts is None or parts > 1)

    def updated_tensors(self) -> list[Tensor]:
        """Return the tensors that this rank's optimizer updates: all parameters, or a shard of each."""
        return self.parameters

    def assign_gradients_to_updated_tensors(self) -> None:
        """Assign the gradients to `updated_tensors`, unless these are the parameters themselves."""

    def prepare_update(self) -> None:
        """Set the step's learning rate, and clip the gradients if the settings say so."""
        s = self.worker.settings
        if s.has_changing_lr:
            share = s.compute_lr_factor(self.steps, self.worker.total_steps)
            for group in self.optimizer.param_groups:
                group["lr"] = s.lr * share
        if s.max_grad_norm is not None:
            self.clip_gradients(s.max_grad_norm)

    def clip_gradients(self, norm: float) -> None:
        """Scale the gradients down to the norm `norm` if theirs is larger, without synchronising."""
        from torch.nn.utils import clip_grads_with_norm_

        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        clip_grads_with_norm_(self.local, norm, self.gradient_norm())

    def gradient_norm(self) -> Tensor:
        """Return the Euclidean norm of the full gradient on the device, without synchronising."""
        from torch.nn.utils import get_total_norm

        return get_total_norm(
            [t.grad for t in self.list_tensors_for_gradient_norm() if t.grad is not None]
        )

    def list_tensors_for_gradient_norm(self) -> list[Tensor]:
        """Return the tensors with the gradients that this worker contributes to the total norm.

        If several workers hold a tensor, only one of them counts it.
        """
        return self.local

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with create_autocast_context(self.worker.settings.precision, self.worker.device):
            return self.compute_mean_loss(x, y)

    def compute_mean_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of the (perhaps compiled) model on one batch part."""
        if self.chunked is None:
            return self.compute_batch_part_loss(self.compiled(x), y)
        with self.chunked.replace_scores_by_loss(y):
            return self.compiled(x)

    def make_chunked_loss(self) -> ChunkedLoss:
        """Make the model compute its loss on one chunk of the token positions after another.

        This must be called before the model is wrapped.
        """
        import torch

        from stratbench.workload.network.chunked_loss import ChunkedLoss

        worker = self.worker
        shape = (1, *worker.input_shape)
        tokens = torch.empty(shape, dtype=torch.int64, device=worker.device).zero_()
        return ChunkedLoss(self.model, tokens, worker.settings.loss_chunks, worker.task.loss)

    def compute_batch_part_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of one part of the batch, from which backward computes gradients.

        If the task returns a sum and a weight, each target has the weight 1 here. The true weight of the
        global batch is known only after all workers' last parts. `rescale_by_target_weight` then corrects
        the loss.
        """
        outputs = convert_scores_for_loss(outputs, self.worker.settings.precision)
        loss, weight = compute_loss_and_weight(self.worker.task, outputs, y)
        if weight is None:
            return loss
        from stratbench.telemetry.shards import get_local_shard

        self.part_weights.append(get_local_shard(weight))
        return loss * (
            self.worker.settings.gradient_accumulation_steps
            * self.num_batch_parts
            / self.count_targets(y)
        )

    def count_targets(self, y: Tensor) -> float:
        """Return the number of targets (such as tokens) in a worker's batch.

        Args:
            y: Targets of any samples, which show the number of targets per sample.
        """
        return math.prod(y.shape[1:]) * self.worker.settings.per_worker_batch

    def rescale_by_target_weight(self, loss: Tensor, full_weight: float) -> Tensor:
        """Rescale gradients and loss from a weight of 1 per target to the true weights.

        Afterwards the loss is the sum over the global batch, divided by the sum of its target weights.

        Args:
            loss: Mean loss with a weight of 1 per target.
            full_weight: Sum of the weights of a worker's batch if each target has the weight 1.

        Returns:
            The corrected loss.
        """
        import torch

        from stratbench.workload.torch_internals import multiply_tensors_in_place

        own = torch.zeros((), dtype=torch.float64, device=self.worker.device)
        for weight in self.part_weights:
            own += weight
        self.part_weights.clear()
        factor = divide_or_zero(full_weight, self.average_target_weight_over_replicas(own))
        by_kind: dict[Any, list[Tensor]] = {}
        for gradient in self.list_gradients():
            by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (device, dtype), gradients in by_kind.items():
            multiply_tensors_in_place(gradients, factor.to(device, dtype))
        return loss * factor.to(loss.dtype)

    def average_target_weight_over_replicas(self, own_weight: Tensor) -> Tensor:
        """Return the sum of target weights of a replica's batch, averaged over the replicas.

        `own_weight` is the sum of this worker's batch.
        """
        import torch.distributed as dist

        w = self.worker
        if w.world_size > 1:
            if not w.mesh.reports_replica_results(w.rank):
                own_weight.zero_()
            dist.all_reduce(own_weight)
        return own_weight / w.mesh.replicas

    def list_gradients(self) -> list[Tensor]:
        """Return the gradients that this worker's optimizer will use in its next update."""
        from stratbench.telemetry.shards import get_local_shard

        return [get_local_shard(t.grad) for t in self.local if t.grad is not None]

    def gradients_of(self, x: Tensor, y: Tensor) -> list[Tensor]:
        import torch

        from stratbench.telemetry.shards import get_local_shard

        self.compute_gradients(x, y)
        gradients = [
            torch.zeros_like(get_local_shard(t))
            if t.grad is None
            else get_local_shard(t.grad).clone()
            for t in self.local
        ]
        self.optimizer.zero_grad(set_to_none=True)
        return gradients

    def compute_gradients(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the gradients of `updated_tensors` on a batch, and return the batch's mean loss."""
        parts = self.worker.settings.gradient_accumulation_steps
        loss = (
            self.add_batch_part_gradients(x, y)
            if parts == 1
            else self.accumulate_gradients(x, y, parts)
        )
        self.assign_gradients_to_updated_tensors()
        return (
            self.rescale_by_target_weight(loss, self.count_targets(y))
            if self.worker.has_weighted_loss
            else loss
        )

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.compute_gradients(x, y)
        self.prepare_update()
        self.update()
        self.steps += 1
        return loss

    def update(self) -> None:
        """Update the weights with the gradients, and free the gradients."""
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def accumulate_gradients(self, x: Tensor, y: Tensor, parts: int) -> Tensor:
        """Compute the batch's gradients in equal parts, one after another; return the mean loss.

        Workers exchange gradients only in the last part. Activations need the memory of only one part.

        Args:
            x: Inputs.
            y: Targets.
            parts: Number of parts.
        """
        loss = 0.0
        for part, (own_x, own_y) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True), 1):
            with self.create_sync_context(part == parts):
                loss += self.add_batch_part_gradients(own_x, own_y, parts, part == parts)
        return loss

    def create_sync_context(self, is_last_part: bool) -> AbstractContextManager:
        """Return a context for backward of one batch part. Gradients are exchanged if `is_last_part`."""
        return nullcontext()

    def add_batch_part_gradients(
        self, x: Tensor, y: Tensor, parts: int = 1, is_last_part: bool = True
    ) -> Tensor:
        """Run forward and backward of one batch part; return its share of the mean loss.

        Args:
            x: Inputs.
            y: Targets.
            parts: Number of parts.
            is_last_part: Whether this is the last part.
        """
        mark = self.worker.mark_phase_end
        loss = self.forward(x, y)
        if parts > 1:
            loss = loss / parts
        mark("forward")
        if self.worker.settings.slowdown and is_last_part:
            self.worker.delay_step()
            mark("slowdown")
        self.backward(loss if self.scaler is None else self.scaler.scale(loss))
        mark("backward")
        return loss.detach()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of `loss`; the wrapped model exchanges them between workers."""
        loss.backward()

    def batches(self, order: Tensor, epoch: int) -> Iterator[Tensor]:
        w, s = self.worker, self.worker.settings
        steps = len(order) // s.global_batch
        mine = order[: steps * s.global_batch].view(steps, w.data_workers, self.samples_per_step(s))
        yield from mine[:, w.data_rank]

    def weights_and_buffers(self) -> list[Tensor]:
        return [*self.local, *self.list_changed_frozen_parameters(), *self.model.buffers()]

    def list_training_state_tensors(self) -> list[Tensor]:
        """Return the tensors of this worker's training state, in the same order in every call."""
        import torch

        from stratbench.telemetry.memory import get_optimizer_state

        state = get_optimizer_state(self.optimizer)
        entries = [state[t] for t in self.local if t in state]
        states = [entry[name] for entry in entries for name in sorted(entry)]
        others = [t for t in [*states, *self.extra_state()] if torch.is_tensor(t)]
        return [t.detach() for t in [*self.weights_and_buffers(), *others]]

    def export_step_counts(self) -> dict[str, Any]:
        """Return the step count since `reset` and the loss scaler's state as JSON values."""
        scale = None if self.scaler is None else self.scaler.export_step_counts()
        return {"steps": self.steps, "scale": scale}

    def load_step_counts(self, counts: dict[str, Any]) -> None:
        """Restore the values that `export_step_counts` returned. Call this after `reset`."""
        self.steps = counts["steps"]
        if self.scaler is not None:
            self.scaler.load_step_counts(counts["scale"])

    def optimizer_dtype(self) -> str | None:
        """Return the dtypes of the optimizer's moments as text. None if it has no moments."""
        from stratbench.telemetry.memory import get_optimizer_state

        state = get_optimizer_state(self.optimizer).items()
        moments = (v for t, entry in state for v in entry.values() if v.shape == t.shape)
        return ", ".join(list_dtype_names(moments)) or None

    def report(self) -> dict[str, Any]:
        s, skipped = (
            self.worker.settings,
            0 if self.scaler is None else self.scaler.count_skipped_steps(),
        )
        return {
            "details": {"skipped_steps": skipped, "optimizer_dtype": self.optimizer_dtype()}
            | get_weights_and_compute_dtypes(s.precision, self.worker.device),
            "evaluated_on": self.evaluated_on,
            "updates_applied": self.steps - skipped,
        }


def compute_norm_over_shards(
    norm: Tensor, workers: int, group: ProcessGroup | None = None
) -> Tensor:
    """Return the norm of a vector of which each worker holds a shard. All workers must call this.

    Args:
        norm: Norm of this worker's shard.
        workers: Number of workers.
        group: Process group of the workers.
    """
    if workers == 1:
        return norm
    import torch.distributed as dist

    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def list_dtype_names(tensors: Iterable[Tensor]) -> list[str]:
    """Return the names of the tensors' dtypes, sorted and without repetition."""
    return sorted({str(t.dtype).removeprefix("torch.") for t in tensors})


def compile_if_requested(module: nn.Module, s: Settings) -> nn.Module:
    """Return the module, compiled by torch.compile if the setting `compile` is true.

    As PyTorch recommends, the wrapped module is compiled: DDP's buckets divide the graph (DDPOptimizer), and
    FSDP's hooks are between the graphs of its groups. All batches of a training have one shape. The evaluated
    module is the original, which is not compiled. Compilation happens in the first call.
    """
    if not s.compile:
        return module
    import torch

    from stratbench.workload.torch_internals import configure_compiler

    configure_compiler()
    return torch.compile(module, dynamic=False)


def describe_ring_traffic(sent_bytes: float) -> dict[str, Any]:
    """Return the entries of `Strategy.communication` for collectives by rings.

    A worker receives as many bytes as it sends.

    See Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return {
        "method": "ring",
        "sent_bytes_per_step": sent_bytes,
        "received_bytes_per_step": sent_bytes,
    }
