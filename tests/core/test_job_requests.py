"""Jobs that no node can hold are told before the first submission: against recorded output of sinfo."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from stratbench.cell.coordinates import Cell
from stratbench.study import resources
from stratbench.study.config import config
from stratbench.study.slurm import commands, job_requests, nodes

#: `sinfo --noheader --Node --format='%P|%N|%c|%m|%G|%l'`: the tests' cluster, and a larger one.
TESTS = """gpu*|node1|16|24000|gpu:4|infinite
gpu*|node2|16|24000|gpu:4|infinite
"""
LARGER = """cpu*|c1|64|256000|(null)|1-00:00:00
cpu*|c2|64|256000|(null)|1-00:00:00
gpu|g1|48|500000+|gpu:a100:4(S:0-1)|2-12:00:00
gpu|g2|48|500000|gpu:a100:2(S:0-1),gpu:v100:2(S:0)|2-12:00:00
short|g1|48|500000|gpu:a100:4(S:0-1)|30:00
old|o1|n/a|n/a|(null)|n/a
"""


def test_what_sinfo_prints_is_read():
    found = nodes.parse_sinfo(LARGER)
    assert [
        (n.partition, n.name, n.cpus, n.mem_mib, n.gpus, n.time_limit_minutes) for n in found
    ] == [
        ("cpu", "c1", 64, 256000, 0, 1440),
        ("cpu", "c2", 64, 256000, 0, 1440),
        ("gpu", "g1", 48, 500000, 4, 3600),
        ("gpu", "g2", 48, 500000, 4, 3600),
        ("short", "g1", 48, 500000, 4, 30),
    ]
    assert [n.time_limit_minutes for n in nodes.parse_sinfo(TESTS)] == [None, None]
    assert nodes.parse_sinfo("sinfo: error\n\n|||||\n") == []
    # A node that cannot be read may be the one that holds a cell: then no cell is refused.
    assert nodes.parse_sinfo(TESTS + "gpu*|big|1K|2000000|gpu:8|infinite\n") == []


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (None, ["c1", "c2"]),
        ("gpu", ["g1", "g2"]),
        ("short,gpu", ["g1", "g2", "g1"]),
        ("none", []),
        (1080, []),  # a name that YAML takes for a number
    ],
)
def test_a_job_runs_in_the_partition_named_or_in_the_default_one(partition, expected):
    assert [
        n.name for n in nodes.select_partition_nodes(nodes.parse_sinfo(LARGER), partition)
    ] == expected
    assert len(nodes.select_partition_nodes(nodes.parse_sinfo(LARGER), "*")) == 5
    assert (
        len(nodes.select_partition_nodes(nodes.parse_sinfo(LARGER.replace("gpu|", "1080|")), 1080))
        == 2
    )


def study_of(device: str = "cpu", cluster: dict | None = None, **changes):
    block = {
        "dataset": "digits", "strategies": ["single", "ddp"], "models": ["vgg-compact"],
        "gpus": [1, 2, 4, 8], "epochs": 1, "global_batch": 64, "lr": 0.1, "device": device,
        "time_limit_s": 3000,
    }  # fmt: skip
    raw = {
        "study": "s",
        "cluster": cluster or {},
        "studies": {"s": {"experiments": {"e": block | changes}}},
    }
    return config.load_config(raw)


def request(strategy: str, gpus: int, planned_mib: int = 0, **given):
    """The cell, its settings, and what it asks for."""
    configuration, study = study_of(**given)
    cell = Cell("s", "e", strategy, "vgg-compact", "digits", gpus, 0)
    settings = study.settings(cell)
    needs = resources.PlannedNeeds(host_mem_mib=planned_mib)
    asked = resources.build_job_request(
        cell, settings, configuration["cluster"], study.time_limit_s(cell), needs
    )
    return cell, settings, asked


def test_a_cell_on_cpus_asks_for_its_threads_and_the_plans_memory():
    def asked(*args, **given):
        found = request(*args, **given)[2]
        return found.nodes, found.gpus, found.cpus, found.mem_mib

    assert asked("single", 1) == (1, 0, 1, 2048)
    assert asked("ddp", 4, threads=2) == (1, 0, 8, 4 * 2048)
    assert asked("ddp", 8, threads=2) == (2, 0, 8, 4 * 2048)
    assert asked("ddp", 4, planned_mib=4000) == (1, 0, 4, 4400 + resources.JOB_MIB)
    assert asked("ddp", 4, cluster={"mem_mib_per_cpu_worker": 500}) == (1, 0, 4, 2000)
    # On GPUs it asks for their shares; a plan can only ask for more.
    assert asked("ddp", 4, device="auto") == (1, 4, 32, 4 * 32768)
    assert asked("ddp", 4, device="auto", planned_mib=4000) == (1, 4, 32, 4 * 32768)
    assert asked("ddp", 4, device="auto", cluster={"request_gpus": False}) == (1, 0, 4, 8192)


def test_a_type_of_gpu_is_asked_for_and_looked_for_on_the_nodes():
    a100 = {"gpu_type": "a100", "gpus_per_node": 4}
    cell, settings, asked = request("ddp", 4, device="cuda", cluster=a100)
    assert asked.gres == "gpu:a100:4"
    assert "--gres=gpu:a100:4" in asked.sbatch_command
    assert request("ddp", 4, cluster=a100)[2].gres == ""  # on CPUs
    here = nodes.select_partition_nodes(nodes.parse_sinfo(LARGER), "gpu")
    assert nodes.explain_oversized_job(cell, settings, asked, here) is None
    (mixed,) = (node for node in here if node.name == "g2")
    assert (
        nodes.explain_oversized_job(cell, settings, replace(asked, gpu_type=None), [mixed]) is None
    )
    told = nodes.explain_oversized_job(cell, settings, asked, [mixed])
    assert "asks for a node with 4 GPUs of type a100" in told
    assert "has 2 GPUs of type a100" in told
    assert "set cluster.gpus_per_node to 2" in told
    told = nodes.explain_oversized_job(cell, settings, replace(asked, gpu_type="h100"), here)
    assert "set cluster.gpu_type to a type of this node (a100" in told


@pytest.mark.parametrize(
    ("gres", "gpu_type"), [("gpu:a100:2", "a100"), ("gpu:2", None), ("gpu:a:1,gpu:b:1", None)]
)
def test_the_type_in_a_profile_is_read(gres, gpu_type):
    submitted = job_requests.read_submitted_request({"nodes": 1, "gres": gres})
    assert (submitted.gpus, submitted.gpu_type) == (2, gpu_type)


def test_several_types_of_gpus_are_named_where_none_is_chosen():
    asked = request("ddp", 2, device="cuda")[2]
    offered = nodes.parse_sinfo(LARGER)
    told = nodes.describe_mixed_gpu_types(nodes.select_partition_nodes(offered, "gpu"), [asked])
    assert "a100 (2 nodes), v100 (1 node)" in told
    assert "cluster.gpu_type" in told
    typed = replace(asked, gpu_type="a100")
    assert nodes.describe_mixed_gpu_types(offered, [typed]) is None
    assert nodes.describe_mixed_gpu_types(offered, [request("ddp", 2)[2]]) is None  # on CPUs
    assert (
        nodes.describe_mixed_gpu_types(nodes.select_partition_nodes(offered, "short"), [asked])
        is None
    )
    assert nodes.describe_mixed_gpu_types(nodes.parse_sinfo(TESTS), [asked]) is None


#: A GPU's share on the tests' nodes.
SMALL = {"cpus_per_gpu": 2, "mem_mib_per_gpu": 1024}


@pytest.mark.parametrize(
    ("strategy", "gpus", "given", "parts"),
    [
        ("ddp", 4, {"threads": 8},
         ["4 workers, repeat 0 asks for a node with 32 CPU cores, 8,192 MiB and 60 minutes",
          "the largest node of partition gpu has 16 CPU cores, 24,000 MiB and no time limit",
          "lower studies.s.experiments.e.threads"]),
        ("ddp", 4, {"cluster": {"mem_mib_per_cpu_worker": 9000}},
         ["36,000 MiB", "24,000 MiB", "lower cluster.mem_mib_per_cpu_worker"]),
        ("ddp", 4, {"planned_mib": 30_000},
         ["34,024 MiB", "plan predicts that the cell needs this much memory: lower cluster.gpus_per_node"]),
        ("ddp", 4, {"device": "auto"},
         ["a node with 4 GPUs, 32 CPU cores, 131,072 MiB", "has 4 GPUs, 16 CPU cores, 24,000 MiB",
          "lower cluster.cpus_per_gpu; lower cluster.mem_mib_per_gpu"]),
        ("ddp", 8, {"device": "auto", "cluster": {"gpus_per_node": 8, "cpus_per_gpu": 1,
                                                "mem_mib_per_gpu": 1024}},
         ["8 GPUs, 8 CPU cores", "has 4 GPUs, 16 CPU cores", "set cluster.gpus_per_node to 4"]),
        ("ddp", 8, {"cluster": {"gpus_per_node": 2}},
         ["asks for 4 nodes, each with 2 CPU cores", "partition gpu has 2 such nodes",
          "raise cluster.gpus_per_node, or remove 8 from studies.s.experiments.e.gpus"]),
    ],
)  # fmt: skip
def test_what_no_node_can_hold_is_one_sentence_with_the_key_to_change(strategy, gpus, given, parts):
    cell, settings, asked = request(strategy, gpus, **given)
    sentence = nodes.explain_oversized_job(cell, settings, asked, nodes.parse_sinfo(TESTS))
    assert sentence is not None
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence, sentence


def test_the_time_limit_of_a_partition_counts():
    cell, settings, asked = request("ddp", 4, device="auto", time_limit_s=4 * 3600)
    larger = nodes.parse_sinfo(LARGER)
    assert (
        nodes.explain_oversized_job(
            cell, settings, asked, nodes.select_partition_nodes(larger, "gpu")
        )
        is None
    )
    sentence = nodes.explain_oversized_job(
        cell, settings, asked, nodes.select_partition_nodes(larger, "short")
    )
    assert "and 250 minutes, but the largest node of partition short has" in sentence
    assert "and 30 minutes: lower studies.s.experiments.e.time_limit_s" in sentence
    # One partition that can hold it is enough.
    assert (
        nodes.explain_oversized_job(
            cell, settings, asked, nodes.select_partition_nodes(larger, "short,gpu")
        )
        is None
    )
    on_cpus = nodes.explain_oversized_job(
        cell, settings, asked, nodes.select_partition_nodes(larger, None)
    )
    assert "set cluster.request_gpus to false, or studies.s.experiments.e.device to cpu" in on_cpus
    assert nodes.explain_oversized_job(cell, settings, asked, []) is None  # nothing is known


def test_cells_with_the_same_reason_are_told_once():
    cell, settings, asked = request("ddp", 4, threads=8)
    sentence = nodes.explain_oversized_job(cell, settings, asked, nodes.parse_sinfo(TESTS))
    cells = [replace(cell, repeat=i) for i in range(3)]
    told = nodes.format_refusals({c: sentence.replace(str(cell), str(c)) for c in cells})
    assert told == [sentence + " (and 2 more cells)"]
    assert nodes.format_refusals({}) == []


def snakemake_job(cell: Cell, **given) -> SimpleNamespace:
    return SimpleNamespace(resources=given, output=[f"results/{cell.path}/record.json"])


def test_what_the_profile_asks_for_is_judged_and_named():
    cell, settings, asked = request("ddp", 4)
    same = {"nodes": 1, "gres": "", "cpus_per_task": 4, "mem_mb": asked.mem_mib, "runtime": 60}
    offered = nodes.parse_sinfo(LARGER)

    def refusal(**given):
        job = snakemake_job(cell, **(same | given))
        submission = job_requests.Submission(job, cell, settings, asked)
        refused = job_requests.find_refused_cells([submission], offered, in_any_partition=False)
        return refused.get(cell)

    assert refusal() is None
    assert "lower it in the profile" in refusal(mem_mb=900_000)
    assert "lower it in the profile" in refusal(cpus_per_task=100, slurm_partition="gpu")
    assert refusal(gres="gpu:4", slurm_partition="gpu") is None
    assert "4 GPUs, 4 CPU cores" in refusal(gres="gpu:4")


def test_a_silent_slurm_stops_nothing(monkeypatch):
    def fail(*_, **__):
        raise commands.subprocess.TimeoutExpired("sinfo", 60)

    monkeypatch.setattr(commands.subprocess, "run", fail)
    assert nodes.read_cluster_nodes() == []
