"""The keys of a verdict in config.yaml."""

from __future__ import annotations

import pytest
import test_config

from stratbench.study.config import validation


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("verdict rounds", 3, ["verdict.rounds = 3: is not allowed", "Allowed: 1, all."]),
        ("verdict margin", 0, ["verdict.margin = 0: must be greater than 0. Share by which"]),
        ("verdict budget", 4, ["unknown key 'budget'", "Did you mean 'budget_gpu_hours'?"]),
    ],
)
def test_a_mistake_in_verdict_is_told(path, value, expected):
    test_config.check_mistake_elsewhere(path, value, expected)


@pytest.mark.parametrize("rounds", [1, "all"])
def test_one_of_several_values_given_as_text_is_that_value(rounds):
    found = validation.validate_config(test_config.raw() | {"verdict": {"rounds": str(rounds)}})
    assert found["verdict"]["rounds"] == rounds
