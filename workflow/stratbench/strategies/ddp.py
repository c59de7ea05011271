"""`ddp`: every worker has the whole model, and an all-reduce averages gradients during backward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from stratbench.cell.options import option
from stratbench.cell.text.words import format_names
from stratbench.strategies import base, collective, refusals
from stratbench.strategies.compression import PowerSGD, SixteenBits
from stratbench.workload.network.precision import PURE_BF16
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parallel import DistributedDataParallel


#: DDP times its first ten steps, and later every step whose number is a multiple of this (DDP's default).
SAMPLE_INTERVAL = 100


#: DDP's error message with the numbers of the parameters that got no gradient in the previous step.
_UNREDUCED = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")


def missing_gradient_reason(parameter_names: Sequence[str]) -> str:
    """Return a sentence on parameters that got no gradient, with the remedy."""
    return (
        f"{format_names(parameter_names)} got no gradient in a step, and DDP waits for one from "
        "every parameter; use it in each forward, remove it, or freeze it with requires_grad_(False)"
    )


class SampledTimes(NamedTuple):
    """Number of steps that DDP has timed, with the summed times of their communication."""

    steps: int
    communication_ms: float
    overlap_ms: float


def read_sampled_step_times(module: DistributedDataParallel, sample_interval: int) -> SampledTimes:
    """Return the summed communication times of the steps that DDP has timed so far.

    DDP stores mean times without the number of timed steps, which follows from the iteration number. See
    torch/csrc/distributed/c10d/logger.cpp and reducer.cpp (should_collect_runtime_stats).

    Args:
        module: The wrapped model.
        sample_interval: Number of steps from one timed step to the next, after the first ten steps.
    """
    from stratbench.workload.torch_internals import read_ddp_log

    logged = read_ddp_log(module)
    last = logged.get("iteration", 0)
    steps = min(last, 10) + max(0, last // sample_interval - 10 // sample_interval)
    return SampledTimes(
        steps,
        steps * logged.get("avg_backward_comm_time", 0) / 1e6,
        steps * logged.get("avg_backward_compute_comm_overlap_time", 0) / 1e6,
    )


class DDP(collective.Collective):
    """Data parallelism by torch.nn.parallel.DistributedDataParallel.

    BatchNorm normalises with the statistics of each worker's own batch. The running statistics of rank 0 are
    broadcast before every forward, and are evaluated. With `compress`, gradients differ from those of other
    strategies.
    """

    family = "replicas"
    summary: ClassVar[str] = "replicas, gradients averaged by all-reduce"
    rule: ClassVar[str] = (
        "W -= lr velocity(mean of all workers' g) on every worker; g is averaged in buckets while "
        "backward still runs"
    )
    alike_on_any_count = True
    rigid = begins_anew = None
    collectives = ("all_reduce", "broadcast")
    own_phases = base.BEFORE_BACKWARD
    buffers_note = (
        "rank 0 sends its buffers to all workers before each forward, and they are evaluated"
    )
    evaluated_on = "the replicas' weights with rank 0's BatchNorm statistics"
    breakdown_note: ClassVar[str] = (
        "exposed_communication is DDP's own measure of communication after the backward computation, "
        "including waits for slower workers (on a GPU a mean over the steps that DDP samples); the "
        "broadcast of BatchNorm's statistics is inside forward"
    )

    @dataclass(frozen=True)
    class Options(base.Options):
        bucket_cap_mb: int = option(25, "size of an all-reduce bucket in MiB", least=1, tried=[100])
        gradient_as_bucket_view: bool = option(
            True, "whether gradients are views of the buckets, which saves a copy of them"
        )
        compress: Literal["none", "fp16", "bf16", "powersgd"] = option(
            "none", "compression of the gradients that workers send"
        )
        powersgd_rank: int = option(
            1,
            "with compress: powersgd, number of columns of the factors of a gradient matrix",
            least=1,
        )
        powersgd_start_step: int = option(
            10, "with compress: powersgd, number of steps before the compression begins", least=2
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            for option_name, default in (("powersgd_rank", 1), ("powersgd_start_step", 10)):
                value = getattr(self, option_name)
                if value != default and self.compress != "powersgd":
                    raise ValueError(
                        f"{option_name} = {value}: the option has an effect only with compress: powersgd; "
                        "remove it"
                    )

    @property
    def compress(self) -> str:
        """Name of the gradient compression (option `compress`), such as `fp16`."""
        return self.options.compress

    @property
    def num_uncompressed_steps(self) -> int:
        return self.options.powersgd_start_step if self.compress == "powersgd" else 0

    @classmethod
    def fixed_worker_count_reason(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> str | None:
        """Return why workers cannot join and leave with PowerSGD or fp16. None with other options."""
        if options.get("compress") == "powersgd":
            return (
                "each worker keeps PowerSGD's compression error of its own gradients, which is lost with the "
                "worker (compress: powersgd)"
            )
        if values["precision"] == "fp16":
            return "the loss scale of fp16 would be reset when a worker joins or leaves (use bf16)"
        return cls.rigid

    @classmethod
    def restart_reason(cls, options: dict[str, Any], values: Mapping[str, Any]) -> str | None:
        """Return why a training with PowerSGD restarts from step 0, or None without PowerSGD."""
        if options.get("compress") == "powersgd":
            return (
                "no checkpoint has PowerSGD's compression error of each worker (compress: powersgd)"
            )
        return cls.begins_anew

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        kind, precision = options.get("compress", "none"), values["precision"]
        if kind in ("fp16", "bf16") and precision == "fp64":
            yield (
                f".precision = 'fp64': compress: {kind} sends gradients in 16 bits, which loses the "
                "precision; set compress to none"
            )
        if kind != "none" and precision == PURE_BF16:
            yield (
                f".precision = 'bf16-true': gradients have 16 bits already, and compress: {kind} would lose "
                "more precision; set it to none, or use bf16"
            )
        if kind == "powersgd" and precision == "fp16":
            yield (
                ".precision = 'fp16': PowerSGD adds its compression error to the next step, whose loss scale "
                "may differ, and an overflow would never leave the error; use bf16"
            )

    def traits(self, gpus: int) -> base.Traits:
        exact = self.compress == "none" or gpus == 1
        return base.Traits(
            is_synchronous_on_one_worker=True,
            equals_ddp=exact,
            updates_per_step=1,
            # With PowerSGD the number of copies is unknown: the traffic depends on the shapes of all
            # parameters.
            ring_copies={"none": 2, "powersgd": None}.get(self.compress, 1),
        )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        trial = worker.trial
        if reason := refusals.describe_skipped_modules(trial):
            yield reason
        elif trial.parameters_without_gradient:
            yield missing_gradient_reason(trial.parameters_without_gradient)
        if trial.repeatedly_added_parameters:
            yield refusals.repeated_gradient_sum_reason(trial.repeatedly_added_parameters)
        if trial.data_dependent_parameters:
            yield refusals.diverging_replicas_reason(trial.data_dependent_parameters)
        if trial.sparse_gradient_parameters:
            yield refusals.sparse_gradient_reason(
                trial.sparse_gradient_parameters, "DDP does not average as one process would"
            )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        try:
            return super().forward(x, y)
        except RuntimeError as e:
            if (missing := _UNREDUCED.search(str(e))) is None:
                raise
            trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
            names = [trained[int(i)] for i in missing[1].split()]
            s = self.worker.settings
            raise ModelError(
                f"model {s.model!r}: {s.strategy} cannot train it: {missing_gradient_reason(names)}"
            ) from e

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        from torch.nn.parallel import DistributedDataParallel

        from stratbench.workload.torch_internals import log_each_ddp_step

        module = DistributedDataParallel(
            model,
            device_ids=[worker.device] if worker.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_cap_mb,
            gradient_as_bucket_view=self.options.gradient_as_bucket_view,
        )
        # On a GPU, DDP waits for CUDA events in each step that it times, so it times few steps there.
        self._sample_every = SAMPLE_INTERVAL if worker.device.type == "cuda" else 1
        if worker.device.type != "cuda":
            log_each_ddp_step(module)
        self.compressor = self.make_comm_hook(worker.world_size)
        if self.compressor is not None:
            module.register_comm_hook(None, self.compressor.average_bucket)
        return module

    def make_comm_hook(self, workers: int) -> SixteenBits | PowerSGD | None:
        """Return the communication hook that replaces DDP's all-reduce, or None without compression."""
        import torch

        match self.compress if workers > 1 else "none":
            case "fp16":
                return SixteenBits(torch.float16, workers)
            case "bf16":
                return SixteenBits(torch.bfloat16, workers)
            case "powersgd":
                return PowerSGD(self.options.powersgd_rank, self.options.powersgd_start_step)
        return None

    def create_sync_context(self, is_last_part: bool) -> AbstractContextManager:
        return nullcontext() if is_last_part else self.module.no_sync()

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        return super().list_persistent_tensors() | {"communication": self.list_late_tensors()}

    def list_late_tensors(self) -> list[Tensor]:
        return [] if self.compressor is None else self.compressor.list_persistent_tensors()

    def reset(self) -> None:
        super().reset()
        if self.compressor is not None:
            self.compressor.reset()
        self._warm_up = read_sampled_step_times(self.module, self._sample_every)

    def communication(self) -> dict[str, Any]:
        w = self.worker.world_size
        gradients = sum(p.nbytes for p in self.parameters)
        if self.compressor is not None:
            gradients = self.compressor.compute_mean_bytes_per_step(self.parameters, self.steps)
        buffers = sum(b.nbytes for b in self.model.buffers())
        # Before a step's forward the buffers are broadcast in a ring, in which W - 1 of the W workers send
        # them.
        traffic = collective.describe_ring_traffic((w - 1) / w * (2 * gradients + buffers))
        before, after = self._warm_up, read_sampled_step_times(self.module, self._sample_every)
        steps = after.steps - before.steps
        if steps > 0:
            total_ms = (after.communication_ms - before.communication_ms) / steps
            overlapped_ms = (after.overlap_ms - before.overlap_ms) / steps
            traffic |= {
                "total_ms": total_ms,
                "overlapped_ms": overlapped_ms,
                "exposed_ms": max(0.0, total_ms - overlapped_ms),
                "timed_steps": steps,
            }
        return traffic

    @contextmanager
    def open_evaluation_model(self) -> Iterator[nn.Module]:
        import torch.distributed as dist

        # Rank 0's BatchNorm statistics are evaluated. The next training forward would broadcast them anyway.
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0)
        with super().open_evaluation_model() as model:
            yield model

    def report(self) -> dict[str, Any]:
        from stratbench.workload.torch_internals import read_ddp_log

        report = super().report()
        logged = read_ddp_log(self.module)
        sizes = logged.get("rebuilt_bucket_sizes") or logged.get("bucket_sizes") or ""
        report["details"]["bucket_bytes"] = [int(n) for n in str(sizes).split(",") if n.strip()]
        if self.compressor is not None:
            report["details"]["feedback_bytes"] = sum(t.nbytes for t in self.list_late_tensors())
        return report
