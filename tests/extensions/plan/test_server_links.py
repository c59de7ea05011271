"""The plan of servers: bytes on the busiest link, and the states that each server keeps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from ps_harness import Served, Worked, config
from test_placement import SECRET, placed

from stratbench.extensions.plan.servers import (
    compute_busiest_link_bytes,
    predict_server_bytes_by_purpose,
)
from stratbench.extensions.servers.figures import compute_node_link_traffic

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(("server_placement", "n_servers"), [("central", 1), ("colocated", 4)])
def test_the_busiest_link_carries_what_its_formula_says(tmp_path, server_placement, n_servers):
    """Counted by four workers over TCP, as if on one, two and four nodes."""
    plan = config(
        tmp_path,
        policy="ps-sync",
        workers=4,
        slices_per_step=4,
        steps_per_epoch=3,
        n_servers=n_servers,
    )
    moved: dict[int, list[list[int]]] = {}

    def note(worker, ticket, channel):
        """Between two tickets is a whole exchange: the first weights are no step's, the last may not come."""
        moved.setdefault(worker, []).append(channel.sent_and_received_bytes_by_server)

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
            n_nodes=nodes,
            get_node_of_rank=lambda rank, n=nodes: rank * n // 4,
            world_size=4,
            settings=s,
        )
        found = compute_node_link_traffic(job, counted)
        expected = compute_busiest_link_bytes(s, flat, nodes)
        assert found["busiest_link_bytes_per_batch"] == pytest.approx(expected, rel=0.03)
        # Of four workers each finds 1 / nodes of the servers' bytes on its own node, in both placements.
        assert found["local_bytes_per_step"] == pytest.approx(whole / nodes, rel=0.03)


def test_the_formulas_are_those_of_the_book():
    flat = {"weights": 1000, "buffers": 0}
    for workers in (2, 4, 8):
        central, colocated = placed("central", workers), placed("colocated", workers)
        assert compute_busiest_link_bytes(central, flat, workers) == (workers - 1) * 1000
        assert compute_busiest_link_bytes(colocated, flat, workers) == pytest.approx(
            2 * (workers - 1) / workers * 1000
        )
        assert compute_busiest_link_bytes(colocated, flat, 1) == 0


def test_a_server_beside_each_worker_keeps_an_equal_part_of_the_states():
    flat = {"weights": 4000, "buffers": 0}
    one, each = (
        predict_server_bytes_by_purpose(placed(p, 4, "ps-ormo"), flat, 1)
        for p in ("central", "colocated")
    )
    assert (one["weights"], one["optimizer"]) == (4000, 4000)
    assert (each["weights"], each["optimizer"]) == (1000, 1000)
