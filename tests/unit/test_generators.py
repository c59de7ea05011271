"""The generators of random numbers: seeded together, put back together, kept as tensors."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stratbench.workload.generators import Generators, generators_put_back, seed_generators


@pytest.fixture(autouse=True)
def left_as_they_were():
    with generators_put_back():
        yield


def drawn() -> list[float]:
    """One number of each, of the kinds that are drawn in pairs, too."""
    return [
        *(random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()),
        float(torch.rand(())),
    ]


def test_one_seed_seeds_all_and_another_gives_others():
    seed_generators(3)
    first = drawn()
    seed_generators(3)
    assert drawn() == first
    seed_generators(4)
    assert not set(drawn()) & set(first)
    seed_generators(2**40)  # more than numpy takes


@pytest.mark.parametrize("before", [0, 1])
def test_states_come_back_through_tensors_with_halves_of_pairs(before):
    seed_generators(5)
    for _ in range(before):
        random.gauss(0, 1)
        np.random.normal()
    kept = Generators.now()
    expected = [drawn() for _ in range(3)]
    Generators.of_tensors([t.clone() for t in kept.tensors()]).put_back()
    assert [drawn() for _ in range(3)] == expected


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_it_is_seen_which_generator_has_moved(draw):
    before = Generators.now()
    assert not before.differ_from(Generators.now())
    with generators_put_back() as kept:
        draw()
        assert kept.differ_from(Generators.now())
    assert not before.differ_from(Generators.now())
