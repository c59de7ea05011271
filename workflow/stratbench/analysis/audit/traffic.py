"""Rules on communication: bytes and waits that are impossible or contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from stratbench.analysis.audit.checks import Facts, unless
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import Case, Evidence, record_rule, rule
from stratbench.strategies import REGISTRY
from stratbench.strategies.ps import node_by_placement

#: More bytes per second than hardware can move. Collectives: what one GPU sends over NVLink 5. Servers:
#: all traffic of one server node; the node's memory moves a multiple of it.
MOST_BYTES_PER_S = {"collective": 900e9, "server": 200e9}
#: Shards are padded to a multiple of the workers, which matters in small layers.
RING_PADDING = 1.3
#: Reads of a server's weights by each worker before its first step, and after its last.
FIRST_READS = 4

# What follows from what; the rule below says which holds when.
ON_ONE_NODE = relations(
    "communication.local_bytes_per_step == "
    "communication.sent_bytes_per_step + communication.received_bytes_per_step",
    "communication.busiest_link_bytes_per_batch == 0",
)
TRAFFIC = relations(
    "communication.sent_bytes_per_step == communication.received_bytes_per_step "
    "if communication.method == 'ring'",
    # One worker alone has nobody to send to.
    "communication.sent_bytes_per_step <= 0 if communication.method == 'ring' and gpus == 1",
    "communication.implied_bytes_per_s == "
    "max(communication.sent_bytes_per_step, communication.received_bytes_per_step) "
    "* mean(workers.steps) / time.train_time_s if finished",
    "communication.busiest_server_bytes_per_s == bytes_of_busiest_server / time.train_time_s",
    # The mean of differences cut at 0 is at least the difference of the means over workers.
    "communication.exposed_ms >= communication.total_ms - communication.overlapped_ms",
    "communication.exposed_ms <= communication.total_ms",
    "communication.overlapped_ms <= communication.total_ms",
    "communication.total_ms <= time.step_ms.max",
    "communication.server_wait_ms <= time.step_ms.max",
    "communication.timed_steps <= most_steps_of_a_worker",
)


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


@record_rule("contradictory-traffic", "unusable", "time")
def contradictory_traffic(facts: Facts) -> Iterator[str]:
    """Bytes and waits of communication do not agree with each other, with the model's size, or with what the
    strategy says that it sends.
    """
    if not facts("communication"):
        # A strategy need not state what it sends; one that does is checked against it.
        known = facts("strategy.traits.ring_copies") is not None or facts.servers
        if facts.status == "ok" and known and not facts.elastic:  # it depends on who was there
            yield "communication is absent, although the cell ended well"
        return
    sent, received = (facts(f"communication.{way}_bytes_per_step") for way in ("sent", "received"))
    steps = [worker["steps"] for worker in facts.workers]
    moved = [
        sum(link["bytes_in"] + link["bytes_out"] for link in server["workers"])
        for server in facts.servers
        if facts.finished and None not in steps
    ]
    yield from unless_hold(
        facts,
        TRAFFIC,
        bytes_of_busiest_server=max(moved, default=None),
        most_steps_of_a_worker=max(filter(None, steps), default=None),
    )
    if facts("communication.method") == "ring":
        yield from faults_of_rings(facts, sent)
    if facts.servers and facts.whole:
        yield from faults_of_servers(facts, sent, received)


def faults_of_rings(facts: Facts, sent: float) -> Iterator[str]:
    """Checks collectives: as many copies of the parameters as the strategy states, and the buffers."""
    share = (facts.gpus - 1) / facts.gpus
    copies, size = facts("strategy.traits.ring_copies"), facts.trainable_bytes
    buffers = facts("memory.model_states.buffers_bytes") or 0
    yield from unless(
        "communication.total_ms",
        facts("communication.total_ms"),
        ">=",
        "what is sent takes over the fastest link",
        # Buffers are broadcast beside what is timed.
        1e3 * max(0.0, sent - buffers) / MOST_BYTES_PER_S["collective"],
    )
    if copies is None or size is None or not share:
        return
    shards = copies and facts("strategy.traits.shards_states")
    # All parameters are gathered; of those that are trained, gradients are reduced.
    gathered = share * (facts.parameter_bytes if shards else size)
    whole = (copies - 1) * gathered + share * size if shards else share * copies * size
    least = whole
    in_16_bits = facts("settings.precision") in ("fp16", "bf16")
    # By policy parameters are gathered so; gradients are reduced in their own format.
    if shards and in_16_bits and facts("strategy.options.mixed_precision") == "policy":
        least -= (copies - 1) * max(0.0, gathered - 2 * share * facts("model.parameters"))
    what = f"{copies:g} copies x (W - 1) / W of the parameters"
    yield from unless("communication.sent_bytes_per_step", sent, ">=", what, least, 0.01)
    # The strategy states the least that it sends; a sharded one may gather once more for backward, and
    # gather twice and reduce for each part of a batch; one that divides gradients alone may reduce each.
    parts, more = facts("settings.accumulate") or 1, 0.0
    if shards:
        more = (3 * parts - 2) * gathered
    elif facts("strategy.traits.weight_parts") is None:
        more = 2 * (parts - 1) * gathered
    # A training ends with an exchange, even if the next one is not due yet.
    last = 2 * share * size / max(1, facts.steps_run)
    yield from unless(
        "communication.sent_bytes_per_step",
        sent,
        "<=",
        f"{what} and the buffers, padded,",
        RING_PADDING * (whole + more + last) + 4 * buffers + 4096,
    )


def faults_of_servers(facts: Facts, sent: float, received: float) -> Iterator[str]:
    """Checks servers: at most what is trained each way, and as many bytes as they counted."""
    size, buffers = facts.trainable_bytes, facts("memory.model_states.buffers_bytes") or 0
    steps = sum(worker["steps"] for worker in facts.workers)
    if size is None or not steps:
        return
    done = (steps - facts.skips) / steps
    pushed = 0.5 if facts("strategy.options.wire") == "bfloat16" else 1.0
    for way, each, least in (("sent", sent, pushed * done), ("received", received, 0.9)):
        what = f"communication.{way}_bytes_per_step"
        yield from unless(
            what, each, "<=", "the parameters and buffers, framed,", 1.1 * (size + buffers) + 65536
        )
        yield from unless(what, each, ">=", "what the parameters need", least * size, 0.02)
    links = [link for server in facts.servers for link in server["workers"]]
    # The servers' sums include warm-up exchanges and first reads.
    extra = facts.gpus * ((facts("settings.warmup_steps") or 0) + FIRST_READS)
    for way, each, other_way in (("bytes_in", sent, "sent"), ("bytes_out", received, "received")):
        moved, of_step = sum(link[way] for link in links), f"{other_way}_bytes_per_step"
        what, most = f"{way} of all servers", (steps + extra) * max(each, size)
        yield from unless(what, moved, ">=", f"steps x {of_step}", steps * each, 0.01)
        yield from unless(what, moved, "<=", f"(steps and warm-up) x {of_step}", most, 0.01)
    yield from faults_of_links(facts, sent, received, extra)


def faults_of_links(facts: Facts, sent: float, received: float, extra: int) -> Iterator[str]:
    """Checks the bytes within nodes and across links: the workers' counts against the servers'.

    `extra`: exchanges of all workers that only the servers counted.
    """
    local = facts("communication.local_bytes_per_step")
    busiest = facts("communication.busiest_link_bytes_per_batch")
    nodes = facts("provenance.nodes")
    if None in (local, busiest, nodes):
        return
    both, steps = sent + received, sum(worker["steps"] for worker in facts.workers)
    whats = ("communication.local_bytes_per_step", "communication.busiest_link_bytes_per_batch")
    if facts("strategy.name") not in REGISTRY:
        return
    if nodes == 1:
        yield from unless_hold(facts, ON_ONE_NODE)
        return
    counted_local, counted_busiest = counted_by_servers(facts, nodes)
    for what, each, times, counted, of_one in (
        (whats[0], local, steps, counted_local, both),
        (whats[1], busiest, steps / facts.gpus, counted_busiest, max(sent, received)),
    ):
        what, total, least = f"{what}, summed up,", each * times, counted - extra * of_one
        yield from unless(what, total, "<=", "the servers'", counted, 0.01)
        yield from unless(what, total, ">=", "the servers'", least, 0.01)


def counted_by_servers(facts: Facts, nodes: int) -> tuple[int, int]:
    """Bytes within nodes, and over the busiest link to other nodes (one way), as the servers counted."""
    stated = facts("strategy.options")
    out, back, local = [0] * nodes, [0] * nodes, 0
    for k, server in enumerate(facts.servers):
        here = node_by_placement(stated["placement"], k, facts.gpus, nodes)
        for link in server["workers"]:
            there = facts.node_of(link["worker"])
            pushed, pulled = link["bytes_in"], link["bytes_out"]
            if here == there:
                local += pushed + pulled
                continue
            for node, gone, come in ((there, pushed, pulled), (here, pulled, pushed)):
                out[node] += gone
                back[node] += come
    return local, max(*out, *back)
