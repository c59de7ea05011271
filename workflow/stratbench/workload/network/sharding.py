"""Forms the shard groups of a user's model, that is, sets of modules that FSDP gathers together."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache

from torch import nn

from stratbench.workload.users_code import ModelError

#: Number of shard groups into which a model is divided by size (approximately).
GROUPS = 12
#: PyTorch's containers of modules, which are never called themselves.
_HOLDERS = (nn.ModuleList, nn.ModuleDict)
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
#: PyTorch's modules that call their submodules. PyTorch's other modules use their submodules' weights
#: directly.
_CALLERS = (
    nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *_HOLDERS,
)  # fmt: skip

#: Pattern of code that uses the weight or bias of a submodule directly, such as `self.head.weight`.
_READ = re.compile(r"\bself\.(\w+)\.(?:weight|bias)\b")

#: Shard groups of a model. Each has a label, and the modules whose parameters FSDP gathers together.
ShardGroups = list[tuple[str, list[nn.Module]]]


def describe_shard_group_rule(wrap_classes: Sequence[str] | None) -> str:
    """Return a text that says by which rule shard groups are formed, for the record."""
    if wrap_classes:
        return f"instances of {', '.join(wrap_classes)}"
    return f"by size: groups of about 1/{GROUPS} of the parameters"


def find_declared_wrap_classes(model: nn.Module) -> list[str]:
    """Return the names of the module classes to shard that a model itself declares.

    Models of transformers declare them.
    """
    names = {type(m).__name__ for m in model.modules()}
    return sorted(names.intersection(getattr(model, "_no_split_modules", None) or ()))


def group_modules_by_class(
    model: nn.Module, wrap_classes: Sequence[str], model_label: object
) -> ShardGroups:
    """Return one shard group per instance of the named module classes.

    The groups are in the order of registration. Only the outermost of nested instances is a group. Modules
    that share a parameter with a module that is not in their group are sharded with the root.

    Args:
        model: The model.
        wrap_classes: Names of the classes.
        model_label: Name of the model in messages.

    Raises:
        ModelError: If a class has no instance.
    """
    groups: ShardGroups = []
    for name, module in model.named_modules():
        within = any(name.startswith(f"{label}.") for label, _ in groups)
        if name and not within and type(module).__name__ in wrap_classes:
            groups.append((name, [module]))
    classes = {type(m).__name__ for m in model.modules()}
    for name in wrap_classes:
        if name not in classes:
            raise ModelError(
                f"{model_label}: wrap_classes names {name!r}, but no module of the model has this class; use "
                f"some of {', '.join(sorted(classes))}"
            )
    owners = _find_parameter_owners(model)
    return [
        (label, modules)
        for label, modules in groups
        if _are_parameters_exclusive_to_modules(modules, owners)
    ]


def group_modules_by_size(model: nn.Module) -> ShardGroups:
    """Return about twelve shard groups of a model, with similar numbers of parameters.

    The groups are in the order of registration. From the root down, a larger module is divided into its
    children, and smaller neighbours are combined. A
    module that is never called (ModuleList) is always divided. A module of PyTorch that reads its children's
    weights (MultiheadAttention) is never divided. Modules that share a parameter with a module outside are
    sharded with the root. So is a module whose weights its parent's code reads (`self.head.weight`).
    """
    limit = _count_parameters([model]) / GROUPS
    owners = _find_parameter_owners(model)
    groups: ShardGroups = []

    def add_group_of_collected_modules(waiting_modules: list[tuple[str, nn.Module]]) -> None:
        if waiting_modules:
            groups.append((waiting_modules[0][0], [m for _, m in waiting_modules]))
            waiting_modules.clear()

    def divide_module(prefix: str, parent: nn.Module) -> None:
        waiting: list[tuple[str, nn.Module]] = []
        read = _find_children_whose_weights_are_read(type(parent))
        for name, module in parent.named_children():
            label = prefix + name
            if (
                id(module) in seen
                or not _count_parameters([module])
                or isinstance(module, _PARAMETERS)
            ):
                continue
            # The parent uses the weights of this module without calling it. So it must stay gathered, as the
            # root does.
            if name in read:
                seen.update(id(m) for m in module.modules())
                continue
            if isinstance(module, _HOLDERS) or (
                _count_parameters([module]) > limit and _is_divisible_module(module)
            ):
                add_group_of_collected_modules(waiting)
                divide_module(f"{label}.", module)
            elif _are_parameters_exclusive_to_modules([module], owners):
                waiting.append((label, module))
                if _count_parameters([m for _, m in waiting]) >= limit:
                    add_group_of_collected_modules(waiting)
            seen.update(id(m) for m in module.modules())
        add_group_of_collected_modules(waiting)

    seen: set[int] = set()
    divide_module("", model)
    return groups


def _is_divisible_module(module: nn.Module) -> bool:
    if not any(module.children()):
        return False
    return isinstance(module, _CALLERS) or not type(module).__module__.startswith("torch.nn.")


@cache
def _find_children_whose_weights_are_read(module_class: type[nn.Module]) -> frozenset[str]:
    """Return the names of the children whose weights a module class uses without calling them."""
    names: set[str] = set()
    for name, method in inspect.getmembers(module_class, inspect.isfunction):
        if (
            "init" not in name
            and name != "reset_parameters"
            and not method.__module__.startswith("torch.")
        ):
            # `getsource` raises OSError for code that is in no file.
            with suppress(OSError):
                names |= set(re.findall(_READ, inspect.getsource(method)))
    return frozenset(names)


def _count_parameters(modules: list[nn.Module]) -> int:
    """Return the number of parameters of some modules; a shared parameter counts once."""
    return sum(p.numel() for p in {p for m in modules for p in m.parameters()})


def _find_parameter_owners(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    """Return the set of modules in which each parameter of a model is registered."""
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[p].add(module)
    return owners


def _are_parameters_exclusive_to_modules(
    modules: list[nn.Module], owners: Mapping[nn.Parameter, set[nn.Module]]
) -> bool:
    """Return whether the given modules have parameters, and share none with other modules.

    Args:
        modules: The modules.
        owners: Modules that each parameter of the model is registered in.
    """
    inside = {m for module in modules for m in module.modules()}
    own = {p for module in modules for p in module.parameters()}
    return bool(own) and all(owners[p] <= inside for p in own)
