"""Names of the extensions that the core loads. To remove one, delete its folder and its name here."""

from __future__ import annotations

#: Names of the extensions, in the order in which pages list their additions.
NAMES = (
    "audit",
    "paper",
    "plan",
    "projection",
    "links",
    "queue",
    "tune",
    "verdict",
    "elastic",
    "checkpoints",
    "sets",
    "emit",
    "deepspeed",
    "commands",
    "splitting",
    "local",
    "libraries",
    "labelled",
    "servers",
    "explore",
)
