"""What a config of elastic cells is refused for."""

from __future__ import annotations

import pytest
import test_config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"elastic": True, "strategies": ["ddp", "fsdp"]},
            ["elastic = true: fsdp: each worker holds a part of the state", "remove fsdp"],
        ),
        (
            {"elastic": True, "strategies": ["ps-sync"]},
            ["elastic = true: ps-sync: each of its steps"],
        ),
        (
            {"elastic": True, "strategies": ["single"]},
            ["elastic = true: single: it has one worker"],
        ),
        (
            {"checkpoint_every": 5, "strategies": ["ddp"], "elastic": True},
            ["checkpoint_every = 5 with elastic = true"],
        ),
        (
            {"elastic": True, "strategies": ["ddp"], "compile": True},
            [
                "compile = true with elastic = true: the size of a worker's part",
                "remove one of these two keys",
            ],
        ),
        (
            {"elastic": True, "strategies": ["ddp"], "precision": "fp16"},
            ["elastic = true: ddp: the loss scale", "use bf16"],
        ),
    ],
)
def test_a_mistake_in_an_elastic_experiment_is_told(changes, expected):
    test_config.check_mistake(changes, expected)
