"""Rules on parameter servers: their counts must agree with the workers and with the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratbench.analysis.audit.checks import ROUNDING, Facts, unless, unless_rising
from stratbench.analysis.audit.relations import relations, unless_hold
from stratbench.analysis.audit.rule import record_rule
from stratbench.strategies import REGISTRY, strategy_class

#: The share by which shards may exceed the model: they are padded, and hold the float buffers too.
PADDING = 0.1
#: The number of batches from which a worker counts as busy, and the share that its pushes at least have of
#: the staleness that busy workers cannot avoid: (N - 1) x UNAVOIDABLE updates on average.
BUSY, UNAVOIDABLE = 50, 0.25

# What follows from what; the rule below says which holds when.
SERVERS = relations("len(server.servers) == strategy.options.servers")
SERVER = relations(
    "server.server == its_place",
    "server.n_servers == strategy.options.servers",
    "server.policy == policy_of_strategy",
)
TICKETS = relations(
    "batch.samples_seen == (server.tickets_settled - after_the_end) * batch.samples_per_step"
)
TICKETS_OF_WORKERS = relations("server.tickets_settled == sum_of_tickets")
TICKETS_OF_WORKER = relations("worker.steps == link.tickets", "link.skips <= link.tickets")
# Of an elastic run, in which a worker that goes may have taken a step that settled no ticket.
ALL_TICKETS = relations(
    "server.tickets_settled * batch.samples_per_step == steps_run * batch.global_batch"
)
ONCE = relations("server.tickets_settled == pushes + dropped")
TICKETS_OF_ELASTIC = relations("link.tickets <= worker.steps", "link.skips <= link.tickets")
# Shards are padded, and the last one may be almost empty.
SHARDS = relations(
    "elements_of_shards >= model.trainable_parameters",
    f"all_elements_but_one_shards <= {1 + PADDING} * model.trainable_parameters + 4096",
    f"elements_of_shards <= {1 + PADDING} * model.trainable_parameters + 4096 if n_shards == 1",
)
SHARD = relations(
    "pushes == tickets - skips - dropped if tickets and not lost and not reassigned and not elastic",
    "updates <= pushes",
    "highest_staleness <= updates",
    # An update makes every batch in progress older by one, and a worker has one at a time.
    "sum_of_staleness <= updates * cell.gpus",
    (
        "updates == steps_run * strategy.traits.updates_per_step "
        "if status == 'ok' and not skips and not lost and not ended_early",
        ROUNDING,
        1.0,
    ),
)
TOTALS = relations(
    "batch.updates_applied == most_updates_of_a_shard",
    ("batch.samples_applied == mean_pushes_of_a_shard * batch.samples_per_step", ROUNDING, 1.0),
)
TIMES = relations(
    "epochs_of_server == epochs_asked_for if status == 'ok'",
    ("last_end_s <= server.train_time_s", 0.01),
    ("last_end_s >= server.train_time_s", 0.05),
    "server.apply_s <= cell.gpus * server.train_time_s",
)
EPOCH_END = relations("end_s == score.train_time_s")
# A worker also waits from the last update until it hears of it, which its own time includes.
WAITED = relations(("link.wait_s <= train_time_s_of_worker", 0.1))


@record_rule("contradictory-server", "unusable", "all")
def contradictory_server(facts: Facts) -> Iterator[str]:
    """What the parameter servers counted does not agree in itself, with the workers, or with the policy:
    tickets, pushes, updates, staleness, waits.
    """
    if not facts.servers:
        return
    yield from unless_hold(facts, SERVERS)
    yield from faults_of_tickets(facts)
    yield from faults_of_shards(facts)
    strategy = facts("strategy.name")
    policy = strategy_class(strategy).policy if strategy in REGISTRY else None
    for i, server in enumerate(facts.servers):
        name = f"server {i}"
        yield from unless_hold(
            facts, SERVER, name, server=server, its_place=i, policy_of_strategy=policy
        )
        if facts.status == "ok" and server.get("status") not in (None, "ok"):
            yield f"{name} ended as {server['status']}, although the cell ended well"
        yield from faults_of_pushes(facts, server, name)
        yield from faults_of_times(facts, server, name)


def faults_of_tickets(facts: Facts) -> Iterator[str]:
    """Checks the batches handed out, settled, and done by the workers."""
    first = facts.servers[0]
    after = (first.get("elastic") or {}).get("after_the_end", 0)
    yield from unless_hold(facts, TICKETS, server=first, after_the_end=after)
    if facts.elastic:
        yield from _faults_of_elastic_tickets(facts)
        return
    if facts.lost or first.get("reassigned"):
        return
    links = {link["worker"]: link for link in first["workers"]}
    tickets = [link["tickets"] for link in links.values() if "tickets" in link]
    if tickets:
        yield from unless_hold(facts, TICKETS_OF_WORKERS, server=first, sum_of_tickets=sum(tickets))
    for worker in facts.workers:
        link = links.get(worker["rank"])
        if link is None:
            yield f"rank {worker['rank']} is unknown to its server"
        elif "tickets" in link:
            of = f"rank {worker['rank']}"
            yield from unless_hold(facts, TICKETS_OF_WORKER, of, worker=worker, link=link)


def _faults_of_elastic_tickets(facts: Facts) -> Iterator[str]:
    """Checks that every ticket was settled once, whoever came and went, in all lives of the servers."""
    first = facts.servers[0]
    own = first.get("elastic") or {}
    links = {link["worker"]: link for link in first["workers"]}
    if not facts.lost and not first.get("reassigned") and "settled_before" in own:
        done = own["settled_before"] + sum(link["tickets"] for link in links.values())
        yield from unless_hold(facts, TICKETS_OF_WORKERS, server=first, sum_of_tickets=done)
    if facts.status == "ok" and not facts.ended_early:
        yield from unless_hold(facts, ALL_TICKETS, server=first)
        skips = sum(link.get("skips") or 0 for link in links.values())
        for i, server in enumerate(facts.servers):
            for k, (count, late) in enumerate(
                zip(server["staleness"], server["dropped"], strict=True)
            ):
                of = f"shard {k} of server {i}"
                figures = {"pushes": sum(count), "dropped": late, "server": first}
                yield from unless_hold(facts, () if skips else ONCE, of, **figures)
    for worker in facts.workers:
        link = links.get(worker["rank"])
        if link is not None:  # else it was there in an earlier life of the servers
            of = f"rank {worker['rank']}"
            yield from unless_hold(facts, TICKETS_OF_ELASTIC, of, worker=worker, link=link)


def faults_of_shards(facts: Facts) -> Iterator[str]:
    """Checks that the shards of all servers hold what is trained of the model."""
    shards = [(s.get("shard_numel"), len(s.get("updates") or ())) for s in facts.servers]
    if any(numel is None for numel, _ in shards):
        return
    numel, total = shards[0][0], sum(n for _, n in shards)
    named = {
        "elements_of_shards": sum(numel * n for numel, n in shards),
        "all_elements_but_one_shards": numel * (total - 1),
        "n_shards": total,
    }
    yield from unless_hold(facts, SHARDS, **named)


def faults_of_pushes(facts: Facts, server: dict[str, Any], name: str) -> Iterator[str]:
    """Checks pushes, staleness and updates of each shard."""
    counts, updates = server.get("staleness"), server.get("updates")
    total = server.get("staleness_all_shards")
    if counts is not None and total is not None:
        width = max((len(c) for c in counts), default=0)
        summed = [sum(c[i] if i < len(c) else 0 for c in counts) for i in range(width)]
        if without_trailing_zeros(summed) != without_trailing_zeros(total):
            yield f"staleness_all_shards of {name} is {total}, but its shards make {summed}"
    waiting = facts.gpus == 1 or facts.averages_all
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
    for i, (count, made, late) in enumerate(zip(counts, updates, dropped, strict=True)):
        shard, pushes = f"shard {i} of {name}", sum(count)
        if None in (made, late):
            yield f"{shard} counted {made} updates, {late} dropped pushes"
            continue
        figures = {
            "pushes": pushes, "tickets": tickets, "skips": skips, "dropped": late, "updates": made,
            "highest_staleness": len(without_trailing_zeros(count)) - 1,
            "sum_of_staleness": sum(age * n for age, n in enumerate(count)),
            "reassigned": server.get("reassigned"),
        }  # fmt: skip
        yield from unless_hold(facts, SHARD, shard, **figures)
        busy = sum((link.get("tickets") or 0) >= BUSY for link in server["workers"])
        # Stale pushes may have been dropped; who takes over from a lost one begins anew.
        lossless = not late and not facts.lost and not server.get("reassigned")
        lossless = lossless and not facts.elastic  # where not all are there all the time
        if made == pushes and not waiting and lossless:
            # Each update makes the N - 1 batches in progress older by one, so that the mean is N - 1 where
            # each worker always has one; where all of them wait for all, half of that.
            yield from unless(
                f"the mean staleness of pushes to {shard}",
                figures["sum_of_staleness"] / max(1, pushes),
                ">=",
                f"what {busy} busy workers cannot avoid",
                UNAVOIDABLE * max(0, busy - 1),
            )
    if facts.ended_early:
        return
    shards = [sum(c) for s in facts.servers for c in s["staleness"]]
    yield from unless_hold(
        facts,
        TOTALS,
        most_updates_of_a_shard=max(n for s in facts.servers for n in s["updates"]),
        mean_pushes_of_a_shard=sum(shards) / len(shards),
    )


def faults_of_times(facts: Facts, server: dict[str, Any], name: str) -> Iterator[str]:
    """Checks that epochs, waits and work of a server lie within its training time."""
    train_time_s = server.get("train_time_s")
    epochs = server.get("epochs") or ()
    if facts.ended_early:
        return  # the others trained on while one evaluated the epoch that ended it
    ends = [e["end_s"] for e in epochs]
    yield from unless_rising(f"end_s of {name}", ends)
    yield from unless_hold(
        facts,
        TIMES,
        name,
        server=server,
        epochs_of_server=[e["epoch"] for e in epochs],
        epochs_asked_for=list(range(facts.passes_run)),
        last_end_s=ends[-1] if ends else None,
    )
    if name == "server 0" and facts.finished and len(ends) == len(facts("time.epoch_times_s")):
        for i, (end, entry) in enumerate(zip(ends, facts("score.per_epoch"), strict=False), 1):
            yield from unless_hold(facts, EPOCH_END, f"epoch {i}", end_s=end, score=entry)
    if train_time_s is None:
        return
    own = {w["rank"]: w.get("train_time_s") for w in facts.workers}
    for link in server["workers"]:
        # Of a worker that is not known or, in an elastic cell, came too late for a batch: the servers' time.
        its_time_s = own.get(link["worker"]) or train_time_s
        of = f"worker {link['worker']} at {name}"
        yield from unless_hold(facts, WAITED, of, link=link, train_time_s_of_worker=its_time_s)


def without_trailing_zeros(counts: list[int]) -> list[int]:
    """A histogram without its trailing zeros."""
    last = max((i for i, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]
