"""The extension `servers`: parameter servers, which update the weights by a policy."""

from __future__ import annotations

from stratbench.cell.extensions import Extension
from stratbench.ps.policies.policies import POLICIES

EXTENSION = Extension(
    says="parameter servers and their policies",
    strategies=dict.fromkeys(POLICIES, "stratbench.strategies.ps:class_of_policy"),
    runner="stratbench.extensions.servers.runner:ServedRunner",
)
