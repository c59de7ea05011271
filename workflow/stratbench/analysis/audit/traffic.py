"""The rule on communication: more bytes than hardware can move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.audit.rule import Case, Evidence, rule

#: More bytes per second than hardware can move. Collectives: what one GPU sends over NVLink 5. Servers:
#: all traffic of one server node; the node's memory moves a multiple of it.
MOST_BYTES_PER_S = {"collective": 900e9, "server": 200e9}


@rule("bandwidth-impossible", "unusable", "all")
def bandwidth_impossible(evidence: Evidence) -> Iterator[Case]:
    """The parameters that this strategy has to move in this time exceed what hardware moves, so it did not
    move them at every step.
    """
    for row in evidence.rows:
        implied = implied_bytes_per_s(row)
        most = MOST_BYTES_PER_S.get(row.strategy_kind, float("inf"))
        if implied and implied > most:
            yield row, f"{implied / 1e9:.0f} GB/s implied, {most / 1e9:.0f} thought possible"


def implied_bytes_per_s(row: Any) -> float | None:
    """The traffic that a cell's training implies, in bytes per second: what it counted, or the least.

    For collectives, of one rank; for servers, of the busiest one. The least is used if it is more than
    the count, and for records without a count, such as the paper's.
    """
    is_served = row.strategy_kind == "server"
    counted = getattr(row, "busiest_server_bytes_per_s" if is_served else "implied_bytes_per_s")
    known = [v for v in (counted, least_bytes_per_s(row)) if v is not None and not pd.isna(v)]
    return max(known, default=None)


def least_bytes_per_s(row: Any) -> float | None:
    """The least traffic that a cell's training needs, in bytes per second.

    For collectives, what one rank sends: (W-1)/W of each of the strategy's copies of the parameters
    that are trained. For servers, an equal share of all workers' traffic: the gradients in and the
    parameters out for every batch. A parameter has two bytes in mixed precision, else four.
    """
    trained = row.trainable_parameters
    if pd.isna(trained):
        trained = row.model_parameters
    needed = (trained, row.samples_seen, row.global_batch, row.train_time_s)
    if any(pd.isna(value) for value in needed) or not row.train_time_s:
        return None
    width = 2 if row.precision in ("fp16", "bf16") else 4
    one_copy = trained * width * row.samples_seen / row.global_batch
    if row.strategy_kind == "server":
        servers = 1 if pd.isna(row.servers) else row.servers
        return float(2 * row.gpus * one_copy / servers / row.train_time_s)
    copies = 0 if pd.isna(row.ring_copies) else row.ring_copies
    return float(copies * (row.gpus - 1) / row.gpus * one_copy / row.train_time_s)
