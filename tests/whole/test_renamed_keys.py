"""A key that had another name is answered with its name of today."""

from __future__ import annotations

from typing import Any

import pytest

from stratbench.study.config import messages, validation

VARIANT = "studies demo variants v"


@pytest.mark.parametrize(
    ("path", "mapping", "old"),
    [
        ("studies demo experiments first", {"clip_norm": 1.0}, "clip_norm"),
        (VARIANT, {"strategy": "tensor", "data": "ddp"}, "data"),
        (VARIANT, {"strategy": "ddp", "start": 2}, "start"),
        ("decide queue", {"width": 8}, "width"),
        ("models mine", {"call": "nets.Net", "shard": ["Block"]}, "shard"),
        ("cluster", {"worker_min": 60}, "worker_min"),
    ],
)
def test_a_message_names_the_key_of_today(path, mapping, old):
    first = {
        "dataset": "digits", "strategies": ["ddp"], "models": ["vgg-compact"], "gpus": [2], "epochs": 1,
        "global_batch": 64, "lr": 0.05,
    }  # fmt: skip
    config: dict[str, Any] = {
        "study": "demo",
        "studies": {"demo": {"experiments": {"first": first}}},
    }
    block = config
    for key in path.split():
        block = block.setdefault(key, {})
    block.update(mapping)
    with pytest.raises(messages.ConfigError, match=f"Did you mean '{messages.RENAMED[old]}'"):
        validation.validate_config(config)
