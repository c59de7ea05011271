"""`deepspeed`: DeepSpeed's engine, ZeRO stages 1 to 3, in the common training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.cell.options import option
from stratbench.cell.text.words import names_text, repr_of
from stratbench.strategies import base
from stratbench.strategies.counted import Counted
from stratbench.strategies.needs import check_installed
from stratbench.strategies.sharding.sharded import Sharded, mean_buffers
from stratbench.workload.network.precision import PURE_BF16

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor, nn

    from stratbench.cell.settings import Settings
    from stratbench.strategies.saved import SavedState

#: Numbers that DeepSpeed counts a bucket in are float32.
NUMBER_BYTES = 4


class DeepSpeed(Counted):
    """deepspeed.initialize on our network and torch's optimizer: backward and update are the engine's.

    Stage 1 divides the optimizer's state, stage 2 the gradients, stage 3 the parameters, too (Rajbhandari
    et al., SC 2020). The engine keeps a copy of each worker's part of the weights, from which it updates
    (a master copy, also in float32), and stages 1 and 2 reduce gradients to all workers: half as much again
    as `zero1` sends on NCCL. Batches, clock, marks and evaluation are those of every strategy. The engine
    knows nothing of BatchNorm: each worker keeps its own statistics, and their mean is evaluated.
    """

    family = "engines"  # a library that owns backward and update
    mark = 0
    rigid = base.STATE_IN_PARTS
    needs = ("deepspeed==0.19.8",)
    summary: ClassVar[str] = (
        "DeepSpeed's engine (ZeRO by stages): backward and update are its own code"
    )
    rule: ClassVar[str] = (
        "As ddp, but each worker holds the velocity of its share of W and updates that alone (stage 1), "
        "keeps of g its share (2) and of W (3); W is gathered after the update, or when it is used (3)"
    )
    updates_by_zeros = True
    warms_up = True  # stage 3 learns the order of the modules
    _counts_step = False  # before a `save`: what the engine sends then, no record has
    buffers_note = "each worker keeps its own, and their mean is evaluated"
    evaluated_on = Sharded.evaluated_on
    breakdown_note: ClassVar[str] = (
        "DeepSpeed reduces gradients inside backward; stages 1 and 2 gather the weights in the optimizer's "
        "phase, stage 3 inside forward and backward; stage 3, and any stage that clips or has "
        "match_other_strategies: false, waits for the device in every step, to read the gradient's norm"
    )

    @dataclass(frozen=True)
    class Options(base.Options):
        stage: int = option(
            2,
            "what is divided: 1 the optimizer's state, 2 gradients, 3 parameters",
            least=1,
            below=4,
            tried=[1, 3],
            kind="sharding",
        )
        bucket_cap_mb: int = option(25, "size of a bucket in MiB", least=1)
        match_other_strategies: bool = option(
            True,
            "true: buckets as ddp has them, gradients reduced beside backward, no norm or timer that nobody "
            "asked for, stage 3 keeps nothing whole; false: DeepSpeed's own defaults",
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.match_other_strategies and self.bucket_cap_mb != 25:
                raise ValueError(
                    f"bucket_cap_mb = {self.bucket_cap_mb}: match_other_strategies: false leaves it to "
                    "DeepSpeed; remove it"
                )

    @classmethod
    def refusals(cls, options: dict[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
        if values["precision"] == "fp64":
            yield ".precision = 'fp64': DeepSpeed keeps its weights in float32; use fp32"
        if values["precision"] == PURE_BF16:
            yield ".precision = 'bf16-true': DeepSpeed keeps its weights in float32; use bf16"
        if values["precision"] == "fp16":
            yield (
                ".precision = 'fp16': DeepSpeed's loss scaler would wait for the device in every step; use "
                "bf16"
            )
        if values["compile"]:
            yield ".compile = true: compiled code is not tried with DeepSpeed; set it to false"
        if (implementation := values["optimizer_impl"]) != "fused":
            yield (
                f".optimizer_impl = {implementation!r}: DeepSpeed gives the optimizer flat tensors of its "
                "own; set it to fused"
            )
        if (chunks := values["loss_chunks"]) > 1:
            yield f".loss_chunks = {chunks}: the loss in parts is not tried with DeepSpeed; set it to 1"
        if mode := values["activation_checkpointing"]:
            yield (
                f".activation_checkpointing = {repr_of(mode)}: computing blocks again is not tried with "
                "DeepSpeed; set it to false"
            )

    def refusals_of_model(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        trial = worker.trial
        if trial.sparse:
            yield base.sparse_gradient(trial.sparse, "has no place in a flat bucket")
        dtypes = base.dtype_names(model.parameters())
        if len(dtypes) > 1:
            yield (
                f"it has parameters of several dtypes ({', '.join(dtypes)}), which DeepSpeed would put into "
                "one flat tensor; use one"
            )
        if self.options.stage == 3 and (early := trial.uncalled + trial.late):
            yield (
                f"forward reads {names_text(early)} outside of a call of the module it belongs to, and stage "
                "3 gathers a module's parameters only then; call the module itself, or use stage 1 or 2"
            )
        yield from base.refusals_of_parts(trial, as_parameters=False)
        if worker.world_size == 1:
            return
        if trial.by_chance:
            yield base.by_chance(trial.by_chance)
        elif trial.by_data:
            yield base.by_data(trial.by_data)

    def traits(self, gpus: int) -> base.Traits:
        o = self.options
        # Stage 2 shards the gradients and not the weights; by default stage 3 does not shard small tensors.
        parts = {1: 1, 2: None, 3: gpus if o.match_other_strategies else None}[o.stage]
        return base.Traits(
            synchronous_alone=True,
            equals_ddp=True,
            shards_states=o.stage == 3,
            weight_parts=parts if gpus > 1 else 1,
            optimizer_parts=gpus,
            optimizer_padded=True,
            updates_per_step=1,
            # Stage 3 gathers again for backward what it has freed after forward.
            ring_copies=3 if o.stage < 3 else 2,
            kept_copies=1,
        )

    def setup(self, model: nn.Module, worker: base.Worker) -> None:
        deepspeed = import_deepspeed(worker.device.type)
        # The engine insists on these; it would ask numactl how many workers a node has, in every step.
        os.environ |= {
            "LOCAL_RANK": str(worker.device.index or 0),
            "LOCAL_SIZE": str(worker.local_world),
        }
        self.worker, self.model = worker, model
        self.parameters = self.local = [p for p in model.parameters() if p.requires_grad]
        self._trained = numel(self.parameters)
        kind, settings = self.optimizer_kind()
        self.optimizer = kind(self.parameters, **settings)
        model.to = lambda *_, **__: model  # it is on its device, and fake tensors cannot be moved
        self.engine, self.zero, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config=self.config(worker),
            dist_init_required=False,
        )
        del model.to
        self.module = self.compiled = self.engine
        if self.options.stage == 3:
            self.local = list(self.zero.fp32_partitioned_groups_flat)
            self._flat = list(self.zero.fp16_partitioned_groups_flat)
        else:
            self.local = list(self.zero.single_partition_of_fp32_groups)
            self._flat = list(self.zero.bit16_groups_flat)
        self.begin_states(self.optimizer, self.local)
        self.reset()

    def config(self, worker: base.Worker) -> dict[str, Any]:
        """DeepSpeed's configuration of the cell."""
        o = self.options
        groups = [numel(p for m in ms for p in m.parameters()) for _, ms in worker.wrap_groups]
        group = max(groups, default=self._trained)
        return engine_config(
            o.stage,
            o.match_other_strategies,
            o.bucket_cap_mb,
            worker.settings,
            self._trained,
            group,
        )

    def reset(self) -> None:
        super().reset()
        self.engine.micro_steps = self.engine.global_steps = self.engine.skipped_steps = 0

    def restore(self, saved: SavedState) -> None:
        super().restore(saved)
        self._free_gathered()  # else a step would use what the warm-up has made of them

    def _free_gathered(self) -> None:
        """Free gathered and prefetched shards of others, in stage 3."""
        if self.options.stage == 3:
            self.zero._partition_all_parameters()
            self.zero._post_step(set())  # gathers what stays whole

    def weights_and_buffers(self) -> list[Tensor]:
        return [*self.local, *self._flat, *self.model.buffers()]

    def kept_tensors(self) -> dict[str, list[Tensor]]:
        tensors = {"optimizer": self.local}  # the master copy
        if self.options.stage == 3:
            tensors["parameters"] = [*self._flat, *self.model.parameters()]
            tensors["gradients"] = [self.zero.grad_partitions_flat_buffer]
            tensors["buckets"] = [bucket.buffer for bucket in self.zero.ipg_buckets.values()]
        return tensors

    def synchronising(self, last: bool) -> AbstractContextManager:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)  # a part's loss is divided already

    def gradients(self) -> list[Tensor]:
        return [g for gradients in self.zero.averaged_gradients.values() for g in gradients]

    def clip(self, norm: float) -> None:
        """The engine does it."""

    def update(self) -> None:
        self.engine.step()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        with mean_buffers(self.model, self.worker.world_size), super().evaluating() as model:
            yield model
        self._free_gathered()

    def model_states(self) -> dict[str, int]:
        from stratbench.telemetry.memory import model_states

        workers, stage = self.worker.world_size, self.options.stage
        states = model_states(self.model, self.optimizer)
        states["optimizer_bytes"] += sum(t.nbytes for t in self.local)
        if stage == 3:
            states["parameters_bytes"] = sum(
                p.ds_tensor.numel() * p.element_size() for p in self.model.parameters()
            )
        gradients = -(-self._trained // workers) if stage > 1 else self._trained
        states["gradients_bytes"] = gradients * NUMBER_BYTES
        return states

    def report(self) -> dict[str, Any]:
        import deepspeed

        report, skipped = super().report(), self.engine.skipped_steps
        report["details"] |= {
            "skipped_steps": skipped,
            "engine": f"deepspeed {deepspeed.__version__}",
        }
        return report | {"updates_applied": self.steps - skipped}

    @classmethod
    @contextmanager
    def on_fakes(cls) -> Iterator[None]:
        check_installed("deepspeed", cls, {})
        import_deepspeed("cpu")
        import torch.nn.functional as F
        from deepspeed.runtime import utils
        from deepspeed.runtime.zero import (
            parameter_offload,
            partitioned_param_coordinator,
            stage3,
            stage_1_and_2,
        )

        replaced = [
            (parameter_offload, "FWD_MODULE_STACK", []),  # it would keep every network
            # Fake numbers have no value that the host could read: whether a norm is finite, and whether
            # the workers call the same modules.
            *(
                (at, "is_invalid_grad_norm", lambda norm: False)
                for at in (utils, stage_1_and_2, stage3)
            ),
            (partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda ints: None),
            (F, "linear", F.linear),  # stage 3 puts its own there, for all networks of the process
        ]
        with ExitStack() as stack:
            for module, name, value in replaced:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            yield


def engine_config(
    stage: int,
    match_other_strategies: bool,
    bucket_cap_mb: int,
    s: Settings,
    trained: int,
    group: int | None = None,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration (deepspeed.ai/docs/config-json) of a cell.

    Args:
        stage: Its option: the ZeRO stage.
        match_other_strategies: Its option: whether buckets and overlap are as those of `ddp`.
        bucket_cap_mb: Its option: the size of a bucket.
        s: The cell's settings.
        trained: Number of trainable parameters.
        group: Parameters of the largest sharding group, or None to leave it to DeepSpeed.
    """
    zero: dict[str, Any] = {"stage": stage}
    config = {
        # For its own lines of progress; samples come from our loop.
        "train_micro_batch_size_per_gpu": max(
            1, s.per_worker_batch // s.gradient_accumulation_steps
        ),
        "gradient_accumulation_steps": s.gradient_accumulation_steps,
        "gradient_clipping": s.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,  # SGD
        "steps_per_print": None,
        "zero_optimization": zero,
    }
    if s.precision == "bf16":
        # No module's gradients are sent in 16 bits: the other strategies send 32.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    if not match_other_strategies:
        return config
    config["timers"] = {"throughput": {"enabled": False}}  # else each step waits for the device
    # A bucket larger than the network would be memory that nothing ever fills.
    bucket = min((bucket_cap_mb << 20) // NUMBER_BYTES, trained)
    zero |= {"overlap_comm": True, "reduce_bucket_size": bucket}
    if stage == 3:
        # As FSDP: the group that is used, and one ahead. What the engine may hold by its defaults is a
        # thousand million parameters, which it does not free after forward.
        zero |= {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
        if group is not None:
            zero["stage3_prefetch_bucket_size"] = group
            zero["stage3_max_live_parameters"] = 2 * group
    elif s.max_grad_norm is None:
        zero["compute_grad_norm"] = False  # the host would read it in every step
    return config


def numel(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


def import_deepspeed(device: str) -> ModuleType:
    """Import DeepSpeed and all that a first step would import, for workers on `device`.

    The device is `cpu` or `cuda`.
    """
    os.environ["DS_ACCELERATOR"] = device
    before = dict(os.environ)
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer

    for name in os.environ.keys() - before.keys():  # every worker shall have the same environment
        del os.environ[name]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # On a CPU the engine would compile an operator that training does not use, behind a lock: if such a
    # process is killed, the lock remains, and all later ones wait forever. None is compatible.
    deepspeed.ops.__compatible_ops__ = {}
    # Reset an earlier process group, if this process has had one.
    deepspeed.comm.comm.cdb = None
    groups = deepspeed.utils.groups
    groups._WORLD_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return deepspeed
