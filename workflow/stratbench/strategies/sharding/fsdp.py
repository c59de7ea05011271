"""`fsdp`: parameters, gradients and optimizer state are sharded over the workers (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import option
from stratbench.cell.text.help_page import help_address
from stratbench.cell.text.words import names_text
from stratbench.strategies import base
from stratbench.strategies.mesh import refuse_uneven
from stratbench.strategies.sharding.sharded import Sharded
from stratbench.workload.network.precision import autocast_dtype

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.fsdp import MixedPrecisionPolicy


class FSDP(Sharded):
    """torch.distributed.fsdp.fully_shard, one group for each entry of the model's wrap plan.

    `reshard_after_forward = always` frees a group's gathered parameters after its forward and gathers
    them again for backward (like ZeRO-3), but for what is in no group: FSDP2 keeps the root's own
    parameters, since backward begins with the root. `never` keeps all of them (like ZeRO-2: less
    traffic, more memory). BatchNorm's running statistics are never synchronised by FSDP: their
    average over the workers is evaluated. With `shard_group_size` the workers form groups, each of which
    holds a model (HSDP). With `offload` each worker's shards are in host memory, where the optimizer
    runs; they are copied to the device to be gathered, and their gradients back.

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
        "gathering parameters is inside forward and backward, reducing gradients inside backward; "
        "how much of it computation does not hide cannot be separated (`profile: true` shows it); with "
        "offload: cpu the copies are there, too, and the host waits for the gradients in every step"
    )
    uses_wrap_groups = True
    collectives = ("all_gather", "reduce_scatter", "all_reduce")
    buffers_note = "each worker keeps its own, and their mean is evaluated"

    @dataclass(frozen=True)
    class Options(base.Options):
        reshard_after_forward: Literal["always", "never"] = option(
            "always",
            "when the parameters that a forward pass gathers are freed",
            tried=["never"],
            kind="sharding",
        )
        mixed_precision: Literal["autocast", "policy"] = option(
            "autocast",
            "autocast: the same arithmetic as every other strategy; policy: FSDP2's own mixed "
            "precision, which also gathers parameters in 16 bits",
        )
        shard_group_size: int | Literal["all", "node"] = option(
            "all",
            "workers that hold one model between them; the groups average their gradients",
            least=1,
            tried=["node"],
        )
        offload: Literal["none", "cpu"] = option(
            "none",
            "where parameters, gradients and the optimizer's state are kept",
            tried=["cpu"],
            kind="offload",
        )
        gradient_sync: Literal["each-part", "last-part"] = option(
            "each-part",
            "with `gradient_accumulation_steps`, when gradients are reduced: after each part (less memory); "
            "or once, after the last part, until when each worker keeps whole gradients (less communication)",
        )

    @classmethod
    def check_nodes(cls, options: dict[str, Any], gpus: int, per_node: int) -> None:
        workers = group_size(options.get("shard_group_size", "all"), gpus, per_node)
        whose = " (those of a node)" if options.get("shard_group_size") == "node" else ""
        refuse_uneven(f"shard_group_size = {workers}{whose}", workers, gpus)

    @classmethod
    def refusals(cls, options: dict[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
        if options.get("offload") == "cpu" and values["precision"] == "fp16":
            yield (
                ".precision = 'fp16': the loss scaler's verdict is on the device, but with offload: cpu the "
                "gradients that it is about are on the host; use bf16"
            )

    def traits(self, gpus: int) -> base.Traits:
        # By the policy, parameters are rounded to 16 bits where the other strategies keep 32.
        same_rounding = self.options.mixed_precision == "autocast"
        chosen = self.options.shard_group_size
        # The cell's settings do not contain the number of workers per node.
        parts = None if chosen == "node" and gpus > 1 else group_size(chosen, gpus, gpus)
        return base.Traits(
            synchronous_alone=same_rounding,
            equals_ddp=same_rounding,
            shards_states=True,
            weight_parts=parts,
            optimizer_parts=parts,
            states_on_host=self.options.offload == "cpu",
            updates_per_step=1,
            ring_copies=2,  # 3 for what is gathered again: all but the root's own parameters, if any
        )

    def refusals_of_model(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        trial = worker.trial
        scalars = [name for name, p in model.named_parameters() if p.dim() == 0]
        if scalars:
            yield (
                f"FSDP divides parameters along a dimension, which {names_text(scalars)} does not have; make "
                "it a tensor of one element, nn.Parameter(torch.ones(1))"
            )
        if empty := [name for name, p in model.named_parameters() if not p.numel()]:
            yield f"FSDP cannot divide {names_text(empty)}, which holds no number; remove it"
        scattered = [name for name, p in model.named_parameters() if not p.is_contiguous()]
        if scattered:
            yield (
                f"FSDP takes contiguous parameters, and these are not: {names_text(scattered)}; call "
                ".contiguous() before nn.Parameter"
            )
        if trial.sparse:
            yield base.sparse_gradient(trial.sparse, "FSDP cannot divide")
        for label, dtypes in self._dtypes(model, worker):
            if len(dtypes) > 1:
                yield (
                    f"{label} has parameters of several dtypes ({', '.join(dtypes)}), which FSDP "
                    "cannot gather together; use one, or shard them apart"
                )
        yield from base.refusals_of_parts(trial)
        # Tensors retained after a forward may be read until the next step.
        early = trial.uncalled
        if self.options.reshard_after_forward == "always":
            early += trial.late
        if early:
            yield (
                f"forward reads {names_text(early)} outside of a call of the shard group it belongs to, and "
                "FSDP gathers a group only then; call the module itself (neither its parts nor .forward), or "
                "name in `wrap_classes` only classes whose instances are called"
            )
        if trial.written_views and self.options.reshard_after_forward == "always":
            yield (
                f"{names_text(trial.written_views)} gives a view, which forward then changes in place "
                "(h += r), so that FSDP does not gather it for backward; return .clone() of it, add out of "
                f"place, or set reshard_after_forward to never {help_address('gives a view')}"
            )
        if trial.at_times and worker.settings.gradient_accumulation_steps > 1:
            yield from self._refusals_of_parts(trial.at_times, worker)
        if worker.world_size > 1 and trial.by_chance:
            yield base.by_chance(trial.by_chance)
        elif worker.world_size > 1 and trial.by_data:
            yield base.by_data(trial.by_data)
        elif worker.world_size > 1 and trial.reads_values and trial.unopened:
            yield (
                f"forward reads values of tensors and did not call {names_text(trial.unopened)}: it seems to "
                "choose by its data what it calls, and workers, whose data differ, would gather different "
                "groups; call all of them, and choose with torch.where or a factor of 0 or 1"
            )

    def _refusals_of_parts(self, names: list[str], worker: base.Worker) -> Iterator[str]:
        """Yield why parts' gradients cannot be accumulated if `names` get a gradient in some steps only."""
        s, size = worker.settings, worker.world_size
        may_lack = f"{names_text(names)} may get no gradient in some parts of a batch"
        if self.options.gradient_sync == "last-part":
            if self._make_policy(s.precision) is not None:
                yield (
                    f"{may_lack}, and with mixed_precision: policy, gradient_sync: last-part and "
                    f"gradient_accumulation_steps = {s.gradient_accumulation_steps} FSDP cannot add up "
                    "gradients of different dtypes; set "
                    "gradient_sync to each-part, mixed_precision to autocast, or gradient_accumulation_steps "
                    "to 1"
                )
        elif group_size(self.options.shard_group_size, size, worker.local_world) < size:
            yield (
                f"{may_lack}, and with shard_group_size, gradient_sync: each-part and "
                f"gradient_accumulation_steps = {s.gradient_accumulation_steps} FSDP cannot add up shards of "
                "different parameters; set gradient_sync to "
                "last-part, shard_group_size to all, or gradient_accumulation_steps to 1"
            )

    def _dtypes(self, model: nn.Module, worker: base.Worker) -> Iterator[tuple[str, list[str]]]:
        """Yield the dtypes of each group's parameters, and of what is in none."""
        left = set(model.parameters())
        for label, modules in worker.wrap_groups:
            own = {p for m in modules for p in m.parameters()}
            left -= own
            yield f"the shard group {label}", base.dtype_names(own)
        yield "what is in no shard group", base.dtype_names(left)

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        from stratbench.workload.torch_internals import BatchNorm

        self.group_size = group_size(
            self.options.shard_group_size, worker.world_size, worker.local_world
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
        self.policy = policy = self._make_policy(worker.settings.precision)
        apart: list[nn.Module] = []
        if policy is not None:
            # BatchNorm's statistics are float32, and so its weights must be: a group of their own.
            apart = [m for m in model.modules() if isinstance(m, BatchNorm)]
            if apart:
                fully_shard(apart, **arguments)
            arguments["mp_policy"] = policy
        for _, group in worker.wrap_groups:
            # As a list even for one: PyTorch 2.11 does not support DenseNet's block, a ModuleDict, by itself.
            if modules := [module for module in group if module not in apart]:
                fully_shard(modules, **arguments)
        if policy is not None:
            # Only the whole model's output: a layer in 16 bits may be between two groups.
            arguments["mp_policy"] = replace(policy, output_dtype=torch.float32)
        if self.options.reshard_after_forward == "always":
            # Leave the root to FSDP2, which keeps it: freed, it would be gathered again at once.
            arguments["reshard_after_forward"] = None
        fully_shard(model, **arguments)
        return model

    def _gathered_again(self) -> set[int]:
        """Return the `id` of each grouped parameter that is gathered for backward, too.

        FSDP2 does it where backward comes to a group, and ahead of that for the group before. Which those
        are the trial has shown; of a network that had none nothing is frozen.
        """
        trial = self.worker.trial
        called = trial.in_backward.items() if trial else ()
        skipped = {i for (i, comes), (_, next_comes) in pairwise(called) if not comes | next_comes}
        groups = [ms for i, (_, ms) in enumerate(self.worker.wrap_groups) if i not in skipped]
        return {id(p) for ms in groups for m in ms for p in m.parameters()}

    def synchronising(self, last: bool) -> AbstractContextManager:
        if self.options.gradient_sync == "last-part":
            self.module.set_requires_gradient_sync(last)
        else:
            # Shards of a part's gradients are averaged over the groups (HSDP) with those of the last.
            self.module.set_requires_all_reduce(last)
        return nullcontext()

    def _make_policy(self, precision: str) -> MixedPrecisionPolicy | None:
        """Return FSDP2's own mixed precision if an option requests it."""
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        dtype = autocast_dtype(precision)
        if dtype is None or self.options.mixed_precision == "autocast":
            return None
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.policy is None:
            return super().forward(x, y)
        return self.mean_loss(x, y)

    def communication(self) -> dict[str, Any]:
        from stratbench.workload.torch_internals import BatchNorm

        in_16_bits = self.policy is not None
        norms = [m for m in self.model.modules() if in_16_bits and isinstance(m, BatchNorm)]
        full = {id(p) for m in norms for p in m.parameters()}
        again = self._gathered_again()
        w, s = self.worker.world_size, self.group_size
        frees = self.options.reshard_after_forward == "always"
        parts = self.worker.settings.gradient_accumulation_steps
        reductions = parts if self.options.gradient_sync == "each-part" else 1
        moved_bytes = averaged_bytes = 0
        for p in self.model.parameters():
            # The first dimension is what is sharded, padded to a multiple of the workers.
            padded = -(-p.shape[0] // s) * s * (p.numel() // max(1, p.shape[0]))
            width = 2 if in_16_bits and id(p) not in full else p.element_size()
            gathers = 2 if frees and id(p) in again | full else 1  # the root's own: once
            moved_bytes += padded * gathers * parts * width
            if p.requires_grad:
                moved_bytes += padded * reductions * p.element_size()
                averaged_bytes += 2 * padded // s * p.element_size()
        if self.worker.settings.max_grad_norm is not None:
            moved_bytes += 2 * self.parameters[0].element_size()  # the norm's all-reduce
        # Within a group, and a worker's part of the gradients with those of the other groups.
        groups = w // s
        return base.ring_traffic((s - 1) / s * moved_bytes + (groups - 1) / groups * averaged_bytes)

    def report(self) -> dict[str, Any]:
        report = super().report()
        report["details"]["shard_group_size"] = self.group_size
        if self.policy is not None:
            dtype = str(self.policy.param_dtype).removeprefix("torch.")
            report["details"]["compute_dtype"] = (
                f"{dtype} (MixedPrecisionPolicy, float32 reduction)"
            )
        return report


def group_size(shard_group_size: int | Literal["all", "node"], gpus: int, per_node: int) -> int:
    """Return the workers of a group that holds one model.

    One group if `gpus` are no more.

    Args:
        shard_group_size: The option.
        gpus: Number of workers.
        per_node: Workers per node.
    """
    chosen = {"all": gpus, "node": per_node}.get(shard_group_size, shard_group_size)
    return min(chosen, gpus)
