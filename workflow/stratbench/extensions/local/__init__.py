"""The extension `local`: strategies whose workers update their own weights (local SGD, DiLoCo, gossip)."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="local SGD, DiLoCo and gossip",
    strategies={
        "local-sgd": "stratbench.extensions.local.local_sgd:LocalSGD",
        "diloco": "stratbench.extensions.local.diloco:DiLoCo",
        "gossip": "stratbench.extensions.local.gossip:Gossip",
    },
)
