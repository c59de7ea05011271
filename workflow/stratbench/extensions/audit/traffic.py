"""Rules on communication: more bytes than hardware moves, and links that were hardly used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.records.derived import value_at
from stratbench.analysis.records.facts import Facts
from stratbench.extensions.audit.rule import AuditData, Case, record_rule, rule
from stratbench.telemetry.machine.hardware import datasheet_of

#: More bytes per second than hardware can move. Collectives: what one GPU sends over NVLink 5. Servers:
#: all traffic of one server node; the node's memory moves a multiple of it.
MAX_BYTES_PER_S = {"collective": 900e9, "server": 200e9}
#: NVLinks that carry less than this share of their datasheet's rate were not used. NVLink 3 has 300 GB/s in
#: one direction, PCIe 4.0 with 16 lanes 32, and 100 Gbit/s Ethernet 12.5.
USED_LINK = 0.1
#: From so many bytes on, the latency of a few all-reduces is less than their time over NVLinks.
LONG_BYTES = 32 * 2**20
#: The share of a step from which its wait for communication shows that this is no part of backward.
EXPOSED = 0.1


@rule("bandwidth-impossible", "unusable", "all")
def bandwidth_impossible(evidence: AuditData) -> Iterator[Case]:
    """The parameters that this strategy has to move in this time exceed what hardware moves, so it did not
    move them at every step.
    """
    for row in evidence.rows:
        implied = implied_bytes_per_s(row)
        maximum = MAX_BYTES_PER_S.get(row.strategy_kind, float("inf"))
        if implied and implied > maximum:
            yield row, f"{implied / 1e9:.0f} GB/s implied, {maximum / 1e9:.0f} thought possible"


def implied_bytes_per_s(row: Any) -> float | None:
    """Return the traffic that a cell's training implies, in bytes per second.

    For collectives it is that of one rank, for servers that of the busiest one. The minimum is used if it is
    more than the recorded count, and for records without a count, such as the paper's.
    """
    is_served = row.strategy_kind == "server"
    counted = getattr(row, "busiest_server_bytes_per_s" if is_served else "implied_bytes_per_s")
    known = [v for v in (counted, least_bytes_per_s(row)) if v is not None and not pd.isna(v)]
    return max(known, default=None)


def least_bytes_per_s(row: Any) -> float | None:
    """Return the least traffic that a cell's training needs, in bytes per second.

    For collectives, what one rank sends: (W-1)/W of each of the strategy's copies of the parameters
    that are trained. For servers, an equal share of all workers' traffic: the gradients in and the
    parameters out for every batch. A parameter has two bytes in 16 bits, else four.
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
def nvlink_unused(facts: Facts) -> Iterator[str]:
    """GPUs with active NVLinks exchanged gradients far slower than these carry, and each step waited for it:
    NCCL used sockets or the host's memory. See NCCL_DEBUG=INFO, NCCL_P2P_DISABLE and the size of /dev/shm.
    """
    sent, total_ms, exposed_ms = (
        facts(f"communication.{name}") for name in ("sent_bytes_per_step", "total_ms", "exposed_ms")
    )
    step_ms = facts("time.step_ms.mean")
    gpus = [value_at(worker["provenance"], "gpu") or {} for worker in facts.workers]
    if not total_ms or not step_ms or facts("provenance.nodes") != 1 or facts("settings.slowdown"):
        return
    sheets = [datasheet_of(gpu.get("name") or "") for gpu in gpus]
    links = min((gpu.get("nvlinks_active") or 0 for gpu in gpus), default=0)
    if not links or any(sheet is None or not sheet.link.startswith("NVLink") for sheet in sheets):
        return
    most, gb_per_s = min(sheet.link_gb_per_s for sheet in sheets), sent / total_ms / 1e6
    if sent > LONG_BYTES and exposed_ms > EXPOSED * step_ms and gb_per_s < USED_LINK * most:
        yield (
            f"{gb_per_s:.3g} GB/s sent over {links} active links, which carry {most:.3g} GB/s; "
            f"{exposed_ms:.3g} ms of a step of {step_ms:.3g} ms waited for it"
        )
