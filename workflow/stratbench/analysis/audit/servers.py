"""Rules on parameter servers: their counts must agree with the workers and with the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratbench.analysis.audit.checks import (
    Facts,
    unless_at_least,
    unless_at_most,
    unless_equal,
    unless_rising,
    unless_same,
)
from stratbench.analysis.audit.rule import record_rule
from stratbench.strategies import REGISTRY, strategy_class

#: The share by which shards may exceed the model: they are padded, and hold the float buffers too.
PADDING = 0.1
#: The number of batches from which a worker counts as busy, and the share that its pushes at least have of
#: the staleness that busy workers cannot avoid: (N - 1) x UNAVOIDABLE updates on average.
BUSY, UNAVOIDABLE = 50, 0.25


@record_rule(
    "contradictory-server",
    "unusable",
    "all",
    "What the parameter servers counted does not agree in itself, with the workers, or with the "
    "policy: tickets, pushes, updates, staleness, waits.",
)
def contradictory_server(facts: Facts) -> Iterator[str]:
    if not facts.servers:
        return
    asked = facts("strategy.options.servers")
    yield from unless_equal("the number of servers", len(facts.servers), "the option's", asked)
    yield from faults_of_tickets(facts)
    yield from faults_of_shards(facts)
    strategy = facts("strategy.name")
    policy = strategy_class(strategy).policy if strategy in REGISTRY else None
    for i, server in enumerate(facts.servers):
        name = f"server {i}"
        yield from unless_same(f"the number of {name}", server.get("server"), "by its place it", i)
        yield from unless_equal(
            f"n_servers of {name}", server.get("n_servers"), "the option's", asked
        )
        yield from unless_same(f"policy of {name}", server.get("policy"), "the strategy's", policy)
        if facts.status == "ok" and server.get("status") not in (None, "ok"):
            yield f"{name} ended as {server['status']}, although the cell ended well"
        yield from faults_of_pushes(facts, server, name)
        yield from faults_of_times(facts, server, name)


def faults_of_tickets(facts: Facts) -> Iterator[str]:
    """Checks the batches handed out, settled, and done by the workers."""
    first = facts.servers[0]
    settled, per_step = first.get("tickets_settled"), facts("batch.samples_per_step")
    if settled is not None and per_step is not None:
        yield from unless_equal(
            "batch.samples_seen",
            facts("batch.samples_seen"),
            "tickets_settled x samples_per_step",
            settled * per_step,
        )
    if facts.lost or first.get("reassigned"):
        return
    links = {link["worker"]: link for link in first["workers"]}
    tickets = [link["tickets"] for link in links.values() if "tickets" in link]
    if settled is not None and tickets:
        yield from unless_equal(
            "tickets_settled", settled, "the sum of the workers' tickets", sum(tickets)
        )
    for worker in facts.workers:
        link = links.get(worker["rank"])
        if link is None:
            yield f"rank {worker['rank']} is unknown to its server"
        elif "tickets" in link:
            yield from unless_equal(
                f"steps of rank {worker['rank']}",
                worker["steps"],
                "the tickets that its server counted",
                link["tickets"],
            )
            yield from unless_at_most(
                f"skips of rank {worker['rank']}", link.get("skips"), "its tickets", link["tickets"]
            )


def faults_of_shards(facts: Facts) -> Iterator[str]:
    """Checks that the shards of all servers hold what is trained of the model."""
    shards = [(s.get("shard_numel"), len(s.get("updates") or ())) for s in facts.servers]
    size, name = facts.trainable, "the model's trainable parameters"
    if size is None or any(numel is None for numel, _ in shards):
        return
    held = sum(numel * n for numel, n in shards)
    yield from unless_at_least("the elements of all shards", held, name, size)
    numel, total = shards[0][0], sum(n for _, n in shards)
    # The last shard may be almost empty.
    yield from unless_at_most(
        "the elements of all shards but one",
        numel * (total - 1),
        f"{name}, padded",
        size * (1 + PADDING) + 4096,
    )
    if total == 1:
        yield from unless_at_most(
            "the elements of the shard",
            held,
            f"{name}, padded",
            size * (1 + PADDING) + 4096,
        )


def faults_of_pushes(facts: Facts, server: dict[str, Any], name: str) -> Iterator[str]:
    """Checks pushes, staleness and updates of each shard."""
    counts, updates = server.get("staleness"), server.get("updates")
    total = server.get("staleness_all_shards")
    if counts is not None and total is not None:
        width = max((len(c) for c in counts), default=0)
        summed = [sum(c[i] if i < len(c) else 0 for c in counts) for i in range(width)]
        if without_trailing_zeros(summed) != without_trailing_zeros(total):
            yield f"staleness_all_shards of {name} is {total}, but its shards make {summed}"
    waiting = facts.gpus == 1 or facts("strategy.traits.equals_ddp")
    if total is not None and waiting and len(without_trailing_zeros(total)) > 1:
        why = "one worker" if facts.gpus == 1 else "every update is made of all workers' pushes"
        yield f"staleness of {name} is {total}, although nothing can be stale: {why}"
    if counts is None or updates is None:
        return
    dropped = server.get("dropped") or [0] * len(updates)
    if not len(counts) == len(updates) == len(dropped):
        yield f"{name} has {len(updates)} shards' updates, {len(counts)} staleness, {len(dropped)} dropped"
        return
    skips = sum(link.get("skips") or 0 for link in server["workers"])
    tickets = sum(link.get("tickets") or 0 for link in server["workers"])
    per_step = facts("strategy.traits.updates_per_step")
    steps = facts.steps_run
    for i, (count, made, late) in enumerate(zip(counts, updates, dropped, strict=True)):
        shard, pushes = f"shard {i} of {name}", sum(count)
        if tickets and not facts.lost and not server.get("reassigned"):
            yield from unless_equal(
                f"pushes by staleness of {shard}",
                pushes,
                "tickets - skips - dropped",
                tickets - skips - late,
            )
        yield from unless_at_most(f"updates of {shard}", made, "the pushes that made them", pushes)
        yield from unless_at_most(
            f"staleness of {shard}", len(without_trailing_zeros(count)) - 1, "its updates", made
        )
        # An update makes every batch in progress older by one, and a worker has one at a time.
        yield from unless_at_most(
            f"the staleness of all pushes to {shard}",
            sum(age * n for age, n in enumerate(count)),
            "its updates x workers",
            made * facts.gpus,
        )
        busy = sum((link.get("tickets") or 0) >= BUSY for link in server["workers"])
        # Stale pushes may have been dropped; who takes over from a lost one begins anew.
        lossless = not late and not facts.lost and not server.get("reassigned")
        if made == pushes and not waiting and lossless:
            # Each update makes the N - 1 batches in progress older by one, so that the mean is N - 1 where
            # each worker always has one; where all of them wait for all, half of that.
            yield from unless_at_least(
                f"the mean staleness of pushes to {shard}",
                sum(age * n for age, n in enumerate(count)) / max(1, pushes),
                f"what {busy} busy workers cannot avoid",
                UNAVOIDABLE * max(0, busy - 1),
            )
        if per_step is not None and not skips and not facts.lost and facts.status == "ok":
            yield from unless_equal(
                f"updates of {shard}",
                made,
                "steps x the strategy's updates_per_step",
                steps * per_step,
                absolute=1.0,
            )
    yield from unless_equal(
        "batch.updates_applied",
        facts("batch.updates_applied"),
        "the most updates of a shard",
        max(n for s in facts.servers for n in s["updates"]),
    )
    shards = [sum(c) for s in facts.servers for c in s["staleness"]]
    yield from unless_equal(
        "batch.samples_applied",
        facts("batch.samples_applied"),
        "the pushes that the shards took x samples_per_step",
        facts("batch.samples_per_step")
        and sum(shards) / len(shards) * facts("batch.samples_per_step"),
        absolute=1.0,
    )


def faults_of_times(facts: Facts, server: dict[str, Any], name: str) -> Iterator[str]:
    """Checks that epochs, waits and work of a server lie within its training time."""
    train_time_s = server.get("train_time_s")
    epochs = server.get("epochs") or ()
    if facts.status == "ok":
        yield from unless_same(
            f"epochs of {name}",
            [e["epoch"] for e in epochs],
            "what was asked for",
            list(range(facts.passes_run)),
        )
    ends = [e["end_s"] for e in epochs]
    yield from unless_rising(f"end_s of {name}", ends)
    if ends:
        yield from unless_at_most(
            f"the last end_s of {name}", ends[-1], "its train_time_s", train_time_s, 0.01
        )
        yield from unless_at_least(
            f"the last end_s of {name}", ends[-1], "its train_time_s", train_time_s, 0.05
        )
    if name == "server 0" and facts.finished and len(ends) == len(facts("time.epoch_times_s")):
        for i, (end, entry) in enumerate(zip(ends, facts("score.per_epoch"), strict=False), 1):
            yield from unless_equal(
                f"end_s of epoch {i}",
                end,
                "score.per_epoch's train_time_s",
                entry["train_time_s"],
            )
    if train_time_s is None:
        return
    yield from unless_at_most(
        f"apply_s of {name}",
        server.get("apply_s"),
        "its workers x train_time_s",
        facts.gpus * train_time_s,
    )
    # A worker also waits from the last update until it hears of it, which its own time includes.
    own = {w["rank"]: w.get("train_time_s") for w in facts.workers}
    for link in server["workers"]:
        its_time_s = own.get(link["worker"])
        yield from unless_at_most(
            f"wait_s of worker {link['worker']} at {name}",
            link.get("wait_s"),
            "train_time_s" if its_time_s is None else "its own train_time_s",
            train_time_s if its_time_s is None else its_time_s,
            0.1,
        )


def without_trailing_zeros(counts: list[int]) -> list[int]:
    """A histogram without its trailing zeros."""
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]
