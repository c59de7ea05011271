"""Reasons for which a strategy refuses a model, as sentences of messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stratbench.cell.text.words import format_names

if TYPE_CHECKING:
    from stratbench.workload.network.trial import Trial


def sparse_gradient_reason(names: Sequence[str], reason: str) -> str:
    """Return a sentence on parameters with sparse gradients, which are not supported, with the remedy."""
    listed = format_names(names)
    return f"the gradient of {listed} is sparse, which {reason}; build the layer with sparse=False"


def iter_unshardable_model_reasons(trial: Trial, as_parameters: bool = True) -> Iterator[str]:
    """Yield reasons why a strategy that shards parameters would train a user's model wrongly.

    Args:
        trial: Result of a trial step of the model.
        as_parameters: Whether the shards replace the parameters in the model's modules.
    """
    if trial.hooked_parameters:
        yield lost_hooks_reason(trial.hooked_parameters)
    if as_parameters and trial.parameters_read_elsewhere:
        yield wrong_reference_reason(trial.parameters_read_elsewhere)
    if as_parameters and trial.class_dependent_parameters:
        yield changed_class_reason(trial.class_dependent_parameters)
    if trial.overwritten_parameters:
        yield lost_changes_reason(trial.overwritten_parameters)
    if trial.repeatedly_added_parameters:
        yield describe_repeated_gradients(trial.repeatedly_added_parameters)


def lost_hooks_reason(names: Sequence[str]) -> str:
    """Return a sentence on gradient hooks that sharding the parameters would remove, with the remedy."""
    return (
        f"{format_names(names)} has a gradient hook, which would stay on the whole parameter while its "
        "shards are trained; change the gradient in forward instead (torch.where, detach, an autograd "
        "function)"
    )


def wrong_reference_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters that forward does not read from their module's attribute."""
    return (
        f"forward reads {format_names(names)} from a list or dictionary instead of its module's attribute, "
        "but only the attribute gets the shards that are trained; read the attribute, or use "
        "nn.ParameterList or nn.ParameterDict"
    )


def changed_class_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters whose class or attributes forward reads, with the remedy."""
    return (
        f"forward uses the class or an attribute of {format_names(names)}, which shards of a parameter do "
        "not have; store the attribute in the module"
    )


def lost_changes_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters that forward changes without effect, with the remedy."""
    return (
        f"forward writes to {format_names(names)}, and its changes are lost when the weights are gathered or "
        "pulled; store them in a buffer (register_buffer), or change how forward uses the parameter"
    )


def diverging_replicas_reason(names: Sequence[str]) -> str:
    """Return a sentence on parameters that forward changes depending on data, which makes replicas differ."""
    return (
        f"forward writes values to {format_names(names)} that depend on the batch, so the workers' replicas "
        "would diverge; store them in a buffer (register_buffer), or change how forward uses the parameter"
    )


def describe_repeated_gradients(names: Sequence[str]) -> str:
    """Return a sentence on gradients to which one backward adds repeatedly, with the remedy."""
    return (
        f"backward adds to the gradient of {format_names(names)} several times, and the first sum would be "
        "used as the whole gradient (reentrant checkpointing calls a block again); checkpoint with "
        "use_reentrant=False"
    )


def skipped_by_data_reason(names: Sequence[str]) -> str:
    """Return a sentence on modules that forward skips depending on its data, with the remedy."""
    return (
        f"not every batch uses {format_names(names)}: forward chooses by values of tensors. Workers have "
        "different data, so they would wait for each other forever or sum the gradients of different "
        "modules; call it always, and choose with torch.where or a factor of 0 or 1"
    )


def skipped_at_random_reason(modules: Sequence[str]) -> str:
    """Return a sentence on modules that forward skips at random, with the remedy."""
    return (
        f"not every forward calls {format_names(modules)}: each worker draws its own random numbers, so "
        "workers would wait for each other forever; call it always, and multiply its output by 0 or 1"
    )
