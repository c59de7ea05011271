"""The extension `servers`: parameter servers, which update the weights by a policy."""

from __future__ import annotations

from stratbench.cell.extensions import Extension
from stratbench.extensions.servers.policies.policies import POLICIES

EXTENSION = Extension(
    summary="parameter servers and their policies",
    strategies=dict.fromkeys(
        POLICIES, "stratbench.extensions.servers.strategy:get_strategy_of_policy"
    ),
    runner_class="stratbench.extensions.servers.runner:ServedRunner",
    report_additions="stratbench.extensions.servers.section:READING",
    columns="stratbench.extensions.servers.columns:COLUMNS",
)
