"""The job that measures links: its arguments and its request."""

from __future__ import annotations

from test_jobs import config_of

from stratbench.extensions.links.jobs import make_links_arguments, make_links_request
from stratbench.study.slurm.nodes import Node


def test_links_are_measured_as_the_strategies_use_them(tmp_path):
    def told(*strategies: str, models: tuple[str, ...] = ("vgg-compact",), **cluster) -> str:
        block = {
            "strategies": list(strategies),
            "models": list(models),
            "gpus": [1, 2, 4],
            "device": "cpu",
        }
        whole, study = config_of(tmp_path, block, **{"gpus_per_node": 4} | cluster)
        return " ".join(make_links_arguments(study, whole["cluster"]))

    assert told("ddp") == "--a-node 4 --workers 2 4 --largest-mib 3 --kinds all_reduce broadcast"
    assert told("ddp", gpus_per_node=2).startswith("--a-node 2 --workers 2 ")
    assert "--kinds all_gather all_reduce reduce_scatter" in told("fsdp", "local-sgd")
    # Servers alone need no collective, and are measured by the transport that they have here.
    assert told("ps-async").endswith("--kinds --servers shm")
    # One that does not say what it uses is measured with all there are.
    assert "--kinds" not in told("ddp", "deepspeed")
    assert "--largest-mib 256" in told("ddp", models=("vgg16",))


def test_links_are_measured_on_two_nodes_where_a_partition_has_them(tmp_path):
    def node(partition: str, name: str, gpus: int = 4, cpus: int = 40) -> Node:
        return Node(partition, False, name, cpus, 100_000, gpus, None)

    block = {"strategies": ["ddp", "ps-sync"], "gpus": [1, 2]}
    cluster = {"gpus_per_node": 4, "cpus_per_gpu": 8, "mem_mib_per_gpu": 9000, "server_cpus": 3}
    whole, study = config_of(tmp_path, block, **cluster)
    pair = [node("a", "n1"), node("a", "n2")]
    asked = make_links_request(study, whole["cluster"], pair)
    assert (asked.nodes, asked.gpus, asked.cpus) == (2, 4, 4 * 8 + 3)
    assert asked.mem_mib > 4 * 9000
    # Nodes of two partitions are no pair, and neither is one that lacks GPUs.
    for offered in ([], pair[:1], [pair[0], node("b", "n2")], [pair[0], node("a", "n2", gpus=2)]):
        asked = make_links_request(study, whole["cluster"], offered)
        assert (asked.nodes, asked.gpus) == (1, 4)
