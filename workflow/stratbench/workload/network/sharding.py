"""Forms the shard groups of a user's model: instances of classes, or groups by size."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache

from torch import nn

from stratbench.workload.users_code import ModelError

#: Approximate number of groups that the rule by size forms.
GROUPS = 12
#: Containers of modules, which are never called themselves.
_HOLDERS = (nn.ModuleList, nn.ModuleDict)
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
#: PyTorch's own modules that call their submodules. All others read the weights of their submodules.
_CALLERS = (
    nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *_HOLDERS,
)  # fmt: skip

#: Pattern of code that reads a weight of a submodule.
_READ = re.compile(r"\bself\.(\w+)\.(?:weight|bias)\b")

Groups = list[tuple[str, list[nn.Module]]]


def describe_sharding_groups(wrap_classes: Sequence[str] | None) -> str:
    """Return a text on the rule that forms the groups, for the record."""
    if wrap_classes:
        return f"instances of {', '.join(wrap_classes)}"
    return f"by size: groups of about 1/{GROUPS} of the parameters"


def find_declared_wrap_classes(model: nn.Module) -> list[str]:
    """Return the module classes that a model itself names for sharding, as transformers' models do."""
    names = {type(m).__name__ for m in model.modules()}
    return sorted(names.intersection(getattr(model, "_no_split_modules", None) or ()))


def group_by_class(model: nn.Module, wrap_classes: Sequence[str], who: object) -> Groups:
    """Return a group (label, modules) per instance of the named classes.

    The groups are in the order of registration. Only the outermost of nested instances is a group. Modules
    that share a parameter with a module that is not in their group are sharded with the root.

    Args:
        model: The model.
        wrap_classes: Names of the classes.
        who: Name of the model in messages.

    Raises:
        ModelError: If a class has no instance.
    """
    groups: Groups = []
    for name, module in model.named_modules():
        within = any(name.startswith(f"{label}.") for label, _ in groups)
        if name and not within and type(module).__name__ in wrap_classes:
            groups.append((name, [module]))
    classes = {type(m).__name__ for m in model.modules()}
    for name in wrap_classes:
        if name not in classes:
            raise ModelError(
                f"{who}: wrap_classes names {name!r}, but the model has no such module; its classes are "
                f"{', '.join(sorted(classes))}"
            )
    owners = _find_owners(model)
    return [(label, modules) for label, modules in groups if _shares_no_parameter(modules, owners)]


def group_by_size(model: nn.Module) -> Groups:
    """Return groups (label, modules) of about 1/GROUPS of the parameters each, in registration order.

    From the root down, a larger module is divided into its children, and smaller neighbours are combined. A
    module that is never called (ModuleList) is always divided. A module of PyTorch that reads its children's
    weights (MultiheadAttention) is never divided. Modules that share a parameter with a module outside are
    sharded with the root. So is a module whose weights its parent's code reads (`self.head.weight`).
    """
    limit = _count_parameters([model]) / GROUPS
    owners = _find_owners(model)
    groups: Groups = []

    def flush(waiting: list[tuple[str, nn.Module]]) -> None:
        if waiting:
            groups.append((waiting[0][0], [m for _, m in waiting]))
            waiting.clear()

    def divide(prefix: str, parent: nn.Module) -> None:
        waiting: list[tuple[str, nn.Module]] = []
        read = _find_read_children(type(parent))
        for name, module in parent.named_children():
            label = prefix + name
            if (
                id(module) in seen
                or not _count_parameters([module])
                or isinstance(module, _PARAMETERS)
            ):
                continue
            if name in read:  # the module is sharded with the root, which stays gathered
                seen.update(id(m) for m in module.modules())
                continue
            if isinstance(module, _HOLDERS) or (
                _count_parameters([module]) > limit and _is_divisible(module)
            ):
                flush(waiting)
                divide(f"{label}.", module)
            elif _shares_no_parameter([module], owners):
                waiting.append((label, module))
                if _count_parameters([m for _, m in waiting]) >= limit:
                    flush(waiting)
            seen.update(id(m) for m in module.modules())
        flush(waiting)

    seen: set[int] = set()
    divide("", model)
    return groups


def _is_divisible(module: nn.Module) -> bool:
    if not any(module.children()):
        return False
    return isinstance(module, _CALLERS) or not type(module).__module__.startswith("torch.nn.")


@cache
def _find_read_children(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of children whose weights the code of a class reads."""
    names: set[str] = set()
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if (
            "init" not in name
            and name != "reset_parameters"
            and not method.__module__.startswith("torch.")
        ):
            with suppress(OSError):  # raised for code that is not in a file
                names |= set(re.findall(_READ, inspect.getsource(method)))
    return frozenset(names)


def _count_parameters(modules: list[nn.Module]) -> int:
    """Return the number of parameter elements of some modules, counting each parameter once."""
    return sum(p.numel() for p in {p for m in modules for p in m.parameters()})


def _find_owners(model: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    """Return the modules that each parameter of a model is registered in."""
    owners: dict[nn.Parameter, set[nn.Module]] = defaultdict(set)
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners[p].add(module)
    return owners


def _shares_no_parameter(
    modules: list[nn.Module], owners: Mapping[nn.Parameter, set[nn.Module]]
) -> bool:
    """Return whether some modules have parameters, and share none of them with modules outside.

    Args:
        modules: The modules.
        owners: Modules that each parameter of the model is registered in.
    """
    inside = {m for module in modules for m in module.modules()}
    own = {p for module in modules for p in module.parameters()}
    return bool(own) and all(owners[p] <= inside for p in own)
