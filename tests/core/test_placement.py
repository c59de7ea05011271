"""Where parameter servers run: their parts, their nodes, what the links between nodes carry."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from ps_harness import Served, Worked, config

from launching import settings
from stratbench.cell.coordinates import Cell
from stratbench.extensions.plan.servers import busiest_link_bytes, server_needs
from stratbench.ps.store import Store
from stratbench.ps.wire.shm import Layout
from stratbench.strategies import REGISTRY, resolved_options, strategy_class
from stratbench.strategies.ps import node_of_server
from stratbench.study.resources import job_request
from stratbench.train.efficiency import links_of_nodes

pytestmark = pytest.mark.timeout(300)
SECRET = b"s" * 32
SERVED = [name for name in REGISTRY if strategy_class(name).kind == "server"]


def placed(server_placement: str, workers: int, strategy: str = "ps-async", **given):
    options = resolved_options(strategy, {"server_placement": server_placement} | given, workers)
    return settings(strategy, gpus=workers, options=options)


@pytest.mark.parametrize("strategy", SERVED)
def test_every_server_strategy_can_have_a_server_beside_each_worker(strategy):
    assert placed("colocated", 4, strategy).options["servers"] == 4
    assert resolved_options(strategy, {}, 4)["servers"] == 1


@pytest.mark.parametrize(
    ("server_placement", "servers", "workers", "nodes", "expected"),
    [
        ("central", 1, 4, 2, [0]),
        ("central", 3, 4, 2, [0, 1, 0]),
        ("colocated", 1, 4, 2, [0, 0, 1, 1]),
        ("colocated", 1, 5, 2, [0, 0, 0, 1, 1]),
        ("colocated", 1, 3, 3, [0, 1, 2]),
    ],
)
def test_the_node_of_each_server(server_placement, servers, workers, nodes, expected):
    s = placed(server_placement, workers, servers=servers)
    assert [node_of_server(s, k, nodes) for k in range(s.options["servers"])] == expected


@pytest.mark.parametrize("n_servers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("numel", [5_000_000, 1_048_576, 100_003])
def test_servers_have_equal_parts(numel, n_servers):
    """At 4 MiB per shard, 5 million weights are 5 shards: one server of four had two of them."""
    layout = Layout(numel, "float32", 0, "float32", "")
    stores = [Store(layout, 4 << 20, k, n_servers, 1 << 40) for k in range(n_servers)]
    parts = [sum(s.bounds[k][1] - s.bounds[k][0] for k in s.mine) for s in stores]
    assert sum(parts) == numel
    assert max(parts) <= numel / n_servers + len(stores[0].bounds)
    assert all(stop - start <= (4 << 20) // 4 for start, stop in stores[0].bounds)


@pytest.mark.parametrize(("server_placement", "n_servers"), [("central", 1), ("colocated", 4)])
def test_the_busiest_link_carries_what_its_formula_says(tmp_path, server_placement, n_servers):
    """Counted by four workers over TCP, as if on one, two and four nodes."""
    plan = config(
        tmp_path, policy="ps-sync", workers=4, slices=4, steps_per_epoch=3, n_servers=n_servers
    )
    moved: dict[int, list[list[int]]] = {}

    def note(worker, ticket, channel):
        """Between two tickets is a whole exchange: the first weights are no step's, the last may not come."""
        moved.setdefault(worker, []).append(channel.moved_bytes)

    servers = [Served(replace(plan, server=k), SECRET) for k in range(n_servers)]
    workers = [Worked(plan, SECRET, w, transport="tcp", before_push=note) for w in range(4)]
    for worker in workers:
        worker.join()
    for server in servers:
        server.result()
    layout = workers[0].flat.layout
    flat = {"weights": layout.weight_bytes, "buffers": layout.buffer_bytes}
    s = placed(server_placement, 4)
    counted = []
    for worker, done in enumerate(workers):
        assert len(done.tickets) == len(moved[worker]) == 3
        ends = zip(moved[worker][0], moved[worker][-1], strict=True)
        each = [after - before for before, after in ends]
        pairs = list(zip(each[::2], each[1::2], strict=True))
        counted.append({"rank": worker, "steps": 2, "communication": {"by_server_bytes": pairs}})
    whole = 2 * flat["weights"] + flat["buffers"]
    for nodes in (1, 2, 4):
        job = SimpleNamespace(
            n_nodes=nodes, node_of=lambda rank, n=nodes: rank * n // 4, world_size=4, settings=s
        )
        found = links_of_nodes(job, counted)
        expected = busiest_link_bytes(s, flat, nodes)
        assert found["busiest_link_bytes_per_batch"] == pytest.approx(expected, rel=0.03)
        # Of four workers each finds 1 / nodes of the servers' bytes on its own node, in both placements.
        assert found["local_bytes_per_step"] == pytest.approx(whole / nodes, rel=0.03)


def test_the_formulas_are_those_of_the_book():
    flat = {"weights": 1000, "buffers": 0}
    for workers in (2, 4, 8):
        central, colocated = placed("central", workers), placed("colocated", workers)
        assert busiest_link_bytes(central, flat, workers) == (workers - 1) * 1000
        assert busiest_link_bytes(colocated, flat, workers) == pytest.approx(
            2 * (workers - 1) / workers * 1000
        )
        assert busiest_link_bytes(colocated, flat, 1) == 0


def test_a_server_beside_each_worker_keeps_an_equal_part_of_the_states():
    flat = {"weights": 4000, "buffers": 0}
    one, each = (server_needs(placed(p, 4, "ps-ormo"), flat, 1) for p in ("central", "colocated"))
    assert (one["weights"], one["optimizer"]) == (4000, 4000)
    assert (each["weights"], each["optimizer"]) == (1000, 1000)


def test_servers_are_not_counted_by_hand_where_each_worker_has_one():
    cls = strategy_class("ps-sync")
    options = cls.Options(server_placement="colocated").__dict__
    cls.check("ps-sync", options, 4, 8)
    with pytest.raises(ValueError, match="servers = 2 with server_placement = 'colocated'"):
        cls.check("ps-sync", options | {"servers": 2}, 4, 8)


@pytest.mark.parametrize(("server_placement", "cpus"), [("central", [3, 3]), ("colocated", [4, 4])])
def test_a_node_is_asked_for_the_cores_of_its_servers(server_placement, cpus):
    """Four workers on two nodes, or on one of two, with a core per process."""
    cluster = {
        "gpus_per_node": 2, "request_gpus": False, "mem_mib_per_cpu_worker": 100,
        "startup_allowance_s": 0, "memory_margin": 0.1,
    }  # fmt: skip
    asked = []
    for workers in (4, 2):
        s = placed(server_placement, workers)
        cell = Cell("s", "e", s.strategy, s.model, s.dataset, workers, 0)
        asked.append(job_request(cell, s, cluster, None))
    assert [a.cpus for a in asked] == cpus
    assert [a.mem_mib for a in asked] == [100 * n for n in cpus]
