"""How workers divide a cell's work: where each stands, whose samples count, and what batches follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from launching import settings
from stratbench.cell.run_folder import RunFolder
from stratbench.strategies import REGISTRY, get_mesh, get_option_defaults, get_strategy_class
from stratbench.strategies.base import Worker
from stratbench.strategies.collective import Collective
from stratbench.strategies.mesh import Mesh

MESHES = [Mesh(r, t, s) for r in (1, 2, 3) for t in (1, 2, 4) for s in (1, 2, 3)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_rank_has_a_place_of_its_own(mesh):
    places = [mesh.get_coordinate(rank) for rank in range(mesh.num_workers)]
    assert len(set(places)) == mesh.num_workers
    assert [mesh.get_rank(place) for place in places] == list(range(mesh.num_workers))
    assert {p.replica for p in places} == set(range(mesh.replicas))
    assert {p.stage for p in places} == set(range(mesh.stages))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_workers_that_divide_a_layer_are_neighbours(mesh):
    """So that a node holds all of them wherever it can."""
    by_layer: dict[tuple[int, int], list[int]] = {}
    for rank in range(mesh.num_workers):
        place = mesh.get_coordinate(rank)
        by_layer.setdefault((place.replica, place.stage), []).append(rank)
    for ranks in by_layer.values():
        assert ranks == list(range(ranks[0], ranks[0] + mesh.tensor))
        assert ranks[0] % mesh.tensor == 0


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_one_worker_of_each_replica_counts_and_has_the_loss(mesh):
    speakers = [
        mesh.get_coordinate(rank)
        for rank in range(mesh.num_workers)
        if mesh.reports_replica_results(rank)
    ]
    assert [p.replica for p in speakers] == list(range(mesh.replicas))
    assert {p.stage for p in speakers} == {mesh.stages - 1}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_only_who_computes_the_same_draws_the_same(mesh):
    """Dropout is alike on the workers that divide a layer, and on no other two."""
    by_draws: dict[int, set[tuple[int, int]]] = {}
    for rank in range(mesh.num_workers):
        worker = Worker(
            settings(),
            rank,
            mesh.num_workers,
            1,
            torch.device("cpu"),
            RunFolder("nowhere"),
            [],
            mesh=mesh,
        )
        place = mesh.get_coordinate(rank)
        by_draws.setdefault(worker.random_stream_index, set()).add((place.replica, place.stage))
    assert len(by_draws) == mesh.replicas * mesh.stages
    assert all(len(places) == 1 for places in by_draws.values())
    if mesh.stages == 1:
        assert all(draws == replica for draws, ((replica, _),) in by_draws.items())


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replicas_divide_each_batch_and_their_workers_share_it(mesh):
    s = replace(
        settings(gpus=mesh.num_workers), global_batch=12, per_worker_batch=12 // mesh.replicas
    )
    order = torch.randperm(30)
    taken: dict[int, set[tuple[int, ...]]] = {}
    for rank in range(mesh.num_workers):
        strategy = Collective(Collective.Options())
        folder = RunFolder("nowhere")
        strategy.worker = Worker(
            s, rank, mesh.num_workers, 1, torch.device("cpu"), folder, [], mesh=mesh
        )
        share = torch.stack(list(strategy.batches(order, 0)))
        assert share.shape == (2, 12 // mesh.replicas)
        taken.setdefault(mesh.get_coordinate(rank).replica, set()).add(
            tuple(share.flatten().tolist())
        )
    assert all(len(shares) == 1 for shares in taken.values())
    seen = [i for (share,) in taken.values() for i in share]
    assert sorted(seen) == sorted(order[:24].tolist())


@pytest.mark.parametrize("name", [n for n in REGISTRY if get_strategy_class(n).family != "splits"])
def test_who_divides_no_layers_has_a_replica_a_worker(name):
    """Whether whole or sharded: each computes on samples of its own."""
    for gpus in (1, 2, 4)[: get_strategy_class(name).max_workers]:
        assert get_mesh(name, get_option_defaults(name), gpus) == Mesh(gpus)
