"""Registry of the update policies: name and class of each.

Policies import torch inside functions only, because the workflow reads their options at every start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from stratbench.extensions.servers.policies.options import PolicyOptions
    from stratbench.extensions.servers.policies.policy import Hyper, Policy

POLICIES: dict[str, str] = {
    "ps-sync": "stratbench.extensions.servers.policies.averaging:SyncPolicy",
    "ps-async": "stratbench.extensions.servers.policies.asynchronous:AsyncPolicy",
    "ps-async-modified": "stratbench.extensions.servers.policies.asynchronous:AsyncModifiedPolicy",
    "ps-ssp": "stratbench.extensions.servers.policies.asynchronous:SspPolicy",
    "ps-backup": "stratbench.extensions.servers.policies.averaging:BackupPolicy",
    "ps-kbatch": "stratbench.extensions.servers.policies.averaging:KBatchPolicy",
    "ps-dcasgd": "stratbench.extensions.servers.policies.asynchronous:DcAsgdPolicy",
    "ps-gap-aware": "stratbench.extensions.servers.policies.asynchronous:GapAwarePolicy",
    "ps-staleness-lr": "stratbench.extensions.servers.policies.asynchronous:StalenessLrPolicy",
    "ps-dana": "stratbench.extensions.servers.policies.asynchronous:DanaPolicy",
    "ps-ormo": "stratbench.extensions.servers.policies.ormo:OrMoPolicy",
    "ps-preview": "stratbench.extensions.servers.policies.preview:PreviewPolicy",
}


def get_policy_class(name: str) -> type[Policy]:
    """Return the class of the policy with this name.

    Raises:
        ValueError: If no policy has this name.
    """
    if name not in POLICIES:
        raise ValueError(f"{name!r} is no parameter-server policy; known: {', '.join(POLICIES)}")
    module, _, attribute = POLICIES[name].partition(":")
    return getattr(import_module(module), attribute)


def list_policies_supporting(optimizer: str) -> list[str]:
    """Return the names of the policies that support an optimizer, "sgd" or "adamw"."""
    return [name for name in POLICIES if not get_policy_class(name).Options.refusal(optimizer)]


def parse_policy_options(policy: str, values: Mapping[str, Any] | None = None) -> PolicyOptions:
    """Return the options of a policy with these values, by option.

    Missing options have their defaults.

    Raises:
        ValueError: If the policy or a key is unknown, or if a value has the wrong type or range.
    """
    options, values = get_policy_class(policy).Options, values or {}
    known = [spec.name for spec in fields(options)]
    for option in values:
        if option not in known:
            known_options = ", ".join(known) or "none"
            raise ValueError(f"{policy}: unknown option {option!r}; its options: {known_options}")
    try:
        return options(**values)
    except ValueError as e:
        raise ValueError(f"{policy}: {e}") from None


def make_policy(
    name: str, weights: Tensor, hyper: Hyper, options: Mapping[str, Any] | None = None
) -> Policy:
    """Create the update policy of one shard.

    Args:
        name: Name of the policy.
        weights: Flat parameters of the shard, shape [n], updated in place.
        hyper: Optimizer settings, whose `lr_scale` is replaced according to `options`.
        options: Options as in config.yaml. Missing keys have defaults.

    Raises:
        ValueError: If the policy or an option is unknown, or if the policy does not support the optimizer.
    """
    parsed = parse_policy_options(name, options)
    if reason := parsed.refusal(hyper.optimizer):
        raise ValueError(f"{name} does not support the optimizer {hyper.optimizer}: {reason}")
    hyper = replace(hyper, lr_scale=parsed.lr_factor(hyper.workers))
    return get_policy_class(name)(weights, hyper, parsed)
