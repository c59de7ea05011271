"""The extensions of the core: whoever deletes the folder of one deletes its name here."""

from __future__ import annotations

#: In the order in which pages list what they add.
NAMES = (
    "plan",
    "projection",
    "links",
    "queue",
    "tune",
    "verdict",
    "audit",
    "elastic",
    "checkpoints",
    "sets",
    "emit",
    "paper",
    "deepspeed",
    "commands",
    "splitting",
    "local",
    "compression",
    "explore",
)
