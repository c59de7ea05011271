"""`tensor`: the layers of a network are divided among workers (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import option
from stratbench.cell.text.words import names_text
from stratbench.extensions.splitting import declared
from stratbench.extensions.splitting.split import ModelSplit, these_do
from stratbench.strategies import base
from stratbench.strategies.mesh import Mesh, refuse_uneven
from stratbench.strategies.sharding.sharded import Sharded
from stratbench.workload.network import models
from stratbench.workload.users_code import Refused

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from stratbench.workload.network.models import Model

#: Words of a plan on how a module is divided; `styles` explains each.
WORDS = (
    *("embedding", "first", "norm", "head norm", "input", "colwise", "colwise of input", "rowwise"),
    *("heads", "scores"),
)


#: Maximum difference between gradients that must be equal on all workers of a group, relative to the largest.
UNLIKE = 1e-2


class TensorParallel(ModelSplit, Sharded):
    """torch.distributed.tensor.parallel.parallelize_module, by the plan that a network states.

    Each of `tensor_parallel_size` holds some heads of every attention, some columns of the first matrix of
    every perceptron with the same rows of its second, and a part of the vocabulary (Shoeybi et al.,
    Megatron-LM, 2019): a block adds up its activations twice in forward and twice in backward. The
    cross-entropy is computed on the divided scores. Several such groups are replicas: their states are
    sharded over them by FSDP2, or each has all of its own and their gradients are averaged, a
    parameter's as soon as backward has made it. With `sequence_parallel` layer norms and the stream between
    blocks are divided by positions (Korthikanti et al., Reducing activation recomputation in large
    transformer models, 2022).
    """

    waits_for_activations = True
    parts_are = "divided layers"
    stated_by = "tensor_plan"
    summary: ClassVar[str] = "layers divided among workers (tensor parallelism)"
    rule: ClassVar[str] = (
        "As single, but each worker computes a part of every layer; the parts are added up, or gathered, "
        "within forward and backward"
    )
    breakdown_note: ClassVar[str] = (
        "adding up activations is inside forward and their gradients inside backward, as what replicas "
        "exchange is; how much of it computation does not hide cannot be separated (`profile: true` "
        "shows it)"
    )
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    evaluated_on = "the divided weights"

    @dataclass(frozen=True)
    class Options(base.Options):
        tensor_parallel_size: int | Literal["all"] = option(
            "all",
            "workers that divide each layer between them; several such groups are replicas",
            least=1,
            tried=[2, 4, 8],
            kind="tensor",
        )
        data_parallel: Literal["fsdp", "ddp"] = option(
            "fsdp", "whether replicas divide their states (fsdp), or each keeps its own (ddp)"
        )
        sequence_parallel: bool = option(
            False,
            "whether norms and the stream between blocks are divided by positions",
            tried=[True],
        )

    def mesh(self, gpus: int) -> Mesh:
        chosen = self.options.tensor_parallel_size
        workers = gpus if chosen == "all" else min(chosen, gpus)
        refuse_uneven(f"tensor_parallel_size = {workers}", workers, gpus)
        return Mesh(gpus // workers, tensor=workers)

    @classmethod
    def why_not(cls, network: str | Model) -> str | None:
        if not declared.has_tensor_plan(network):
            able = these_do(declared.has_tensor_plan)
            return f"it states no plan by which its layers can be divided; {able}"
        return None

    @classmethod
    def refusals(cls, options: dict[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
        yield from super().refusals(options, values)
        for name, network in values["networks"].items():
            reads_images = models.facts_of(network).reads_text is False
            if options["sequence_parallel"] and reads_images and declared.has_tensor_plan(network):
                yield (
                    f".models = {name!r}: sequence_parallel: true divides the positions of texts; an image's "
                    "patches "
                    "and their class token do not come out even; set it to false"
                )

    def too_many(
        self, network: str | Model, gpus: int, built: nn.Module | None = None
    ) -> str | None:
        workers, heads = self.mesh(gpus).tensor, declared.heads_of(network, built)
        if heads % workers:
            return (
                f"{workers} workers cannot divide its {heads} heads evenly; set tensor_parallel_size to a "
                f"divisor of {heads}"
            )
        return None

    def refusals_of_model(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        network = models.model_of(worker.settings)
        if reason := self.why_not(network):
            yield reason
        elif worker.settings.own_model is not None:
            yield from super().refusals_of_model(model, worker)
            try:
                plan = declared.tensor_plan(network, model)
            except ValueError as e:
                yield str(e)
                return
            yield from faults_of_plan(model, plan)
            if reason := self.too_many(network, worker.world_size, model):
                yield reason
            missing = {"first", "scores"}.difference(plan.values())
            if self.options.sequence_parallel and missing:
                yield (
                    "sequence_parallel: true divides the stream from the module that tensor_plan calls "
                    "`first` to the "
                    f"one that it calls `scores`, and it has no {names_text(sorted(missing))}; name them, or "
                    "set sequence_parallel to false"
                )

    def divides(self, gpus: int) -> bool:
        return super().divides(gpus) or (
            self.options.data_parallel == "fsdp" and self.mesh(gpus).replicas > 1
        )

    def wrap(self, model: nn.Module, worker: base.Worker) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import parallelize_module

        replicas, tensor = worker.mesh.replicas, worker.mesh.tensor
        mesh = init_device_mesh(
            worker.device.type, (replicas, tensor), mesh_dim_names=("replicas", "tensor")
        )
        if tensor > 1:
            again = repeated_parameters(model)
            plan = separate_heads(
                model, declared.tensor_plan(models.model_of(worker.settings), model)
            )
            parallelize_module(
                model, mesh["tensor"], styles(model, plan, self.options.sequence_parallel)
            )
            for (module, name), (first, own) in again:
                setattr(module, name, getattr(first, own))
            model.register_forward_hook(whole_output)
            if self.options.sequence_parallel:
                model.register_forward_pre_hook(partial(check_positions, tensor))
        #: For each trainable parameter, whether this worker's part of the gradient is in the norm.
        self._counts = [
            is_divided(p) or worker.mesh.place(worker.rank).tensor == 0
            for p in model.parameters()
            if p.requires_grad
        ]
        self._shards = self.options.data_parallel == "fsdp" and replicas > 1
        self._averages = self.options.data_parallel == "ddp" and replicas > 1
        if self._shards:
            for _, modules in worker.wrap_groups:
                fully_shard(modules, mesh=mesh["replicas"])
            fully_shard(model, mesh=mesh["replicas"])
        if self._averages:
            self._average(model, mesh)
        self.group_size = replicas * tensor if self._shards else tensor
        self._tensor_group = mesh.get_group("tensor")
        self.shard_group = None if self._shards else self._tensor_group
        return model

    def _average(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Average each gradient over the replicas, concurrently with the rest of backward."""
        self._is_last = True
        self._under_way: list[tuple[Tensor, torch.distributed.Work]] = []
        group, replicas = mesh.get_group("replicas"), mesh.size(0)
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._send, group, replicas))

    def _send(self, group: Any, replicas: int, parameter: nn.Parameter) -> None:
        import torch
        import torch.distributed as dist

        from stratbench.telemetry.shards import local_part

        if self._is_last:
            with torch.no_grad():
                own = local_part(parameter.grad).div_(replicas)
            self._under_way.append((own, dist.all_reduce(own, group=group, async_op=True)))

    def synchronising(self, last: bool) -> AbstractContextManager:
        # FSDP2 reduces the gradients of each part, so that no full ones are stored.
        self._is_last = last
        return nullcontext()

    def add_gradients(self, x: Tensor, y: Tensor, parts: int = 1, last: bool = True) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self.worker.mesh.tensor > 1 else nullcontext():
            return super().add_gradients(x, y, parts, last)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from stratbench.telemetry.shards import local_part

        return local_part(super().forward(x, y))

    def link_gradients(self) -> None:
        if self._averages:
            for _, work in self._under_way:
                work.wait()
            self._under_way.clear()
        # A norm's gradient is of the positions or heads that this worker has; the others' are to be added.
        for p in self.parameters:
            placements = getattr(p.grad, "placements", None)
            if placements is not None and placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        super().link_gradients()

    def partly_trained(self, x: Tensor, y: Tensor) -> list[str]:
        import torch
        import torch.distributed as dist

        from stratbench.telemetry.shards import local_part

        if not self.options.sequence_parallel or self.worker.mesh.tensor == 1:
            return []
        self._is_last = False  # replicas need not agree
        self.model.eval()  # nothing is drawn, and no statistics change
        self.add_gradients(x, y)
        self.model.train()
        named = dict(self.model.named_parameters())
        apart = torch.zeros(len(named), dtype=torch.float64, device=self.worker.device)
        for i, p in enumerate(named.values()):
            if p.grad is not None and not is_by_plan(p):
                least, most = local_part(p.grad).clone(), local_part(p.grad).clone()
                dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._tensor_group)
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._tensor_group)
                if least.numel():
                    largest = torch.maximum(least.abs().max(), most.abs().max())
                    apart[i] = (most - least).max() / largest.clamp(min=1e-30)
            p.grad = None
        self._is_last = True
        self.reset()
        dist.all_reduce(apart, op=dist.ReduceOp.MAX)
        return [name for name, by in zip(named, apart.tolist(), strict=True) if by > UNLIKE]

    def normed_tensors(self) -> list[Tensor]:
        return list(compress(self.local, self._counts))


