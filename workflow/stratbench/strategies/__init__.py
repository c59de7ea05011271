"""Registers the training strategies. Each family of strategies has one file, here or in an extension.

Strategy modules import torch only inside functions. So the workflow can read a strategy's name and options in
milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from stratbench.cell.extensions import import_attribute, load_extensions

if TYPE_CHECKING:
    from stratbench.strategies.base import Strategy, Traits
    from stratbench.strategies.mesh import Mesh

#: Python path (`module:class`) of each strategy by name. A path may also be of a function that takes the name
#: and returns the class.
REGISTRY: dict[str, str] = {
    "single": "stratbench.strategies.single:Single",
    "ddp": "stratbench.strategies.ddp:DDP",
    "fsdp": "stratbench.strategies.sharding.fsdp:FSDP",
    "zero1": "stratbench.strategies.sharding.zero:ZeRO1",
    "zero1-torch": "stratbench.strategies.sharding.zero:TorchZeRO1",
    **{name: cls for e in load_extensions().values() for name, cls in e.strategies.items()},
}


def get_strategy_class(name: str) -> type[Strategy]:
    """Return the strategy class that is registered as `name`.

    Raises:
        KeyError: If no strategy has this name.
    """
    registered = import_attribute(REGISTRY[name])
    return registered if isinstance(registered, type) else registered(name)


def make_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """Return a new instance of the strategy registered as `name`, with these options."""
    cls = get_strategy_class(name)
    return cls(cls.Options(**options))


@cache
def _build_option_defaults(name: str) -> dict[str, Any]:
    return asdict(get_strategy_class(name).Options())


def get_option_defaults(name: str) -> dict[str, Any]:
    """Return the options of the strategy that is registered as `name`, with their defaults."""
    return dict(_build_option_defaults(name))


def resolve_options(name: str, chosen_options: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """Return all options of a strategy: the chosen values, and defaults for the rest.

    Args:
        name: Name of the strategy.
        chosen_options: Options that the config sets; they override the defaults.
        gpus: Number of workers, on which values of some options depend.
    """
    return get_strategy_class(name).resolve(get_option_defaults(name) | chosen_options, gpus)


def get_traits(
    name: str,
    options: Mapping[str, Any],
    gpus: int,
    changes_without_gradient: bool = False,
    replaces_lost_workers: bool = False,
    loss_adds_up: bool = True,
) -> Traits:
    """Return the traits of the strategy registered as `name`, with these options and workers.

    Args:
        name: Name of the strategy.
        options: All options of the strategy.
        gpus: Number of workers.
        changes_without_gradient: Whether the strategy changes parameters in steps that give them no gradient
            (`acceptance.updates_parameters_without_gradient`). One process and DDP leave such parameters
            unchanged.
        replaces_lost_workers: Whether new workers replace workers that end.
        loss_adds_up: Whether the loss of a batch is the mean of the losses of its parts. If not, the updates
            depend on the sizes of the parts.
    """
    strategy = make_strategy(name, options)
    traits = strategy.traits(gpus)
    if replaces_lost_workers:
        traits = replace(traits, ends_with_a_worker=False)
    if not loss_adds_up:
        # The updates equal DDP's only if a batch is divided as by DDP: into one part per worker.
        parts = strategy.mesh(gpus).replicas * strategy.num_batch_parts
        traits = replace(
            traits,
            is_synchronous_on_one_worker=traits.is_synchronous_on_one_worker
            and strategy.num_batch_parts == 1,
            equals_ddp=traits.equals_ddp and parts == gpus,
        )
    if not changes_without_gradient:
        return traits
    return replace(traits, is_synchronous_on_one_worker=False, equals_ddp=False)


def get_mesh(name: str, options: Mapping[str, Any], gpus: int) -> Mesh:
    """Return the mesh in which the strategy registered as `name` divides work among workers.

    Args:
        name: Name of the strategy.
        options: All options of the strategy.
        gpus: Number of workers.
    """
    return make_strategy(name, options).mesh(gpus)
