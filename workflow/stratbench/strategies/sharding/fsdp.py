"""`fsdp`: FSDP2 shards parameters, gradients and optimizer state over the workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import option
from stratbench.cell.text.help_page import format_help_address
from stratbench.cell.text.words import format_names
from stratbench.strategies import base, collective, refusals
from stratbench.strategies.mesh import check_equal_groups
from stratbench.strategies.sharding.sharded import Sharded
from stratbench.workload.network.precision import get_autocast_dtype

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.fsdp import MixedPrecisionPolicy


class FSDP(Sharded):
    """Sharded data parallelism by torch's fully_shard, with one call per shard group.

    `reshard_after_forward = always` frees a group's gathered parameters after its forward and gathers them
    again for backward (like ZeRO-3). FSDP2 keeps the parameters of no group (the root's) gathered, since
    backward begins with them. `never` keeps all gathered parameters (like ZeRO-2: less traffic, more memory).
    FSDP never synchronises BatchNorm's running statistics: their mean over the workers is evaluated. With
    `shard_group_size` the workers form groups, and each group holds one copy of the model (HSDP). With
    `offload` each worker's shards are in host memory, where the optimizer runs. They are copied to the device
    before they are gathered, and their gradients are copied back.

    With `gradient_accumulation_steps`, gradients are reduced to a worker's share after each part of a batch,
    as FSDP2 does by default. `gradient_sync = last-part` reduces once, and keeps whole gradients until then.
    """

    family = "shards"
    rigid = base.STATE_IN_PARTS
    begins_anew = None
    summary: ClassVar[str] = "parameters, gradients and optimizer state sharded"
    rule: ClassVar[str] = (
        "As ddp, but each worker holds and updates its share of W, g and the momentum; W is gathered "
        "for forward and backward, g is averaged to its share"
    )
    breakdown_note: ClassVar[str] = (
        "gathering parameters is inside forward and backward, reducing gradients inside backward; the part "
        "of it that computation does not hide cannot be separated (`profile: true` shows it); with offload: "
        "cpu forward and backward also contain the copies, and the host waits for the gradients in every step"
    )
    uses_wrap_groups = True
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    buffers_note = "each worker keeps its own buffers, and their mean is evaluated"

    @dataclass(frozen=True)
    class Options(base.Options):
        reshard_after_forward: Literal["always", "never"] = option(
            "always",
            "whether gathered parameters are freed after forward and gathered again for backward",
            tried=["never"],
            kind="sharding",
        )
        mixed_precision: Literal["autocast", "policy"] = option(
            "autocast",
            "implementation of mixed precision; autocast: as in every other strategy; policy: FSDP2's "
            "own, which also gathers parameters in 16 bits",
        )
        shard_group_size: int | Literal["all", "node"] = option(
            "all",
            "number of workers among which one model is sharded; these groups average their gradients",
            least=1,
            tried=["node"],
        )
        offload: Literal["none", "cpu"] = option(
            "none",
            "whether host memory (cpu) keeps parameters, gradients and the optimizer's state",
            tried=["cpu"],
            kind="offload",
        )
        gradient_sync: Literal["each-part", "last-part"] = option(
            "each-part",
            "with `gradient_accumulation_steps`, when gradients are reduced: after each part (less memory), "
            "or once after the last part (less communication, but each worker keeps whole gradients)",
        )

    @classmethod
    def check_nodes(cls, options: dict[str, Any], gpus: int, per_node: int) -> None:
        workers = compute_shard_group_size(options.get("shard_group_size", "all"), gpus, per_node)
        whose = " (those of a node)" if options.get("shard_group_size") == "node" else ""
        check_equal_groups(f"shard_group_size = {workers}{whose}", workers, gpus)

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        if options.get("offload") == "cpu" and values["precision"] == "fp16":
            yield (
                ".precision = 'fp16': the loss scaler needs the gradients on the device, but with offload: "
                "cpu they are on the host; use bf16"
            )

    def traits(self, gpus: int) -> base.Traits:
        # Updates equal DDP's only under autocast. FSDP2's own policy rounds parameters to 16 bits where other
        # strategies keep 32.
        same_rounding = self.options.mixed_precision == "autocast"
        chosen = self.options.shard_group_size
        # With `node` the number of shards is unknown here: settings do not contain the number of workers per
        # node.
        parts = (
            None if chosen == "node" and gpus > 1 else compute_shard_group_size(chosen, gpus, gpus)
        )
        # `ring_copies` is 2, the minimum. Parameters that are gathered again for backward make a third copy.
        # But the root is gathered only once, and all parameters may be in the root.
        return base.Traits(
            is_synchronous_on_one_worker=same_rounding,
            equals_ddp=same_rounding,
            shards_states=True,
            weight_parts=parts,
            optimizer_parts=parts,
            states_on_host=self.options.offload == "cpu",
            updates_per_step=1,
            ring_copies=2,
        )

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        trial = worker.trial
        scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
        if scalars:
            yield (
                f"FSDP divides parameters along a dimension, which {format_names(scalars)} does not have; "
                "use a tensor of one element, nn.Parameter(torch.ones(1))"
            )
        if empty := [name for name, p in model.named_parameters() if not p.numel()]:
            yield f"FSDP cannot divide {format_names(empty)}, which has no elements; remove it"
        scattered = [name for name, p in model.named_parameters() if not p.is_contiguous()]
        if scattered:
            yield (
                f"FSDP needs contiguous parameters, and these are not contiguous: {format_names(scattered)}; "
                "call .contiguous() before nn.Parameter"
            )
        if trial.sparse_gradient_parameters:
            yield refusals.sparse_gradient_reason(
                trial.sparse_gradient_parameters, "FSDP cannot divide"
            )
        for label, dtypes in self._iter_dtypes_by_shard_group(model, worker):
            if len(dtypes) > 1:
                yield (
                    f"{label} has parameters of several dtypes ({', '.join(dtypes)}), which FSDP "
                    "cannot gather together; use one dtype, or put them into different groups"
                )
        yield from refusals.iter_unshardable_model_reasons(trial)
        # FSDP gathers a group's parameters when it is called. With `always` it frees them after the call.
        early = trial.parameters_read_before_call
        if self.options.reshard_after_forward == "always":
            early += trial.parameters_read_after_calls
        if early:
            yield (
                f"forward reads {format_names(early)} outside of a call of its shard group, and FSDP "
                "gathers a group only for a call; call the module itself (neither its parts nor "
                ".forward), or name in `wrap_classes` only classes whose instances are called"
            )
        if trial.groups_with_written_views and self.options.reshard_after_forward == "always":
            yield (
                f"{format_names(trial.groups_with_written_views)} gives a view, which forward then "
                "changes in place "
                "(h += r), so that FSDP does not gather its group for backward; return .clone() of it, add "
                f"out of place, or set reshard_after_forward to never {format_help_address('gives a view')}"
            )
        if (
            trial.names_without_gradient_in_some_steps
            and worker.settings.gradient_accumulation_steps > 1
        ):
            yield from self._iter_accumulation_refusals(
                trial.names_without_gradient_in_some_steps, worker
            )
        if worker.world_size > 1 and (reason := refusals.describe_skipped_modules(trial)):
            yield reason
        elif worker.world_size > 1 and trial.forward_reads_values and trial.uncalled_groups:
            yield (
                f"forward reads values of tensors and did not call {format_names(trial.uncalled_groups)}: it "
                "seems to choose modules by its data. Workers have different data, so they would gather "
                "different groups; call all modules, and choose with torch.where or a factor of 0 or 1"
            )

    def _iter_accumulation_refusals(self, names: list[str], worker: base.Worker) -> Iterator[str]:
        """Yield reasons against gradient accumulation if parameters get no gradient in some batch parts."""
        s, size = worker.settings, worker.world_size
        may_lack = f"{format_names(names)} may get no gradient in some parts of a batch"
        if self.options.gradient_sync == "last-part":
            if self._make_mixed_precision_policy(s.precision) is not None:
                yield (
                    f"{may_lack}, and with mixed_precision: policy, gradient_sync: last-part and "
                    f"gradient_accumulation_steps = {s.gradient_accumulation_steps} FSDP cannot add up "
                    "gradients of different dtypes; set "
                    "gradient_sync to each-part, mixed_precision to autocast, or gradient_accumulation_steps "
                    "to 1"
                )
        elif (
            compute_shard_group_size(self.options.shard_group_size, size, worker.local_world_size)
            < size
        ):
            yield (
                f"{may_lack}, and with shard_group_size, gradient_sync: each-part and "
                f"gradient_accumulation_steps = {s.gradient_accumulation_steps} FSDP cannot add up shards of "
                "different parameters; set gradient_sync to "
                "last-part, shard_group_size to all, or gradient_accumulation_steps to 1"
            )

    def _iter_dtypes_by_shard_group(
        self, model: nn.Module, worker: base.Worker
    ) -> Iterator[tuple[str, list[str]]]:
        """Yield each shard group's name and parameter dtypes; last, those of parameters in no group."""
        left = set(model.parameters())
        for label, modules in worker.wrap_groups:
            own = {p for m in modules for p in m.parameters()}
            left -= own
            yield f"the shard group {label}", collective.list_dtype_names(own)
        yield "the model outside of its shard groups", collective.list_dtype_names(left)

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        from stratbench.workload.torch_internals import BatchNorm

        self.group_size = compute_shard_group_size(
            self.options.shard_group_size, worker.world_size, worker.local_world_size
        )
        groups = worker.world_size // self.group_size
        if groups == 1:
            mesh = init_device_mesh(worker.device.type, (worker.world_size,))
        else:
            mesh = init_device_mesh(
                worker.device.type, (groups, self.group_size), mesh_dim_names=("groups", "shards")
            )
            self.shard_group = mesh.get_group("shards")
        arguments = {
            "mesh": mesh,
            "reshard_after_forward": self.options.reshard_after_forward == "always",
        }
        if self.options.offload == "cpu":
            on_cuda = worker.device.type == "cuda"
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=on_cuda)
        self.policy = policy = self._make_mixed_precision_policy(worker.settings.precision)
        apart: list[nn.Module] = []
        if policy is not None:
            # BatchNorm gets its own shard group without mixed precision: its statistics are float32, so its
            # weights must be, too.
            apart = [m for m in model.modules() if isinstance(m, BatchNorm)]
            if apart:
                fully_shard(apart, **arguments)
            arguments["mp_policy"] = policy
        for _, group in worker.wrap_groups:
            # The modules are passed as a list even if there is one: PyTorch 2.11 does not support DenseNet's
            # ModuleDict.
            if modules := [module for module in group if module not in apart]:
                fully_shard(modules, **arguments)
        if policy is not None:
            # Only the whole model's output is cast to float32, because inner layers may expect 16 bits.
            arguments["mp_policy"] = replace(policy, output_dtype=torch.float32)
        if self.options.reshard_after_forward == "always":
            # None means FSDP2's default: the root keeps its gathered parameters, which backward needs at
            # once.
            arguments["reshard_after_forward"] = None
        fully_shard(model, **arguments)
        return model

    def _list_regathered_parameter_ids(self) -> set[int]:
        """Return the `id` of each parameter that FSDP2 gathers a second time, for backward.

        When backward reaches a group, FSDP2 gathers this group and the preceding one. The trial step has
        found the groups that backward reaches. Without a trial, backward reaches all groups.
        """
        trial = self.worker.trial
        called = trial.backward_reaches_group.items() if trial else ()
        skipped = {i for (i, comes), (_, next_comes) in pairwise(called) if not comes | next_comes}
        groups = [ms for i, (_, ms) in enumerate(self.worker.wrap_groups) if i not in skipped]
        return {id(p) for ms in groups for m in ms for p in m.parameters()}

    def create_sync_context(self, is_last_part: bool) -> AbstractContextManager:
        if self.options.gradient_sync == "last-part":
            self.module.set_requires_gradient_sync(is_last_part)
        else:
            # With HSDP, groups average their gradient shards only in the last part of a batch.
            self.module.set_requires_all_reduce(is_last_part)
        return nullcontext()

    def _make_mixed_precision_policy(self, precision: str) -> MixedPrecisionPolicy | None:
        """Return FSDP2's own mixed-precision policy, or None if the options choose autocast."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        dtype = get_autocast_dtype(precision)
        if dtype is None or self.options.mixed_precision == "autocast":
            return None
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.policy is None:
            return super().forward(x, y)
        return self.compute_mean_loss(x, y)

    def communication(self) -> dict[str, Any]:
        from stratbench.workload.torch_internals import BatchNorm

        in_16_bits = self.policy is not None
        norms = [m for m in self.model.modules() if in_16_bits and isinstance(m, BatchNorm)]
        full = {id(p) for m in norms for p in m.parameters()}
        again = self._list_regathered_parameter_ids()
        w, s = self.worker.world_size, self.group_size
        frees = self.options.reshard_after_forward == "always"
        parts = self.worker.settings.gradient_accumulation_steps
        reductions = parts if self.options.gradient_sync == "each-part" else 1
        moved_bytes = averaged_bytes = 0
        for p in self.model.parameters():
            # FSDP2 pads the first dimension to a multiple of the workers of a group, and shards it.
            padded = -(-p.shape[0] // s) * s * (p.numel() // max(1, p.shape[0]))
            width = 2 if in_16_bits and id(p) not in full else p.element_size()
            # Parameters that forward frees are gathered twice. The root's are gathered once.
            gathers = 2 if frees and id(p) in again | full else 1
            moved_bytes += padded * gathers * parts * width
            if p.requires_grad:
                moved_bytes += padded * reductions * p.element_size()
                averaged_bytes += 2 * padded // s * p.element_size()
        if self.worker.settings.max_grad_norm is not None:
            # Clipping also all-reduces the gradient norm.
            moved_bytes += 2 * self.parameters[0].element_size()
        # The sum has two terms: the traffic within a shard group, and the averaging of gradients between
        # groups.
        groups = w // s
        return collective.describe_ring_traffic(
            (s - 1) / s * moved_bytes + (groups - 1) / groups * averaged_bytes
        )

    def report(self) -> dict[str, Any]:
        report = super().report()
        report["details"]["shard_group_size"] = self.group_size
        if self.policy is not None:
            dtype = str(self.policy.param_dtype).removeprefix("torch.")
            report["details"]["compute_dtype"] = (
                f"{dtype} (MixedPrecisionPolicy, float32 reduction)"
            )
        return report


def compute_shard_group_size(
    shard_group_size: int | Literal["all", "node"], gpus: int, per_node: int
) -> int:
    """Return over how many workers one copy of the model is sharded. The number is at most `gpus`.

    Args:
        shard_group_size: Value of the option.
        gpus: Number of workers.
        per_node: Workers per node.
    """
    chosen = {"all": gpus, "node": per_node}.get(shard_group_size, shard_group_size)
    return min(chosen, gpus)
