"""Remarks of the check on properties of a model that do not prevent training.

Importing this file imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from stratbench.cell.text.words import format_names
from stratbench.workload.network import models
from stratbench.workload.network.trial import Trial
from stratbench.workload.torch_internals import BatchNorm, tree_leaves


def iter_model_remarks(model: nn.Module, trial: Trial) -> Iterator[str]:
    """Yield remarks on properties of a model that do not prevent training."""
    for names in find_tied_parameters(model):
        yield (
            f"tied: {' = '.join(names)} is one parameter, and stays one with every strategy; if a module "
            "outside its shard group shares it, it is sharded with the root"
        )
    if formats := models.changed_parameter_dtypes_reason(model):
        yield formats
    norms = tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, BatchNorm))
    if written := [name for name in trial.written_buffers if not name.startswith(norms)]:
        yield f"forward writes the buffers {format_names(written)}"
    if trial.replaced_buffers:
        yield (
            f"forward replaces the buffers {format_names(trial.replaced_buffers)} by new tensors: "
            "strategies that "
            "send or average buffers keep using the old tensors; write to them in place (copy_, add_)"
        )
    if trial.overwritten_parameters:
        yield (
            f"forward changes the parameters {format_names(trial.overwritten_parameters)}: strategies "
            "that gather or "
            "pull weights would lose the change, so they refuse the model"
        )
    if trial.hooked_parameters:
        yield (
            f"{format_names(trial.hooked_parameters)} has a gradient hook, which gets each worker's "
            "own gradient before "
            "the average, and with gradient_accumulation_steps that of each part"
        )
    if counted := set(trial.changing_training_state + trial.unsaved_evaluation_state).intersection(
        trial.changed_attributes
    ):
        yield (
            f"forward changes the plain attributes {format_names(sorted(counted))}: the warm-up restores "
            "them, but no checkpoint has them; use a buffer (register_buffer), which checkpoints save"
        )
    if loose := find_unregistered_parameters(model):
        yield (
            f"{format_names(loose)} contains parameters that no module has registered and that are not "
            "trained; use nn.ParameterList or nn.ParameterDict, or assign them to attributes"
        )


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has more than one name."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return [aliases for aliases in names.values() if len(aliases) > 1]


def find_unregistered_parameters(model: nn.Module) -> list[str]:
    """Return paths of the lists, tuples and dicts of a model that contain unregistered parameters."""
    known = set(model.parameters())
    paths = []
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if key.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            held = [
                p
                for leaf in tree_leaves(value)
                for p in (leaf.parameters() if isinstance(leaf, nn.Module) else [leaf])
                if isinstance(p, nn.Parameter)
            ]
            if not known.issuperset(held):
                paths.append(f"{prefix}.{key}" if prefix else key)
    return paths
