"""`zero1` and `zero1-torch`: each worker has a shard of the optimizer's state only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.cell.options import option
from stratbench.cell.text.words import format_names
from stratbench.strategies import base, collective, refusals
from stratbench.strategies.ddp import DDP
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Bucket:
    """Flat tensors of some parameters and their gradients, with one equal part per worker.

    The parameters are views of `weights`. `weights` and `grads` have shape [n], where the number of workers
    divides n. `own_weights` and `own_grads` are this worker's part of them, shape [n / workers]. The padding
    stays zero.
    """

    def __init__(self, parameters: list[nn.Parameter], rank: int, workers: int) -> None:
        import torch

        from stratbench.workload.flat import (
            ALIGN_BYTES,
            compute_element_offsets_and_count,
            copy_into_flat_tensor,
            view_part_of_flat_tensor,
        )

        starts, numel = compute_element_offsets_and_count(parameters)
        unit = workers * max(1, ALIGN_BYTES // parameters[0].element_size())
        numel = -(-numel // unit) * unit
        self.weights = torch.zeros(numel, dtype=parameters[0].dtype, device=parameters[0].device)
        self.grads = torch.zeros_like(self.weights)
        share = numel // workers
        self.own_weights = self.weights.narrow(0, rank * share, share)
        self.own_grads = self.grads.narrow(0, rank * share, share)
        self.views = {
            p: view_part_of_flat_tensor(p, self.grads, start)
            for p, start in zip(parameters, starts, strict=True)
        }
        for p, start in zip(parameters, starts, strict=True):
            p.data = copy_into_flat_tensor(p.data, self.weights, start)
        #: Parameters whose gradient in this step is not yet complete in `grads`.
        self.missing = set(parameters)
        #: Whether the bucket's gradients of this step are being reduced or are reduced already.
        self.sent = False


class ZeRO1(collective.Collective):
    """Stage 1 of ZeRO (Rajbhandari et al., SC 2020), which shards the optimizer's state.

    It sends as much as DDP. Parameters and gradients are in flat buckets, which are divided into one equal
    part per worker, wherever a tensor ends. When backward has filled a bucket, the bucket is reduce-scattered
    while backward continues: each worker gets the mean of its part. After a worker has updated its parts, all
    parts are gathered, which no computation hides. BatchNorm is as in DDP: the running statistics of rank 0
    are broadcast before every step, and are evaluated.
    """

    family = "replicas"
    summary: ClassVar[str] = "replicas, optimizer state sharded element by element"
    rigid = base.STATE_IN_PARTS
    begins_anew = None
    buffers_note, evaluated_on = DDP.buffers_note, DDP.evaluated_on
    updates_by_zeros = True
    collectives = ("reduce_scatter", "all_gather", "broadcast", "all_reduce")
    own_phases = base.BEFORE_BACKWARD
    rule: ClassVar[str] = (
        "As ddp, but each worker has the velocity of its share of W and updates only this share; g is "
        "averaged to its share while backward runs, W is gathered after the update"
    )
    breakdown_note: ClassVar[str] = (
        "reducing gradients begins inside backward; the part that backward does not hide, and gathering "
        "parameters, are in the optimizer's phase; the broadcast of BatchNorm's statistics is inside forward"
    )

    @dataclass(frozen=True)
    class Options(base.Options):
        bucket_cap_mb: int = option(25, "size of a bucket in MiB", least=1)

    def traits(self, gpus: int) -> base.Traits:
        return base.Traits(
            is_synchronous_on_one_worker=True,
            equals_ddp=True,
            optimizer_parts=gpus,
            optimizer_padded=True,
            updates_per_step=1,
            ring_copies=2,
        )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        trial = worker.trial
        if trial.sparse_gradient_parameters:
            yield refusals.sparse_gradient_reason(
                trial.sparse_gradient_parameters, "has no place in a flat bucket"
            )
        if trial.data_dependent_parameters and worker.world_size > 1:
            yield refusals.diverging_replicas_reason(trial.data_dependent_parameters)

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        from stratbench.workload.torch_internals import assign_parameters_to_buckets

        # Buckets are filled in the order in which backward computes gradients: about the reverse of
        # forward's.
        parameters = [p for p in model.parameters() if p.requires_grad][::-1]
        groups = assign_parameters_to_buckets(parameters, self.options.bucket_cap_mb << 20)
        self.buckets = [
            Bucket([parameters[i] for i in group], worker.rank, worker.world_size)
            for group in groups
        ]
        for bucket in self.buckets:
            for p in bucket.views:
                p.register_post_accumulate_grad_hook(partial(self._move_gradient_to_bucket, bucket))
        return model

    def updated_tensors(self) -> list[Tensor]:
        return [bucket.own_weights for bucket in self.buckets]

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        return {"gradients": [bucket.grads for bucket in self.buckets]}

    def weights_and_buffers(self) -> list[Tensor]:
        weights = [bucket.weights for bucket in self.buckets]
        return [*weights, *self.list_changed_frozen_parameters(), *self.model.buffers()]

    def reset(self) -> None:
        """Reset the inherited state, and mark all gradient buckets as empty and not sent."""
        super().reset()
        self._reset_gradient_buckets()

    def _reset_gradient_buckets(self) -> None:
        self._filled: set[nn.Parameter] = set()
        self._reductions: list[torch.distributed.Work] = []
        self._reduced, self._is_last = 0, not self.adds_to_gradients_repeatedly
        for bucket in self.buckets:
            bucket.missing, bucket.sent = set(bucket.views), False

    def create_sync_context(self, is_last_part: bool) -> AbstractContextManager:
        self._is_last = is_last_part and not self.adds_to_gradients_repeatedly
        return nullcontext()

    def _move_gradient_to_bucket(self, bucket: Bucket, parameter: nn.Parameter) -> None:
        """Add the gradient that backward computed for a parameter to the bucket, and free it."""
        if bucket.sent:
            name = next(n for n, p in self.model.named_parameters() if p is parameter)
            s = self.worker.settings
            reason = refusals.repeated_gradient_sum_reason([name])
            raise ModelError(f"model {s.model!r}: {s.strategy} cannot train it: {reason}")
        view = bucket.views[parameter]
        if parameter in self._filled:
            view.add_(parameter.grad)
        else:
            view.copy_(parameter.grad)
            self._filled.add(parameter)
        parameter.grad = None
        if self._is_last:
            bucket.missing.discard(parameter)
            # A full bucket waits for those before it, since workers must call collectives in the same order.
            while self._reduced < len(self.buckets) and not self._next_bucket.missing:
                self._reduce_next_bucket()

    @property
    def _next_bucket(self) -> Bucket:
        return self.buckets[self._reduced]

    def _reduce_next_bucket(self) -> None:
        import torch.distributed as dist

        bucket, workers = self._next_bucket, self.worker.world_size
        self._reduced += 1
        bucket.sent = True
        if workers > 1:
            bucket.grads.div_(workers)
            # PyTorch 2.13 and later has the first name of the function, earlier versions the second.
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            self._reductions.append(scatter(bucket.own_grads, bucket.grads, async_op=True))

    def assign_gradients_to_updated_tensors(self) -> None:
        while self._reduced < len(self.buckets):
            # Parameters without a gradient in this step get zeros.
            for parameter in self._next_bucket.missing - self._filled:
                self._next_bucket.views[parameter].zero_()
            self._reduce_next_bucket()
        for reduction in self._reductions:
            reduction.wait()
        self._reset_gradient_buckets()
        for bucket in self.buckets:
            bucket.own_weights.grad = bucket.own_grads

    def gradient_norm(self) -> Tensor:
        return collective.compute_norm_over_shards(super().gradient_norm(), self.worker.world_size)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self._broadcast_buffers()
        loss = super().step(x, y)
        self._gather_weights()
        return loss

    def _gather_weights(self) -> None:
        import torch.distributed as dist

        if self.worker.world_size == 1:
            return
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        # Buckets are gathered one at a time, because gloo needs memory for a copy of each.
        for bucket in self.buckets:
            gather(bucket.weights, bucket.own_weights)

    def _broadcast_buffers(self) -> None:
        """Set all workers' buffers to those of rank 0, by one broadcast per dtype."""
        import torch
        import torch.distributed as dist

        if self.worker.world_size == 1:
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([b.flatten() for b in buffers])
            dist.broadcast(flat, src=0)
            for b, shared in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                b.copy_(shared.view_as(b))

    def communication(self) -> dict[str, Any]:
        w = self.worker.world_size
        moved_bytes = 2 * sum(bucket.weights.nbytes for bucket in self.buckets)
        moved_bytes += sum(b.nbytes for b in self.model.buffers())
        if self.worker.settings.max_grad_norm is not None:
            # Clipping also all-reduces the gradient norm.
            moved_bytes += 2 * self.parameters[0].element_size()
        return collective.describe_ring_traffic((w - 1) / w * moved_bytes)

    @contextmanager
    def open_evaluation_model(self) -> Iterator[nn.Module]:
        # Rank 0's BatchNorm statistics are evaluated. The next step would broadcast them anyway.
        self._broadcast_buffers()
        with super().open_evaluation_model() as model:
            yield model

    def report(self) -> dict[str, Any]:
        report = super().report()
        report["details"]["bucket_bytes"] = [bucket.weights.nbytes for bucket in self.buckets]
        return report


