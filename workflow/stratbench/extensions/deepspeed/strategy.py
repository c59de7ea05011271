"""The strategy `deepspeed`: DeepSpeed's engine with ZeRO stages 1 to 3, in stratbench's training loop."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stratbench.cell.options import option
from stratbench.cell.text.words import format_names, format_wrong_value
from stratbench.strategies import base, collective, refusals
from stratbench.strategies.counted import Counted
from stratbench.strategies.needs import check_installed
from stratbench.strategies.sharding.sharded import Sharded, average_batchnorm_buffers
from stratbench.workload.network.precision import PURE_BF16

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor, nn

    from stratbench.cell.settings import Settings
    from stratbench.strategies.saved import SavedState

#: Bytes per element of a bucket. DeepSpeed counts the size of buckets in float32 elements.
NUMBER_BYTES = 4


class DeepSpeed(Counted):
    """Strategy that trains by DeepSpeed's engine, which does backward, reduction and update.

    Stage 1 shards the optimizer's state, stage 2 also gradients, and stage 3 also parameters (Rajbhandari et
    al., SC 2020). The engine keeps a float32 master copy of each worker's part of the weights. Stages 1 and 2
    reduce gradients to all workers, so that they send 1.5 times as much as `zero1` on NCCL. Batches, clock,
    marks and evaluation are the same as for all strategies. Each worker has its own BatchNorm statistics,
    whose mean is evaluated.
    """

    family = "engines"  # strategies whose training step is an external library's
    mark = 0
    rigid = base.STATE_IN_PARTS
    needs = ("deepspeed==0.19.8",)
    summary: ClassVar[str] = (
        "DeepSpeed's engine with ZeRO stages 1 to 3, which does backward and update"
    )
    rule: ClassVar[str] = (
        "As ddp, but each worker holds the velocity of its share of W and updates that alone (stage 1), "
        "keeps of g its share (2) and of W (3); W is gathered after the update, or when it is used (3)"
    )
    updates_by_zeros = True
    warms_up = True  # in the first steps, stage 3 learns in which order modules are called
    _counts_step = False  # DeepSpeed does the communication, so the bytes sent are unknown
    buffers_note = "each worker has its own; their mean is evaluated"
    evaluated_on = Sharded.evaluated_on
    breakdown_note: ClassVar[str] = (
        "DeepSpeed reduces gradients within backward; stages 1 and 2 gather the weights in the optimizer "
        "phase, stage 3 within forward and backward; stage 3, and any stage with clipping or "
        "match_other_strategies: false, waits for the device in every step to read the gradient norm"
    )

    @dataclass(frozen=True)
    class Options(base.Options):
        stage: int = option(
            2,
            "ZeRO stage: 1 shards the optimizer's state, 2 also gradients, 3 also parameters",
            least=1,
            below=4,
            tried=[1, 3],
            kind="sharding",
        )
        bucket_cap_mb: int = option(25, "size of a bucket in MiB", least=1)
        match_other_strategies: bool = option(
            True,
            "true: buckets like ddp's, gradients reduced concurrently with backward, no unneeded norms and "
            "timers, and all parameters sharded in stage 3; false: DeepSpeed's own defaults",
        )

        def __post_init__(self) -> None:
            super().__post_init__()
            if not self.match_other_strategies and self.bucket_cap_mb != 25:
                raise ValueError(
                    f"bucket_cap_mb = {self.bucket_cap_mb}: with match_other_strategies: false DeepSpeed "
                    "chooses the bucket size; remove bucket_cap_mb"
                )

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
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
            yield ".compile = true: compiled code is not tested with DeepSpeed; set it to false"
        if (implementation := values["optimizer_impl"]) != "fused":
            yield (
                f".optimizer_impl = {implementation!r}: DeepSpeed gives the optimizer flat tensors of its "
                "own; set it to fused"
            )
        if (chunks := values["loss_chunks"]) > 1:
            yield f".loss_chunks = {chunks}: the loss in chunks is not tested with DeepSpeed; set it to 1"
        if mode := values["activation_checkpointing"]:
            yield (
                f".activation_checkpointing = {format_wrong_value(mode)}: recomputing blocks is not tested "
                "with DeepSpeed; set it to false"
            )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        trial = worker.trial
        if trial.sparse_gradient_parameters:
            yield refusals.sparse_gradient_reason(
                trial.sparse_gradient_parameters, "has no place in a flat bucket"
            )
        dtypes = collective.list_dtype_names(model.parameters())
        if len(dtypes) > 1:
            yield (
                f"it has parameters of several dtypes ({', '.join(dtypes)}), which DeepSpeed would put into "
                "one flat tensor; use one"
            )
        if self.options.stage == 3 and (
            early := trial.parameters_read_before_call + trial.parameters_read_after_calls
        ):
            yield (
                f"forward reads {format_names(early)} outside of a call of its module, but stage 3 gathers "
                "parameters only for the call; call the module itself, or use stage 1 or 2"
            )
        yield from refusals.iter_unshardable_model_reasons(trial, replaces_parameters=False)
        if worker.world_size > 1 and (reason := refusals.describe_skipped_modules(trial)):
            yield reason

    def traits(self, gpus: int) -> base.Traits:
        o = self.options
        # Number of equal shards of weights and gradients, or None for unequal ones. Stage 2 shards only
        # gradients, and by default stage 3 does not shard small tensors.
        parts = {1: 1, 2: None, 3: gpus if o.match_other_strategies else None}[o.stage]
        return base.Traits(
            is_synchronous_on_one_worker=True,
            equals_ddp=True,
            shards_states=o.stage == 3,
            weight_parts=parts if gpus > 1 else 1,
            optimizer_parts=gpus,
            optimizer_padded=True,
            updates_per_step=1,
            # Stage 3 gathers parameters for forward and backward; stages 1 and 2 all-reduce gradients.
            ring_copies=3 if o.stage < 3 else 2,
            kept_copies=1,
        )

    def setup(self, model: nn.Module, worker: base.Worker) -> None:
        deepspeed = import_deepspeed(worker.device.type)
        # Without these variables the engine would count the node's workers by numactl in every step.
        os.environ |= {
            "LOCAL_RANK": str(worker.device.index or 0),
            "LOCAL_SIZE": str(worker.local_world_size),
        }
        self.worker, self.model = worker, model
        self.parameters = self.local = [p for p in model.parameters() if p.requires_grad]
        self._trained = count_parameters(self.parameters)
        kind, settings = self.get_optimizer_class()
        self.optimizer = kind(self.parameters, **settings)
        # DeepSpeed moves the model to its device. It is there already, and fake tensors cannot be moved.
        model.to = lambda *_, **__: model
        self.engine, self.zero, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config=self.make_cell_engine_config(worker),
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
        self.create_optimizer_states(self.optimizer, self.local)
        self.reset()

    def make_cell_engine_config(self, worker: base.Worker) -> dict[str, Any]:
        """Return the cell's configuration of DeepSpeed."""
        o = self.options
        groups = [
            count_parameters(p for m in ms for p in m.parameters()) for _, ms in worker.wrap_groups
        ]
        group = max(groups, default=self._trained)
        return make_engine_config(
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
        self._free_gathered_parameters()  # the values gathered in the warm-up are outdated

    def _free_gathered_parameters(self) -> None:
        """Free the gathered and prefetched parameters in stage 3."""
        if self.options.stage == 3:
            self.zero._partition_all_parameters()
            # small parameters that DeepSpeed does not shard are gathered again
            self.zero._post_step(set())

    def weights_and_buffers(self) -> list[Tensor]:
        return [*self.local, *self._flat, *self.model.buffers()]

    def list_persistent_tensors(self) -> dict[str, list[Tensor]]:
        tensors = {"optimizer": self.local}  # float32 master copy of this worker's weights
        if self.options.stage == 3:
            tensors["parameters"] = [*self._flat, *self.model.parameters()]
            tensors["gradients"] = [self.zero.grad_partitions_flat_buffer]
            tensors["buckets"] = [bucket.buffer for bucket in self.zero.ipg_buckets.values()]
        return tensors

    def create_sync_context(self, is_last_part: bool) -> AbstractContextManager:
        self.engine.set_gradient_accumulation_boundary(is_last_part)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # the loss is already divided by the number of micro-batches
        self.engine.backward(loss, scale_wrt_gas=False)

    def list_gradients(self) -> list[Tensor]:
        return [g for gradients in self.zero.averaged_gradients.values() for g in gradients]

    def clip_gradients(self, norm: float) -> None:
        """Do nothing, because DeepSpeed's engine clips gradients itself."""

    def update(self) -> None:
        self.engine.step()

    @contextmanager
    def open_evaluation_model(self) -> Iterator[nn.Module]:
        with (
            average_batchnorm_buffers(self.model, self.worker.world_size),
            super().open_evaluation_model() as model,
        ):
            yield model
        self._free_gathered_parameters()

    def compute_model_state_bytes(self) -> dict[str, int]:
        from stratbench.telemetry.memory import measure_model_state_bytes

        workers, stage = self.worker.world_size, self.options.stage
        states = measure_model_state_bytes(self.model, self.optimizer)
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
    def support_fake_tensors(cls) -> Iterator[None]:
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
            # DeepSpeed's global list of modules would keep every traced model in memory.
            (
                parameter_offload,
                "FWD_MODULE_STACK",
                [],
            ),
            # DeepSpeed must not check whether norms are finite, because fake tensors have no values.
            *(
                (at, "is_invalid_grad_norm", lambda norm: False)
                for at in (utils, stage_1_and_2, stage3)
            ),
            (partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda ints: None),
            (F, "linear", F.linear),  # stage 3 replaces this function in the whole process
        ]
        with ExitStack() as stack:
            for module, name, value in replaced:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            yield


