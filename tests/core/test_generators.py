"""The generators of random numbers: seeded together, put back together, kept as tensors."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from launching import settings
from stratbench.workload import users_code
from stratbench.workload.generators import (
    OTHER_START,
    Generators,
    preserve_random_generators,
    seed_random_generators,
)


@pytest.fixture(autouse=True)
def left_as_they_were():
    with preserve_random_generators():
        yield


def drawn() -> list[float]:
    """One number of each, of the kinds that are drawn in pairs, too."""
    return [
        *(random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()),
        float(torch.rand(())),
    ]


def test_one_seed_seeds_all_and_another_gives_others():
    seed_random_generators(3)
    first = drawn()
    seed_random_generators(3)
    assert drawn() == first
    seed_random_generators(4)
    assert not set(drawn()) & set(first)
    seed_random_generators(2**40)  # more than numpy takes


@pytest.mark.parametrize("before", [0, 1])
def test_states_come_back_through_tensors_with_halves_of_pairs(before):
    seed_random_generators(5)
    for _ in range(before):
        random.gauss(0, 1)
        np.random.normal()
    kept = Generators.capture_states()
    expected = [drawn() for _ in range(3)]
    Generators.from_tensors([t.clone() for t in kept.convert_to_tensors()]).restore_states()
    assert [drawn() for _ in range(3)] == expected


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_it_is_seen_which_generator_has_moved(draw):
    before = Generators.capture_states()
    assert not before.differ_from(Generators.capture_states())
    with preserve_random_generators() as kept:
        draw()
        assert kept.differ_from(Generators.capture_states())
    assert not before.differ_from(Generators.capture_states())


#: One layer's weights are from a generator that no seed reaches.
OUTSIDE = """
import random
from torch import nn
class Net(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Flatten(), nn.Linear(256, classes))
        self[1].weight.data.mul_(random.SystemRandom().random())
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ps-sync", "ps-async"])
def test_workers_that_build_other_weights_are_told_so_under_every_kind_of_strategy(
    start_cell, warm, tmp_path, strategy
):
    (tmp_path / "outside.py").write_text(OUTSIDE)
    spec = {"call": "outside.Net", "kwargs": {}, "wrap_classes": None}
    own = spec | users_code.compute_code_fingerprint(spec["call"], [tmp_path])
    env = warm | {users_code.CODE_VARIABLE: str(tmp_path)}
    launched = start_cell(settings(strategy, model="mine", own_model=own), env=env)
    code, output = launched.finish()
    assert code != 0
    assert f"FAILED: ModelError: model 'mine': {OTHER_START}\n" in output, output


@pytest.mark.parametrize(
    ("draw", "seen"),
    [
        (random.random, True),
        (lambda: random.gauss(0, 1), True),
        (np.random.rand, True),
        (np.random.normal, True),
        (lambda: torch.rand(()), False),
        (lambda: None, False),
    ],
)
def test_numbers_of_python_and_numpy_are_told_from_those_of_torch(draw, seen):
    before = Generators.capture_states()
    draw()
    assert before.differ_in_python_or_numpy(Generators.capture_states()) is seen
