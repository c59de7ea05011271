"""The parameter server's policies by strategy name, and the interface they share.

Adding one: a class in `averaging.py` or `asynchronous.py` (or a file of its own), its options in
`options.py`, and a line in POLICIES and in OPTIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from stratbench.ps.asynchronous import (
    AsyncModifiedPolicy,
    AsyncPolicy,
    DanaPolicy,
    DcAsgdPolicy,
    GapAwarePolicy,
    SspPolicy,
    StalenessLrPolicy,
)
from stratbench.ps.averaging import BackupPolicy, KBatchPolicy, SyncPolicy
from stratbench.ps.options import parse_options
from stratbench.ps.policy import Hyper, Outcome, Policy

__all__ = ["POLICIES", "Hyper", "Outcome", "Policy", "make_policy"]

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        SyncPolicy,
        AsyncPolicy,
        AsyncModifiedPolicy,
        SspPolicy,
        BackupPolicy,
        KBatchPolicy,
        DcAsgdPolicy,
        GapAwarePolicy,
        StalenessLrPolicy,
        DanaPolicy,
    )
}


def make_policy(
    strategy: str, weights: Tensor, hyper: Hyper, options: Mapping[str, Any] | None = None
) -> Policy:
    """A policy for one shard from a config's values.

    `weights`: the shard's flat parameters, shape [n], updated in place. `options`: as in the
    config, defaults where a key is missing; `lr_scale` there decides `hyper.lr_scale`. Raises
    ValueError for an unknown strategy or option.
    """
    parsed = parse_options(strategy, options)
    hyper = replace(hyper, lr_scale=parsed.lr_factor(hyper.workers))
    return POLICIES[strategy](weights, hyper, parsed)
