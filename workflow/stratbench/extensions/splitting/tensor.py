"""Strategy `tensor`: each layer of a model is divided among workers (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratbench.cell.options import option
from stratbench.cell.text.words import format_names
from stratbench.extensions.splitting import declared
from stratbench.extensions.splitting.split import ModelSplit, format_divisible_model_names
from stratbench.strategies import base
from stratbench.strategies.mesh import Mesh, check_equal_groups
from stratbench.strategies.sharding.sharded import Sharded
from stratbench.workload.network import models
from stratbench.workload.users_code import Refused

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

    from stratbench.workload.network.models import Model

    #: A module and the name of one of its parameters.
    ParameterUse = tuple[nn.Module, str]

#: Words of a tensor plan, each a way to divide a module among workers. `make_parallel_styles` explains them.
WORDS = (
    *("embedding", "first", "norm", "head norm", "input", "colwise", "colwise of input", "rowwise"),
    *("heads", "scores"),
)


#: Workers' gradients of a parameter count as unlike if their relative difference is larger than this.
UNLIKE = 1e-2


class TensorParallel(ModelSplit, Sharded):
    """Tensor parallelism by torch.distributed.tensor.parallel, as a model's tensor plan declares.

    Each of `tensor_parallel_size` workers has some heads of every attention, some columns of the first matrix
    of every perceptron with the same rows of the second, and a part of the vocabulary (Shoeybi et al.,
    Megatron-LM, 2019). So each block adds up its activations twice in forward and twice in backward. The
    cross-entropy is computed on the divided scores. Several such groups are replicas: FSDP2 shards their
    states, or each has all states and gradients are averaged. With `sequence_parallel` layer norms and the
    activations between blocks are divided by positions (Korthikanti et al., Reducing activation recomputation
    in large transformer models, 2022).
    """

    waits_for_activations = True
    parts_name = "divided layers"
    stated_by = "tensor_plan"
    summary: ClassVar[str] = "layers divided among workers (tensor parallelism)"
    rule: ClassVar[str] = (
        "As single, but each worker computes a part of every layer; the parts are added up or gathered "
        "within forward and backward"
    )
    breakdown_note: ClassVar[str] = (
        "forward and backward include the communication of activations, of their gradients and between "
        "replicas; the part that computation does not hide cannot be separated (`profile: true` shows it)"
    )
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
    evaluated_on = "the divided weights"

    @dataclass(frozen=True)
    class Options(base.Options):
        tensor_parallel_size: int | Literal["all"] = option(
            "all",
            "number of workers that divide each layer; several such groups are replicas",
            least=1,
            tried=[2, 4, 8],
            kind="tensor",
        )
        data_parallel: Literal["fsdp", "ddp"] = option(
            "fsdp", "whether replicas divide their states (fsdp), or each keeps its own (ddp)"
        )
        sequence_parallel: bool = option(
            False,
            "whether norms and the activations between blocks are divided by positions",
            tried=[True],
        )

    def mesh(self, gpus: int) -> Mesh:
        chosen = self.options.tensor_parallel_size
        workers = gpus if chosen == "all" else min(chosen, gpus)
        check_equal_groups(f"tensor_parallel_size = {workers}", workers, gpus)
        return Mesh(gpus // workers, tensor=workers)

    @classmethod
    def indivisible_model_reason(cls, network: str | Model) -> str | None:
        if not declared.has_tensor_plan(network):
            return (
                "it has no plan that divides its layers; "
                f"{format_divisible_model_names(declared.has_tensor_plan)}"
            )
        return None

    @classmethod
    def iter_refused_values(
        cls, options: dict[str, Any], values: Mapping[str, Any]
    ) -> Iterator[str]:
        yield from super().iter_refused_values(options, values)
        for name, network in values["networks"].items():
            reads_images = models.get_model_metadata(network).reads_text is False
            if options["sequence_parallel"] and reads_images and declared.has_tensor_plan(network):
                yield (
                    f".models = {name!r}: sequence_parallel: true divides the positions of texts, but the "
                    "patches and class token of an image cannot be divided evenly; set it to false"
                )

    def indivisible_among_workers_reason(
        self, network: str | Model, gpus: int, built_model: nn.Module | None = None
    ) -> str | None:
        workers, heads = (
            self.mesh(gpus).tensor,
            declared.get_number_of_attention_heads(network, built_model),
        )
        if heads % workers:
            return (
                f"{workers} workers cannot divide its {heads} heads evenly; set tensor_parallel_size to a "
                f"divisor of {heads}"
            )
        return None

    def iter_model_refusals(self, model: nn.Module, worker: base.Worker) -> Iterator[str]:
        network = models.get_model_or_name(worker.settings)
        if reason := self.indivisible_model_reason(network):
            yield reason
        elif worker.settings.own_model is not None:
            yield from super().iter_model_refusals(model, worker)
            try:
                plan = declared.get_tensor_plan(network, model)
            except ValueError as e:
                yield str(e)
                return
            yield from iter_tensor_plan_faults(model, plan)
            if reason := self.indivisible_among_workers_reason(network, worker.world_size, model):
                yield reason
            missing = {"first", "scores"}.difference(plan.values())
            if self.options.sequence_parallel and missing:
                yield (
                    "sequence_parallel: true divides the stream from the module that tensor_plan calls "
                    "`first` to the one that it calls `scores`, and it has no "
                    f"{format_names(sorted(missing))}; name them, or set sequence_parallel to false"
                )

    def has_divided_model_states(self, gpus: int) -> bool:
        return super().has_divided_model_states(gpus) or (
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
            again = list_repeated_parameter_uses(model)
            plan = separate_attention_projections(
                model, declared.get_tensor_plan(models.get_model_or_name(worker.settings), model)
            )
            parallelize_module(
                model,
                mesh["tensor"],
                make_parallel_styles(model, plan, self.options.sequence_parallel),
            )
            for (module, name), (first, own) in again:
                setattr(module, name, getattr(first, own))
            model.register_forward_hook(gather_evaluation_scores)
            if self.options.sequence_parallel:
                model.register_forward_pre_hook(partial(check_positions_divide_evenly, tensor))
        #: For each trainable parameter: whether this worker includes its gradient in the gradient norm.
        self._counts = [
            is_parameter_divided(p) or worker.mesh.get_coordinate(worker.rank).tensor == 0
            for p in model.parameters()
            if p.requires_grad
        ]
        shards_replicas = self.options.data_parallel == "fsdp" and replicas > 1
        if shards_replicas:
            for _, modules in worker.wrap_groups:
                fully_shard(modules, mesh=mesh["replicas"])
            fully_shard(model, mesh=mesh["replicas"])
        elif replicas > 1:
            self._register_gradient_averaging(model, mesh)
        self.group_size = replicas * tensor if shards_replicas else tensor
        self._tensor_group = mesh.get_group("tensor")
        self.shard_group = None if shards_replicas else self._tensor_group
        return model

    def _register_gradient_averaging(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Register hooks that average each gradient over the replicas during backward."""
        group = mesh.get_group("replicas")
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(
                    partial(self._average_gradient_if_last_part, group)
                )

    def _average_gradient_if_last_part(
        self, replica_group: ProcessGroup, parameter: nn.Parameter
    ) -> None:
        """Average a gradient over the replicas in the last part of a batch (gradient hook).

        FSDP2 reduces gradients in every part by itself.
        """
        if self._is_last:
            self._start_gradient_averaging(parameter, replica_group)

    def add_batch_part_gradients(
        self, x: Tensor, y: Tensor, parts: int = 1, is_last_part: bool = True
    ) -> Tensor:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel() if self.worker.mesh.tensor > 1 else nullcontext():
            return super().add_batch_part_gradients(x, y, parts, is_last_part)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        from stratbench.telemetry.shards import get_local_shard

        return get_local_shard(super().forward(x, y))

    def assign_gradients_to_updated_tensors(self) -> None:
        self._wait_for_averaged_gradients()
        # A norm's gradient on this worker is only the sum over its own positions or heads. This loop adds up
        # the workers' gradients.
        for p in self.parameters:
            placements = getattr(p.grad, "placements", None)
            if placements is not None and placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        super().assign_gradients_to_updated_tensors()

    def list_parameters_with_partial_gradient(self, x: Tensor, y: Tensor) -> list[str]:
        import torch
        import torch.distributed as dist

        from stratbench.telemetry.shards import get_local_shard

        if not self.options.sequence_parallel or self.worker.mesh.tensor == 1:
            return []
        self._is_last = False  # do not average gradients over replicas
        self.model.eval()  # disable dropout and updates of running statistics
        self.add_batch_part_gradients(x, y)
        self.model.train()
        named = dict(self.model.named_parameters())
        apart = torch.zeros(len(named), dtype=torch.float64, device=self.worker.device)
        for i, p in enumerate(named.values()):
            if p.grad is not None and not is_parameter_in_tensor_plan(p):
                least, most = get_local_shard(p.grad).clone(), get_local_shard(p.grad).clone()
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

    def list_tensors_for_gradient_norm(self) -> list[Tensor]:
        return list(compress(self.local, self._counts))


