"""Sharding groups of a user's model: instances of classes, or groups by size.

Importing this file imports torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache

from torch import nn

from stratbench.workload.users_code import ModelError

#: About how many groups the rule by size makes.
GROUPS = 12
#: Modules that hold others and are never called themselves.
_HOLDERS = (nn.ModuleList, nn.ModuleDict)
_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
#: PyTorch's own modules that call what they hold. Its others read the weights of what they hold.
_CALLERS = (
    nn.Sequential, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder, *_HOLDERS,
)  # fmt: skip

#: How code reads a weight of what its module holds.
_READ = re.compile(r"\bself\.(\w+)\.(?:weight|bias)\b")

Groups = list[tuple[str, list[nn.Module]]]


def rule_of(wrap_classes: Sequence[str] | None) -> str:
    """Return the rule in words, for the record."""
    if wrap_classes:
        return f"instances of {', '.join(wrap_classes)}"
    return f"by size: groups of about 1/{GROUPS} of the parameters"


def stated_classes(model: nn.Module) -> list[str]:
    """The classes that a network itself names to be sharded, as those of transformers do.

    None if none.
    """
    names = {type(m).__name__ for m in model.modules()}
    return sorted(names.intersection(getattr(model, "_no_split_modules", None) or ()))


def groups_by_class(model: nn.Module, wrap_classes: Sequence[str], who: object) -> Groups:
    """Return (label, modules) of every instance of the named classes, the outermost if nested.

    They are in the order of registration. Modules that share a parameter with a module outside stay with the
    root.

    Args:
        model: The model.
        wrap_classes: Names of the classes.
        who: Text on the model, for messages.

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
                f"{who}: wrap_classes names {name!r}, and it has no such module; its classes are "
                f"{', '.join(sorted(classes))}"
            )
    return [(label, modules) for label, modules in groups if _stands_alone(modules, model)]


def groups_by_size(model: nn.Module) -> Groups:
    """Return (label, modules) of about 1/GROUPS of the parameters each, in registration order.

    From the root down, a larger module is divided into its children; smaller neighbours are combined. A
    module that is never called (ModuleList) is always divided. A module of PyTorch's that reads its
    children's weights (MultiheadAttention) is never divided. Modules that share a parameter with a module
    outside stay with the root. So does a module whose weights its parent's class reads (`self.head.weight` in
    its code).
    """
    limit = _size([model]) / GROUPS
    groups: Groups = []

    def flush(waiting: list[tuple[str, nn.Module]]) -> None:
        if waiting:
            groups.append((waiting[0][0], [m for _, m in waiting]))
            waiting.clear()

    def divide(prefix: str, parent: nn.Module) -> None:
        waiting: list[tuple[str, nn.Module]] = []
        read = _read_by(type(parent))
        for name, module in parent.named_children():
            label = prefix + name
            if id(module) in seen or not _size([module]) or isinstance(module, _PARAMETERS):
                continue
            if name in read:  # left to the root, which is gathered all the time
                seen.update(id(m) for m in module.modules())
                continue
            if isinstance(module, _HOLDERS) or (_size([module]) > limit and _may_divide(module)):
                flush(waiting)
                divide(f"{label}.", module)
            elif _stands_alone([module], model):
                waiting.append((label, module))
                if _size([m for _, m in waiting]) >= limit:
                    flush(waiting)
            seen.update(id(m) for m in module.modules())
        flush(waiting)

    seen: set[int] = set()
    divide("", model)
    return groups


def _may_divide(module: nn.Module) -> bool:
    if not any(module.children()):
        return False
    return isinstance(module, _CALLERS) or not type(module).__module__.startswith("torch.nn.")


@cache
def _read_by(kind: type[nn.Module]) -> frozenset[str]:
    """Return children whose weights a class reads itself, by its code. Assignments do not count."""
    names: set[str] = set()
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if (
            "init" not in name
            and name != "reset_parameters"
            and not method.__module__.startswith("torch.")
        ):
            with suppress(OSError):  # code that is in no file
                names |= set(re.findall(_READ, inspect.getsource(method)))
    return frozenset(names)


def _size(modules: list[nn.Module]) -> int:
    """Return parameters of modules, each once."""
    return sum(p.numel() for p in {p for m in modules for p in m.parameters()})


def _stands_alone(modules: list[nn.Module], model: nn.Module) -> bool:
    """Return whether it has parameters, none of which belongs to a module outside, too."""
    inside = {m for module in modules for m in module.modules()}
    own = {p for module in modules for p in module.parameters()}
    return bool(own) and own.isdisjoint(_parameters_outside(inside, model))


def _parameters_outside(inside: set[nn.Module], model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if module not in inside:
            yield from module.parameters(recurse=False)