def make_engine_config(
    stage: int,
    match_other_strategies: bool,
    bucket_cap_mb: int,
    settings: Settings,
    num_trainable: int,
    num_in_largest_group: int | None = None,
) -> dict[str, Any]:
    """Make the configuration of DeepSpeed's engine for a cell (deepspeed.ai/docs/config-json).

    Args:
        stage: ZeRO stage.
        match_other_strategies: Whether buckets and overlap are like those of `ddp`, not DeepSpeed's defaults.
        bucket_cap_mb: Size of a bucket in MiB.
        settings: Settings of the cell.
        num_trainable: Number of trainable parameters.
        num_in_largest_group: Number of parameters in the largest sharding group, or None to leave it to
            DeepSpeed.
    """
    zero: dict[str, Any] = {"stage": stage}
    config = {
        # DeepSpeed needs the batch size only for its progress output.
        "train_micro_batch_size_per_gpu": max(
            1, settings.per_worker_batch // settings.gradient_accumulation_steps
        ),
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,  # otherwise DeepSpeed rejects SGD
        "steps_per_print": None,
        "zero_optimization": zero,
    }
    if settings.precision == "bf16":
        # Gradients are sent in 32 bits, as with other strategies.
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    if not match_other_strategies:
        return config
    # DeepSpeed's throughput timer would let the host wait for the GPU in each step.
    config["timers"] = {"throughput": {"enabled": False}}
    # DeepSpeed allocates the whole bucket. A bucket larger than the model would waste memory.
    bucket = min((bucket_cap_mb << 20) // NUMBER_BYTES, num_trainable)
    zero |= {"overlap_comm": True, "reduce_bucket_size": bucket}
    if stage == 3:
        # As with FSDP, only two sharding groups are gathered at a time: the one in use and the next one. By
        # default the engine would keep up to 10^9 gathered parameters after forward.
        zero |= {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
        if num_in_largest_group is not None:
            zero["stage3_prefetch_bucket_size"] = num_in_largest_group
            zero["stage3_max_live_parameters"] = 2 * num_in_largest_group
    elif settings.max_grad_norm is None:
        zero["compute_grad_norm"] = False  # the host would wait for the norm in every step
    return config


def count_parameters(parameters: Iterable[nn.Parameter]) -> int:
    """Return the sum of the parameters' numbers of elements."""
    return sum(p.numel() for p in parameters)


def import_deepspeed(device: str) -> ModuleType:
    """Import DeepSpeed for workers on the device type `cpu` or `cuda`.

    The import includes all that a first step would import.
    """
    os.environ["DS_ACCELERATOR"] = device
    before = dict(os.environ)
    import deepspeed
    import deepspeed.runtime.zero.muon.muon_optimizer

    for name in os.environ.keys() - before.keys():  # the import must leave no environment variables
        del os.environ[name]
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # On a CPU, DeepSpeed would compile an operator that is not used, and lock a file meanwhile. If the
    # process were killed, the lock would remain, and later processes would wait forever. Without compatible
    # operators it compiles none.
    deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed must not reuse a process group of an earlier cell in this process.
    deepspeed.comm.comm.cdb = None
    groups = deepspeed.utils.groups
    groups._WORLD_GROUP = groups._DATA_PARALLEL_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    return deepspeed
