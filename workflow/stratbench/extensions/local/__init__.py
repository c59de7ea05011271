"""The extension `local`: local SGD, DiLoCo and gossip."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    says="local SGD, DiLoCo and gossip",
    strategies={
        "local-sgd": "stratbench.extensions.local.local_sgd:LocalSGD",
        "diloco": "stratbench.extensions.local.diloco:DiLoCo",
        "gossip": "stratbench.extensions.local.gossip:Gossip",
    },
)
