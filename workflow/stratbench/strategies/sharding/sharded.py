"""Defines the base of strategies in which a worker updates a shard of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from stratbench.strategies import base, collective
from stratbench.workload.users_code import Refused, describe_different_group_calls

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from stratbench.telemetry.heartbeat import Heartbeat


class GroupCalls:
    """Record of the shard groups whose modules this worker's forward calls.

    It has one hash per step, which the workers compare. Collectives match by their size only, not by their
    tensors. Workers that gather different groups would sum unrelated tensors without an error.
    """

    def __init__(
        self, groups: Sequence[tuple[str, list[nn.Module]]], heartbeat: Heartbeat | None = None
    ) -> None:
        """Register hooks on the modules of all shard groups.

        Args:
            groups: Name and modules of each group.
            heartbeat: Heartbeat file that stores the calls of the present step, to be read if the step hangs.
        """
        self.steps: list[int] = []
        self._now, self._heartbeat = 0, heartbeat
        for i, (_, modules) in enumerate(groups, 1):
            for module in modules:
                # The hook runs before FSDP's (`prepend`): it stores the call even if gathering the parameters
                # hangs.
                module.register_forward_pre_hook(partial(self._record_group_call, i), prepend=True)

    def _record_group_call(self, group: int, _module: nn.Module, _inputs: Any) -> None:
        self._now = (self._now * 1_000_003 + group) % (2**61 - 1)
        if self._heartbeat is not None:
            self._heartbeat.record_group_call(group)

    def end_step(self) -> None:
        self.steps.append(self._now)
        self._now = 0
        if self._heartbeat is not None:
            self._heartbeat.delete_group_calls()

    def find_first_step_with_different_calls(self, device: torch.device) -> int | None:
        """Return the first step in which two workers called different shard groups.

        The result is None without such a step. Steps count from 1, beginning after the last use of this
        method. Calls after the last step count as one more step. All workers must call this method.
        """
        import torch
        import torch.distributed as dist

        self.end_step()
        least = torch.tensor(self.steps, dtype=torch.int64, device=device)
        most = least.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        self.steps.clear()
        different = (least != most).nonzero().flatten().tolist()
        return different[0] + 1 if different else None


class Sharded(collective.Collective):
    """Base of strategies that shard the model. Their `wrap` turns parameters into DTensors.

    The optimizer works on the local tensors of these DTensors, which is the same arithmetic because SGD and
    AdamW are element-wise. BatchNorm's running statistics are never synchronised during the training: their
    mean over the workers is evaluated. `wrap` sets `group_size` and `shard_group`.
    """

    evaluated_on = "the gathered weights with the workers' mean BatchNorm statistics"
    #: Number of workers that hold one copy of the model together.
    group_size: int
    #: Process group of the workers that hold one copy of the model with this worker. None: all workers hold
    #: it.
    shard_group: ProcessGroup | None = None
    #: Record of the shard groups that a user's model calls, kept if there are several workers. None: the
    #: model is built-in or compiled, or there is one worker.
    calls: GroupCalls | None = None

    def setup(self, model: nn.Module, worker: base.Worker) -> None:
        super().setup(model, worker)
        s = worker.settings
        if worker.world_size > 1 and s.own_model and not s.compile:
            self.calls = GroupCalls(worker.wrap_groups, worker.heartbeat)

    def reset(self) -> None:
        super().reset()
        if self.calls is not None:
            self.calls.steps.clear()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().step(x, y)
        if self.calls is not None:
            self.calls.end_step()
        return loss

    def check_equal_collectives(self) -> None:
        if self.calls is None:
            return
        steps = len(self.calls.steps)
        step = self.calls.find_first_step_with_different_calls(self.worker.device)
        if step is None:
            return
        where = f"step {step}" if step <= steps else "the evaluation"
        s = self.worker.settings
        raise Refused(describe_different_group_calls(s.model, s.strategy, where))

    def updated_tensors(self) -> list[Tensor]:
        import torch

        from stratbench.telemetry.shards import get_local_shard

        # The optimizer gets local tensors, since it would spend several times as long on the dispatch of
        # DTensors.
        with torch.no_grad():
            return [get_local_shard(p).detach() for p in self.parameters]

    def assign_gradients_to_updated_tensors(self) -> None:
        import torch

        from stratbench.telemetry.shards import get_local_shard

        with torch.no_grad():
            for shard, p in zip(self.local, self.parameters, strict=True):
                shard.grad = None if p.grad is None else get_local_shard(p.grad)
                p.grad = None

    def gradient_norm(self) -> Tensor:
        norm = super().gradient_norm()
        # Shards in host memory have their norm on the host, where NCCL cannot reduce it.
        on_device = norm.to(self.worker.device)
        return collective.compute_norm_over_shards(on_device, self.group_size, self.shard_group).to(
            norm.device
        )

    @contextmanager
    def open_evaluation_model(self) -> Iterator[nn.Module]:
        from stratbench.telemetry.shards import free_gathered_parameters

        with (
            average_batchnorm_buffers(self.model, self.worker.world_size),
            super().open_evaluation_model() as model,
        ):
            yield model
        # Backward usually frees gathered parameters, but none follows an evaluation. A later step would use
        # these outdated copies.
        free_gathered_parameters(self.model)


@contextmanager
def average_batchnorm_buffers(model: nn.Module, workers: int) -> Iterator[None]:
    """Set BatchNorm's statistics to their mean over all workers until the context ends."""
    import torch
    import torch.distributed as dist

    from stratbench.telemetry.shards import get_local_shard

    # In modules with divided weights a buffer is a DTensor, of which every worker holds the whole.
    buffers = [get_local_shard(b) for b in model.buffers() if b.is_floating_point()]
    own = [b.clone() for b in buffers]
    if buffers:
        mean = torch.cat([b.flatten() for b in buffers])
        dist.all_reduce(mean)
        mean /= workers
        for b, average in zip(buffers, mean.split([b.numel() for b in buffers]), strict=True):
            b.copy_(average.view_as(b))
    yield
    for b, saved in zip(buffers, own, strict=True):
        b.copy_(saved)
