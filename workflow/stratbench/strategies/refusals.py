"""Defines reasons why strategies refuse to train a model, as sentences for messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stratbench.cell.text.words import format_names

if TYPE_CHECKING:
    from stratbench.workload.network.trial import Trial


def sparse_gradient_reason(parameter_names: Sequence[str], unsupported: str) -> str:
    """Return a sentence on parameters with sparse gradients, and the remedy.

    `unsupported` is a clause that says what does not support sparse gradients.
    """
    names = format_names(parameter_names)
    return (
        f"the gradient of {names} is sparse, which {unsupported}; build the layer with sparse=False"
    )


def iter_unshardable_model_reasons(trial: Trial, replaces_parameters: bool = True) -> Iterator[str]:
    """Yield reasons why a strategy that shards parameters would train a user's model wrongly.

    Args:
        trial: Result of a trial step of the model.
        replaces_parameters: Whether the strategy replaces the parameters of the model's modules by their
            shards.
    """
    if trial.hooked_parameters:
        yield (
            f"{format_names(trial.hooked_parameters)} has a gradient hook, which would stay on the whole "
            "parameter while its shards are trained; change the gradient in forward instead (torch.where, "
            "detach, an autograd function)"
        )
    if replaces_parameters and trial.parameters_read_elsewhere:
        yield (
            f"forward reads {format_names(trial.parameters_read_elsewhere)} from a list or dictionary "
            "instead of its module's attribute, but only the attribute gets the shards that are trained; "
            "read the attribute, or use nn.ParameterList or nn.ParameterDict"
        )
    if replaces_parameters and trial.class_dependent_parameters:
        yield (
            f"forward uses the class or an attribute of {format_names(trial.class_dependent_parameters)}, "
            "which shards of a parameter do not have; store the attribute in the module"
        )
    if trial.overwritten_parameters:
        yield lost_parameter_changes_reason(trial.overwritten_parameters)
    if trial.repeatedly_added_parameters:
        yield repeated_gradient_sum_reason(trial.repeatedly_added_parameters)


def lost_parameter_changes_reason(parameter_names: Sequence[str]) -> str:
    """Return a sentence on parameters whose changes by forward would be lost, with the remedy."""
    return (
        f"forward writes to {format_names(parameter_names)}, and these changes are lost when the weights "
        "are gathered or pulled; store them in a buffer (register_buffer), or change how forward uses the "
        "parameter"
    )


def diverging_replicas_reason(parameter_names: Sequence[str]) -> str:
    """Return a sentence on parameters that forward changes differently on each replica."""
    return (
        f"forward writes values to {format_names(parameter_names)} that depend on the batch, so the "
        "workers' replicas would diverge; store them in a buffer (register_buffer), or change how forward "
        "uses the parameter"
    )


def repeated_gradient_sum_reason(parameter_names: Sequence[str]) -> str:
    """Return a sentence with a remedy on parameters to whose gradient one backward adds repeatedly."""
    return (
        f"backward adds to the gradient of {format_names(parameter_names)} several times, and the first "
        "sum would be used as the whole gradient (reentrant checkpointing calls a block again); checkpoint "
        "with use_reentrant=False"
    )


def describe_skipped_modules(trial: Trial) -> str | None:
    """Return a sentence on modules that forward calls on some workers only, with the remedy.

    The result is None if forward skips no module at random, and none for some batches.
    """
    if trial.randomly_called_modules:
        return (
            f"not every forward calls {format_names(trial.randomly_called_modules)}: each worker draws its "
            "own random numbers, so workers would wait for each other forever; call it always, and multiply "
            "its output by 0 or 1"
        )
    if trial.data_dependent_modules:
        return (
            f"not every batch uses {format_names(trial.data_dependent_modules)}: forward chooses by values "
            "of tensors. Workers have different data, so they would wait for each other forever or sum the "
            "gradients of different modules; call it always, and choose with torch.where or a factor of 0 "
            "or 1"
        )
    return None