class TorchZeRO1(DDP):
    """PyTorch's ZeroRedundancyOptimizer with DistributedDataParallel, to compare with `zero1`.

    It assigns whole tensors to workers, the largest tensor first, each to the worker with the least. In a
    model with one huge tensor, most of the state is on one worker. Gradients are all-reduced and parameters
    broadcast, which sends a copy more than `zero1`.
    """

    summary: ClassVar[str] = "replicas, optimizer state sharded tensor by tensor (torch's)"
    rigid = base.STATE_IN_PARTS
    begins_anew = None
    rule: ClassVar[str] = (
        "As ddp, but each worker has the velocity of some tensors of W and updates only these; then it "
        "broadcasts them"
    )
    breakdown_note: ClassVar[str] = (
        DDP.breakdown_note + "; the broadcast of parameters is inside the optimizer's phase"
    )
    collectives = DDP.collectives

    compress = "none"

    @dataclass(frozen=True)
    class Options(base.Options):
        bucket_cap_mb: int = option(25, "size of an all-reduce bucket in MiB", least=1)
        gradient_as_bucket_view: bool = option(
            True, "whether gradients are views of the buckets, which saves a copy of them"
        )
        parameters_as_bucket_view: bool = option(
            True,
            "whether the parameters of each worker are views of one flat tensor, broadcast at once",
        )

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        yield from super().iter_refused_values(options, values)
        if values["precision"] == "fp16":
            yield (
                ".precision = 'fp16': with torch's ZeroRedundancyOptimizer the loss scaler would wait "
                "for the device in every step; use bf16, or zero1"
            )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        yield from super().iter_model_refusals(model, worker)
        if names := [n for n, p in model.named_parameters() if p.requires_grad and p.is_complex()]:
            yield (
                f"torch's ZeroRedundancyOptimizer takes no complex parameters ({format_names(names)}); use "
                "two parameters, for the real and the imaginary part, or use zero1"
            )
            return
        dtypes = collective.list_dtype_names(p for p in model.parameters() if p.requires_grad)
        if len(dtypes) > 1:
            yield (
                f"its parameters have several dtypes ({', '.join(dtypes)}), but torch's "
                "ZeroRedundancyOptimizer supports one; use one dtype, or zero1"
            )

    def traits(self, gpus: int) -> base.Traits:
        return base.Traits(
            is_synchronous_on_one_worker=True,
            equals_ddp=True,
            optimizer_parts=1 if gpus == 1 else None,
            updates_per_step=1,
            ring_copies=3,
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        kind, settings = self.get_optimizer_class()
        optimizer = ZeroRedundancyOptimizer(
            self.local,
            optimizer_class=kind,
            parameters_as_bucket_view=self.options.parameters_as_bucket_view,
            **settings,
        )
        own = optimizer.optim.param_groups
        self.create_optimizer_states(optimizer.optim, [p for group in own for p in group["params"]])
        return optimizer

    def communication(self) -> dict[str, Any]:
        traffic = super().communication()
        w = self.worker.world_size
        parameters = sum(p.nbytes for p in self.parameters)
        return traffic | collective.describe_ring_traffic(
            traffic["sent_bytes_per_step"] + (w - 1) / w * parameters
        )
