"""The extension `servers`: parameter servers, which update the weights by a policy."""

from __future__ import annotations

from stratbench.cell.extensions import Extension
from stratbench.extensions.servers.policies.policies import POLICIES

EXTENSION = Extension(
    says="parameter servers and their policies",
    strategies=dict.fromkeys(POLICIES, "stratbench.extensions.servers.strategy:class_of_policy"),
    runner="stratbench.extensions.servers.runner:ServedRunner",
    reading="stratbench.extensions.servers.section:READING",
    columns="stratbench.extensions.servers.columns:COLUMNS",
)