def repeated_parameters(
    model: nn.Module,
) -> list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """Return each repeated use of a parameter, and its first: a module, and the name in it."""
    first: dict[int, tuple[nn.Module, str]] = {}
    again = []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) in first:
                again.append(((module, name), first[id(p)]))
            first.setdefault(id(p), (module, name))
    return again


def is_divided(parameter: nn.Parameter) -> bool:
    """Return whether the workers of a group hold shards of it, not the whole each."""
    return any(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def is_by_plan(parameter: nn.Parameter) -> bool:
    """Return whether a plan divides a parameter, so that DTensor reduces its gradient."""
    mesh = getattr(parameter, "device_mesh", None)
    return "tensor" in (getattr(mesh, "mesh_dim_names", None) or ())


def whole_output(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Gather the full scores of a model in evaluation.

    A forward hook.

    In training the loss is computed on the shards.

    Args:
        module: The model.
        _inputs: Unused.
        output: Its output.
    """
    is_whole = module.training or not hasattr(output, "full_tensor")
    return output if is_whole else output.full_tensor()


def check_positions(workers: int, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Raise Refused if `workers` cannot divide the positions of texts evenly.

    A forward hook.

    Args:
        workers: Number of workers.
        _module: Unused.
        inputs: Texts, shape [batch, positions].
    """
    positions = inputs[0].shape[1]
    if positions % workers:
        raise Refused(
            f"{workers} workers cannot divide texts of {positions} tokens evenly (sequence_parallel: true); "
            "set "
            "sequence_parallel: false, or choose another length of the texts"
        )


def faults_of_plan(model: nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """Yield what is wrong with a plan for this model.

    A plan maps paths of modules (`*`: any name) to words.
    """
    from stratbench.extensions.splitting.heads import why_not

    for path, word in plan.items():
        if word not in WORDS:
            yield f"its tensor_plan says {word!r} of {path!r}; the words are {', '.join(WORDS)}"
        named = matching(model, path)
        if not named:
            yield f"its tensor_plan names {path!r}, and the network has no module of that path"
        if word == "heads":
            yield from (
                f"its tensor_plan says 'heads' of {name!r}, which {reason}"
                for name in named
                if (reason := why_not(model.get_submodule(name)))
            )


def matching(model: nn.Module, path: str) -> list[str]:
    """Return the paths of a network's modules that a plan's path (`*`: any name) means."""
    return [name for name, _ in model.named_modules() if fnmatchcase(name, path)]


def separate_heads(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Split the projections of each attention with the word `heads`; return the plan with theirs."""
    from stratbench.extensions.splitting.heads import SelfAttention

    divided: dict[str, str] = {}
    for path, word in plan.items():
        divided[path] = word
        if word == "heads":
            for name in matching(model, path):
                model.set_submodule(name, SelfAttention(model.get_submodule(name)))
            parts = dict.fromkeys(("query", "key", "value"), "colwise of input") | {
                "out": "rowwise"
            }
            divided |= {f"{path}.{name}": part for name, part in parts.items()}
    return divided


def styles(model: nn.Module, plan: Mapping[str, str], sequence: bool) -> dict[str, ParallelStyle]:
    """Return the style of `parallelize_module` for each module that the plan names, by path.

    A plan's words: `embedding`: by the vocabulary. `first`: where the stream begins. `input`: its parts read
    their first input, which is gathered once for all of them; others they read as they are. `colwise`: the
    outputs of a linear layer; `colwise of input`: the same below an `input`. `rowwise`: the inputs. `norm`:
    of each position by itself. `head norm`: of each head by itself, [batch, positions, heads, width].
    `heads`: an nn.MultiheadAttention of one input (`separate_heads`). `scores`: the outputs, which stay
    divided for the loss.

    Args:
        model: The model.
        plan: Its plan.
        sequence: Whether positions are divided, too.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    from stratbench.extensions.splitting.heads import FirstInput

    stream = Shard(1) if sequence else Replicate()

    def style_of(kind: str) -> ParallelStyle | None:
        match kind:
            case "embedding":
                return RowwiseParallel(input_layouts=Replicate())
            case "input":
                return FirstInput(stream)
            case "heads":
                return PrepareModuleInput(
                    input_layouts=(stream, None, None),
                    desired_input_layouts=(Replicate(), None, None),
                    use_local_output=False,
                )
            case "colwise":
                return ColwiseParallel(input_layouts=stream)
            case "colwise of input":
                return ColwiseParallel()
            case "rowwise":
                return RowwiseParallel(output_layouts=stream)
            case "scores":
                return ColwiseParallel(
                    input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
                )
            case "first" if sequence:
                return PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=stream, use_local_output=True
                )
            case "head norm":
                return SequenceParallel(sequence_dim=2, use_local_output=True)
            case "norm" if sequence:
                return SequenceParallel()
            case "first" | "norm":
                return None
        raise ValueError(f"a plan says {kind!r}, which is no way to divide a module")

    wanted = {name: kind for path, kind in plan.items() for name in matching(model, path)}
    by_name = {name: style_of(kind) for name, kind in wanted.items()}
    return {name: style for name, style in by_name.items() if style is not None}
