"""Where parameter servers run: their parts, their nodes, what the links between nodes carry."""

from __future__ import annotations

import pytest

from launching import settings
from stratbench.cell.coordinates import Cell
from stratbench.extensions.servers.ps.store import Store
from stratbench.extensions.servers.strategy import find_node_of_server
from stratbench.extensions.servers.wire.shm import Layout
from stratbench.strategies import REGISTRY, get_strategy_class, resolve_options
from stratbench.study.resources import build_job_request

pytestmark = pytest.mark.timeout(300)
SECRET = b"s" * 32
SERVED = [name for name in REGISTRY if get_strategy_class(name).kind == "server"]


def placed(server_placement: str, workers: int, strategy: str = "ps-async", **given):
    options = resolve_options(strategy, {"server_placement": server_placement} | given, workers)
    return settings(strategy, gpus=workers, options=options)


@pytest.mark.parametrize("strategy", SERVED)
def test_every_server_strategy_can_have_a_server_beside_each_worker(strategy):
    assert placed("colocated", 4, strategy).options["servers"] == 4
    assert resolve_options(strategy, {}, 4)["servers"] == 1


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
    assert [find_node_of_server(s, k, nodes) for k in range(s.options["servers"])] == expected


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


def test_servers_are_not_counted_by_hand_where_each_worker_has_one():
    cls = get_strategy_class("ps-sync")
    options = cls.Options(server_placement="colocated").__dict__
    cls.check("ps-sync", options, 4, 8)
    with pytest.raises(ValueError, match="servers = 2: server_placement = 'colocated'"):
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
        asked.append(build_job_request(cell, s, cluster, None))
    assert [a.cpus for a in asked] == cpus
    assert [a.mem_mib for a in asked] == [100 * n for n in cpus]
