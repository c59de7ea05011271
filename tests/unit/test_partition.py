"""Each worker's own part of a training set: the same size for all, few classes, and only what is its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from stratbench.workload.data.device_data import epoch_order
from stratbench.workload.data.partition import ByClass

SAMPLES, CLASSES, BATCH = 103, 5, 8


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(CLASSES, (SAMPLES,), generator=torch.Generator().manual_seed(3))


def batches_of(parts: ByClass, order: torch.Tensor, workers: int) -> torch.Tensor:
    """As a collective strategy divides them: [steps, workers, samples]."""
    return parts.arrange(order, BATCH).view(-1, workers, BATCH // workers)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_worker_sees_its_own_samples_only_each_at_most_once(labels, workers):
    parts = ByClass(labels, workers, seed=1)
    seen = [set() for _ in range(workers)]
    for epoch in range(3):
        batches = batches_of(parts, epoch_order(SAMPLES, 1, epoch), workers)
        assert len(batches) == SAMPLES // BATCH  # as many steps as without parts
        for worker in range(workers):
            mine = batches[:, worker].flatten().tolist()
            assert len(set(mine)) == len(mine)
            assert (parts.owner[mine] == worker).all()
            seen[worker] |= set(mine)
    assert not set.intersection(*seen) or workers == 1
    sizes = torch.bincount(parts.owner, minlength=workers + 1)
    assert sizes[:workers].tolist() == [SAMPLES // workers] * workers
    assert int(sizes[workers]) == SAMPLES % workers


def test_parts_are_cut_from_the_labels_in_their_order(labels):
    parts = ByClass(labels, 4, seed=1)
    of = [labels[parts.owner == worker] for worker in range(4)]
    assert all(int(a.max()) <= int(b.min()) for a, b in pairwise(of))
    assert all(len(a.unique()) < CLASSES for a in of)


def test_the_seed_decides_which_samples_of_a_divided_class(labels):
    one, same, other = (ByClass(labels, 4, seed).owner for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_one_worker_has_everything_in_the_usual_order(labels):
    order = epoch_order(SAMPLES, 1, 0)
    steps = SAMPLES // BATCH
    assert torch.equal(ByClass(labels, 1, 5).arrange(order, BATCH), order[: steps * BATCH])


def test_the_order_within_a_part_is_new_in_each_epoch(labels):
    parts = ByClass(labels, 2, seed=1)
    first, again, second = (
        batches_of(parts, epoch_order(SAMPLES, 1, e), 2)[:, 0].flatten() for e in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_what_a_worker_has_seen_is_counted_by_class(labels):
    parts = ByClass(labels, 2, seed=1)
    for epoch in range(2):
        parts.count(batches_of(parts, epoch_order(SAMPLES, 1, epoch), 2)[:, 1])
    own = labels[parts.owner == 1].unique().tolist()
    assert own == [label for label, n in enumerate(parts.class_samples) if n]
    assert sum(parts.class_samples) == 2 * (SAMPLES // BATCH) * (BATCH // 2)
