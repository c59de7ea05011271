"""Rules of the audit on communication: impossible bandwidths, and links that were hardly used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.analysis.records.facts import Facts
from stratbench.extensions.audit.rule import AuditData, Case, record_rule, rule
from stratbench.telemetry.machine.hardware import find_datasheet

#: Largest possible bytes per second, by kind of strategy. For collectives it is what one GPU sends over
#: NVLink 5, for servers the traffic of one server node.
MAX_BYTES_PER_S = {"collective": 900e9, "server": 200e9}
#: An NVLink counts as used from this share of its datasheet's rate. PCIe and Ethernet hardly reach the share.
MIN_USED_LINK_SHARE = 0.1
#: Bytes sent per step above which the latency of all-reduces over NVLinks is negligible.
MIN_SENT_BYTES = 32 * 2**20
#: Share of exposed communication in a step above which the links are the bottleneck.
MIN_EXPOSED_SHARE = 0.1


@rule("bandwidth-impossible", "unusable", "all")
def find_impossible_bandwidth(evidence: AuditData) -> Iterator[Case]:
    """The training was faster than any hardware can move the strategy's traffic. So the strategy cannot have
    communicated in every step.
    """
    for row in evidence.finished_rows:
        implied = compute_traffic_bytes_per_s(row)
        maximum = MAX_BYTES_PER_S.get(row.strategy_kind, float("inf"))
        if implied and implied > maximum:
            yield (
                row,
                f"{implied / 1e9:.0f} GB/s needed, but at most {maximum / 1e9:.0f} GB/s are possible",
            )


def compute_traffic_bytes_per_s(row: Any) -> float | None:
    """Return the bytes per second that a cell's training needed to move.

    For collectives it is the traffic of one rank, for servers that of the busiest server. The least possible
    traffic is used if it exceeds the recorded count, and for records without a count.
    """
    is_served = row.strategy_kind == "server"
    counted = getattr(row, "busiest_server_bytes_per_s" if is_served else "implied_bytes_per_s")
    known = [
        v
        for v in (counted, compute_min_traffic_bytes_per_s(row))
        if v is not None and not pd.isna(v)
    ]
    return max(known, default=None)


def compute_min_traffic_bytes_per_s(row: Any) -> float | None:
    """Return the minimum bytes per second that a cell's training must move.

    For collectives it is what one rank sends: (W-1)/W of the trained parameters, times the copies that the
    strategy sends. For servers it is an equal share of all workers' traffic: gradients in and parameters out
    per batch. A parameter has two bytes in 16-bit precisions, else four.
    """
    trained = row.trainable_parameters
    if pd.isna(trained):
        trained = row.model_parameters
    needed = (trained, row.samples_seen, row.global_batch, row.train_time_s)
    if any(pd.isna(value) for value in needed) or not row.train_time_s:
        return None
    width = 2 if row.precision in ("fp16", "bf16", "bf16-true") else 4
    one_copy = trained * width * row.samples_seen / row.global_batch
    if row.strategy_kind == "server":
        servers = 1 if pd.isna(row.servers) else row.servers
        return float(2 * row.gpus * one_copy / servers / row.train_time_s)
    copies = 0 if pd.isna(row.ring_copies) else row.ring_copies
    return float(copies * (row.gpus - 1) / row.gpus * one_copy / row.train_time_s)


@record_rule("nvlink-unused", "warning", "time")
def find_unused_nvlink(facts: Facts) -> Iterator[str]:
    """GPUs with active NVLinks exchanged gradients far slower than NVLinks can, and steps waited for that:
    NCCL used sockets or the host's memory. Check NCCL_DEBUG=INFO, NCCL_P2P_DISABLE and the size of /dev/shm.
    """
    sent, total_ms, exposed_ms = (
        facts(f"communication.{name}") for name in ("sent_bytes_per_step", "total_ms", "exposed_ms")
    )
    step_ms = facts("time.step_ms.mean")
    gpus = [get_field_by_path(worker["provenance"], "gpu") or {} for worker in facts.workers]
    if not total_ms or not step_ms or facts("provenance.nodes") != 1 or facts("settings.slowdown"):
        return
    sheets = [find_datasheet(gpu.get("name") or "") for gpu in gpus]
    links = min((gpu.get("nvlinks_active") or 0 for gpu in gpus), default=0)
    if not links or any(sheet is None or not sheet.link.startswith("NVLink") for sheet in sheets):
        return
    most, gb_per_s = min(sheet.link_gb_per_s for sheet in sheets), sent / total_ms / 1e6
    if (
        sent > MIN_SENT_BYTES
        and exposed_ms > MIN_EXPOSED_SHARE * step_ms
        and gb_per_s < MIN_USED_LINK_SHARE * most
    ):
        yield (
            f"{gb_per_s:.3g} GB/s sent over {links} active links, which carry {most:.3g} GB/s; "
            f"{exposed_ms:.3g} ms of a step of {step_ms:.3g} ms waited for it"
        )