def list_repeated_parameter_uses(
    model: nn.Module,
) -> list[tuple[ParameterUse, ParameterUse]]:
    """Return the repeated uses of shared parameters, each with the parameter's first use."""
    first: dict[int, ParameterUse] = {}
    again = []
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) in first:
                again.append(((module, name), first[id(p)]))
            first.setdefault(id(p), (module, name))
    return again


def is_parameter_divided(parameter: nn.Parameter) -> bool:
    """Return whether each worker has only a shard of a parameter."""
    return any(placement.is_shard() for placement in getattr(parameter, "placements", ()))


def is_parameter_in_tensor_plan(parameter: nn.Parameter) -> bool:
    """Return whether a parameter belongs to a module that the tensor plan names."""
    mesh = getattr(parameter, "device_mesh", None)
    return "tensor" in (getattr(mesh, "mesh_dim_names", None) or ())


def gather_evaluation_scores(module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    """Gather the scores of all workers in evaluation. This function is a forward hook.

    In training the loss is computed on the shards of the scores.

    Args:
        module: The model.
        _inputs: Unused.
        output: Output of the model.
    """
    is_whole = module.training or not hasattr(output, "full_tensor")
    return output if is_whole else output.full_tensor()


def check_positions_divide_evenly(
    workers: int, _module: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    """Raise Refused if the workers cannot divide the positions of texts evenly.

    This function is a forward pre-hook.

    Args:
        workers: Number of workers.
        _module: Unused.
        inputs: Texts, shape [batch, positions].
    """
    positions = inputs[0].shape[1]
    if positions % workers:
        raise Refused(
            f"{workers} workers cannot divide texts of {positions} tokens evenly (sequence_parallel: true); "
            "set sequence_parallel: false, or choose another length of the texts"
        )


def iter_tensor_plan_faults(model: nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each mistake in a tensor plan for a model.

    A plan maps paths of modules, in which `*` matches any name, to words.
    """
    from stratbench.extensions.splitting.heads import indivisible_attention_reason

    for path, word in plan.items():
        if word not in WORDS:
            yield f"its tensor_plan has the word {word!r} for {path!r}; use one of {', '.join(WORDS)}"
        named = list_matching_module_paths(model, path)
        if not named:
            yield f"its tensor_plan names {path!r}, but the model has no module of that path"
        if word == "heads":
            yield from (
                f"its tensor_plan has 'heads' for {name!r}, which {reason}"
                for name in named
                if (reason := indivisible_attention_reason(model.get_submodule(name)))
            )


def list_matching_module_paths(model: nn.Module, path_pattern: str) -> list[str]:
    """Return the paths of the modules that match a path of a tensor plan.

    A `*` in the path pattern matches any name.
    """
    return [name for name, _ in model.named_modules() if fnmatchcase(name, path_pattern)]


def separate_attention_projections(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Replace attention modules by ones with separate projections, and return the adapted plan.

    Only modules with the word `heads` in the plan are changed.
    """
    from stratbench.extensions.splitting.heads import SelfAttention

    divided: dict[str, str] = {}
    for path, word in plan.items():
        divided[path] = word
        if word == "heads":
            for name in list_matching_module_paths(model, path):
                model.set_submodule(name, SelfAttention(model.get_submodule(name)))
            parts = dict.fromkeys(("query", "key", "value"), "colwise of input") | {
                "out": "rowwise"
            }
            divided |= {f"{path}.{name}": part for name, part in parts.items()}
    return divided


def make_parallel_styles(
    model: nn.Module, plan: Mapping[str, str], divides_positions: bool
) -> dict[str, ParallelStyle]:
    """Return the ParallelStyle of each module in a tensor plan, by module path.

    The words of a plan say by what a module is divided. `embedding`: the vocabulary. `first`: nothing; the
    divided activations begin here. `input`: nothing; its first input is gathered once for all submodules.
    `colwise`: the outputs of a linear layer. `colwise of input`: the same below an `input`. `rowwise`: the
    inputs of a linear layer. `norm`: positions, each normalized by itself. `head norm`: heads, of shape
    [batch, positions, heads, width]. `heads`: the heads of an nn.MultiheadAttention. `scores`: the outputs,
    which stay divided for the loss.

    Args:
        model: The model.
        plan: Tensor plan of the model.
        divides_positions: Whether activations are divided by positions as well.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    from stratbench.extensions.splitting.heads import FirstInput

    stream = Shard(1) if divides_positions else Replicate()

    def make_parallel_style(plan_word: str) -> ParallelStyle | None:
        match plan_word:
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
            case "first" if divides_positions:
                return PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=stream, use_local_output=True
                )
            case "head norm":
                return SequenceParallel(sequence_dim=2, use_local_output=True)
            case "norm" if divides_positions:
                return SequenceParallel()
            case "first" | "norm":
                return None
        raise ValueError(f"tensor_plan has the word {plan_word!r}; use one of {', '.join(WORDS)}")

    wanted = {
        name: kind
        for path, kind in plan.items()
        for name in list_matching_module_paths(model, path)
    }
    by_name = {name: make_parallel_style(kind) for name, kind in wanted.items()}
    return {name: style for name, style in by_name.items() if style is not None}
