"""What servers add to a job's request, and the values of a config that they do not support."""

from __future__ import annotations

import pytest
import test_config
import test_job_requests

from stratbench.study.slurm import nodes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"strategies": ["ddp", "ps-preview"]},
            [
                "optimizer = 'sgd': it looks ahead by AdamW's step",
                "ps-dana, ps-ormo take it)",
                "remove ps-preview from strategies",
            ],
        ),
        (
            {"optimizer": "adamw", "strategies": ["ddp", "ps-dana"]},
            [
                "optimizer = 'adamw': its rule",
                "(ps-sync, ps-async, ps-ssp, ps-backup, ps-kbatch, ps-preview take it)",
                "remove ps-dana from strategies",
            ],
        ),
        (
            {"gradient_accumulation_steps": 2, "strategies": ["ps-sync"]},
            ["gradient_accumulation_steps = 2: a worker's flat"],
        ),
        (
            {"max_grad_norm": 1.0, "strategies": ["ddp", "ps-sync"]},
            ["max_grad_norm = 1.0: each server"],
        ),
        (
            {"optimizer_impl": "foreach", "strategies": ["ddp", "ps-sync"]},
            ["optimizer_impl = 'foreach': servers update", "remove ps-sync"],
        ),
    ],
)
def test_what_servers_do_not_support_is_refused(changes, expected):
    test_config.check_mistake(changes, expected)


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", (1, 0, 5, 5 * 2048)), ("auto", (1, 4, 36, 4 * 32768 + 16384))],
)
def test_a_server_has_its_own_cores_and_memory(device, expected):
    found = test_job_requests.request("ps-async", 4, device=device, strategies=["ps-async"])[2]
    assert (found.nodes, found.gpus, found.cpus, found.mem_mib) == expected


def test_a_node_too_small_for_the_server_is_told_with_the_keys():
    cell, settings, asked = test_job_requests.request(
        "ps-async",
        4,
        device="auto",
        cluster={"cpus_per_gpu": 4, "mem_mib_per_gpu": 1024},
        strategies=["ps-async"],
    )
    offered = nodes.parse_sinfo(test_job_requests.TESTS)
    sentence = nodes.explain_oversized_job(cell, settings, asked, offered)
    assert sentence is not None
    assert "20 CPU cores" in sentence
    assert "lower cluster.cpus_per_gpu or cluster.server_cpus" in sentence
