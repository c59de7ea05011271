"""Traffic that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.audit.rule import Found, Study, of, rule

#: More bytes a second than hardware moves. Collectives: what one GPU sends over NVLink 5. Servers: all
#: traffic of one server node, of which its memory moves a multiple.
MOST_BYTES_PER_S = {"collective": 900e9, "server": 200e9}


@rule(
    "bandwidth-impossible",
    "unusable",
    "all",
    "The parameters that this strategy has to move in this time exceed what hardware moves, so it "
    "did not move them at every step.",
)
def bandwidth_impossible(study: Study) -> Iterator[Found]:
    for row in study.ok.itertuples():
        implied = implied_bytes_per_s(row)
        most = MOST_BYTES_PER_S.get(row.strategy_kind, float("inf"))
        if implied and implied > most:
            yield Found(
                of(row), f"{implied / 1e9:.0f} GB/s implied, {most / 1e9:.0f} thought possible"
            )


def implied_bytes_per_s(row: Any) -> float | None:
    """The traffic that a cell's training implies, in bytes a second: what it counted, or the least.

    Collectives: of a rank; servers: of the busiest one. The least counts where it is more, and for
    records that count nothing, such as the paper's.
    """
    is_served = row.strategy_kind == "server"
    counted = getattr(row, "busiest_server_bytes_per_s" if is_served else "implied_bytes_per_s")
    known = [v for v in (counted, least_bytes_per_s(row)) if v is not None and not pd.isna(v)]
    return max(known, default=None)


def least_bytes_per_s(row: Any) -> float | None:
    """The least traffic that a cell's training needs, in bytes a second.

    Collectives, what one rank sends: a ring moves 2(W-1)/W of the parameters to all-reduce, 3(W-1)/W
    to gather twice and reduce-scatter. Servers, an equal share of all workers' traffic: the gradients
    in and the parameters out for every batch. Two bytes a parameter in mixed precision, else four.
    """
    needed = (row.model_parameters, row.samples_seen, row.global_batch, row.train_time_s)
    if any(pd.isna(value) for value in needed) or not row.train_time_s:
        return None
    width = 2 if row.precision in ("fp16", "bf16") else 4
    one_copy = row.model_parameters * width * row.samples_seen / row.global_batch
    if row.strategy_kind == "server":
        servers = 1 if pd.isna(row.servers) else row.servers
        return float(2 * row.gpus * one_copy / servers / row.train_time_s)
    share = (row.gpus - 1) / row.gpus
    return float(
        {"ddp": 2, "fsdp": 3}.get(row.strategy_base, 0) * share * one_copy / row.train_time_s
    )
