"""The verdict of a study as values for verdict.json: claims, intervals, drops, costs and noise."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stratbench.cell.files import finite
from stratbench.cell.text.words import counted, plural, worker_noun
from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS, MAX_OFF
from stratbench.extensions.verdict.blocks import VERDICT_VERSION, PairedBlock, with_seal
from stratbench.extensions.verdict.paired import checks, dependence, judging
from stratbench.extensions.verdict.paired.costs import Costs
from stratbench.extensions.verdict.paired.next_round import NextRound, decided
from stratbench.extensions.verdict.paired.noise import Noise, noise_of
from stratbench.extensions.verdict.paired.rounds import Course
from stratbench.extensions.verdict.paired.state import Drop, Judged, State
from stratbench.statistics.moderated import ROUGH

#: Above this bound, "at most so much slower than the fastest" is no useful claim.
MUCH = 1.0
#: Kinds of claims that name a fast strategy, with an interval.
CLAIMS = ("fastest", "within", "at most")


def verdict_of(analysis: Course, next_round: NextRound, notes: list[str]) -> dict[str, Any]:
    """Return the content of verdict.json.

    Args:
        analysis: The analysis.
        next_round: Its next round.
        notes: Notes on unused evidence.
    """
    costs = Costs(analysis)
    # In one order, so that sums have the same last digit whatever the order of files.
    blocks = [analysis.evidence.blocks[key] for key in sorted(analysis.evidence.blocks)]
    noise, margin = noise_of(blocks), analysis.evidence.margin
    rivals = max((len(s.comparison.strategies) - 1 for s in analysis.states), default=1)
    comparisons = [comparison_values(analysis, costs, state) for state in analysis.states]
    unusable = [f"{b['experiment']}, {b['model']} on {b['gpus']}: {b['unusable']}"
                for b in comparisons if b["unusable"]]  # fmt: skip
    matrix = [
        comparison["matrix_gpu_hours"]
        for comparison in comparisons
        if len(comparison["strategies"]) > 1
    ]
    return with_seal({
        "schema_version": VERDICT_VERSION,
        "study": analysis.evidence.study,
        "margin": margin,
        "rounds": analysis.round,
        "done": next_round.done,
        "reason": next_round.reason,
        "hours": "worker-hours" if any(b.device == "cpu" for b in blocks) else "GPU-hours",
        "spent_gpu_hours": next_round.spent_gpu_hours,
        "expected_gpu_hours": next_round.expected_gpu_hours,
        "budget_gpu_hours": analysis.evidence.budget_gpu_hours,
        "matrix_gpu_hours": None if None in matrix else sum(matrix),
        "matrix_repeats": MATRIX_REPEATS,
        "next": {
            "blocks": len(next_round.blocks),
            "full_runs": [str(c) for c in next_round.full_runs],
            "may_follow": next_round.may_follow,
        },
        "comparisons": comparisons,
        "noise": vars(noise) | {"text": noise_text(noise, margin, rivals)},
        "notes": [*notes, *unusable],
    })  # fmt: skip


def comparison_values(analysis: Course, costs: Costs, state: State) -> dict[str, Any]:
    """Return the entry of a comparison.

    Args:
        analysis: The analysis.
        costs: Its costs.
        state: State of the comparison.
    """
    last, comparison = analysis.claimed(state), state.comparison
    # A block that was in no look yet supports no conclusion.
    blocks = analysis.evidence.blocks_of(comparison.place)[: last.blocks if last else None]
    unusable = next(checks.why_unusable(blocks), None)
    claim, text = claim_of(analysis, state, blocks)
    if unusable and claim != "only":
        claim, text = "none", f"Nothing is claimed: {unusable}."
    matrix_s = costs.matrix_s(state)
    doubts = list(doubts_on(analysis, state, blocks))
    level, reason = confidence_in(analysis, state, blocks, claim, doubts)
    return {
        "experiment": comparison.place.experiment,
        "model": comparison.place.model,
        "dataset": comparison.dataset,
        "gpus": comparison.place.gpus,
        "workers": counted(
            comparison.place.gpus, worker_noun({block.device for block in blocks[:1]})
        ),
        "strategies": list(comparison.strategies),
        "traits": {
            a: vars(t) for a, t in zip(comparison.strategies, comparison.traits, strict=False)
        },
        "served": dict(zip(comparison.strategies, comparison.served, strict=True)),
        "trained": dict(zip(comparison.strategies, comparison.trained, strict=False)),
        "device": blocks[0].device if blocks else None,
        "hosts": sorted({host for block in blocks for host in block.hosts}),
        "node_sets": len({block.hosts for block in blocks}),
        "blocks": last.blocks if last else len(blocks),
        "unusable": unusable,
        "checked": analysis.checked(state),
        "steps": blocks[0].steps if blocks else None,
        "open": is_open(state),
        "claim": claim,
        "claimed": claim in CLAIMS,
        "text": text,
        "leader": last.leader if last else None,
        "at_most": ratio_minus_one(last.at_most) if last else None,
        "confidence": level,
        "confidence_reason": reason,
        "doubts": doubts,
        "ratios": [ratio_values(state, strategy) for strategy in comparison.strategies],
        "looks": [look_values(look) for look in state.looks],
        "step_s": {
            strategy: [finite(math.exp(b.value(strategy))) for b in blocks]
            for strategy in comparison.strategies
        },
        "full_steps": comparison.full_steps,
        "scores": {
            strategy: score_state(analysis, state, strategy) for strategy in comparison.strategies
        },
        "block_gpu_hours": costs.blocks_s(state) / 3600,
        "full_run_gpu_hours": costs.runs_s(state) / 3600,
        "matrix_gpu_hours": None if matrix_s is None else matrix_s / 3600,
    }


def doubts_on(analysis: Course, state: State, blocks: Sequence[PairedBlock]) -> Iterator[str]:
    """Yield sentences against a comparison's blocks.

    Args:
        analysis: The analysis.
        state: State of the comparison.
        blocks: Its blocks.
    """
    for strategy, logs in analysis.off_from_steps(state).items():
        logs_apart = sorted(log for log in logs if abs(log) > MAX_OFF)
        if logs_apart:
            ends = " to ".join(
                f"{math.expm1(log):+.1%}" for log in dict.fromkeys(logs_apart[:1] + logs_apart[-1:])
            )
            yield (
                f"{counted(len(logs_apart), 'full run')} of {strategy} took {ends} against the steps "
                "times the blocks' step time"
            )
    if (correction := analysis.moved(state)) and (before := share_of(state.last.at_most)) < MUCH:
        yield (
            f"by the blocks alone nothing would be faster than {state.last.leader} by more than "
            f"{before:.1%}; the full runs let {correction.nearest} be"
        )
    for block in blocks:
        for strategy, factor in checks.far_from_full_run(
            analysis.evidence, state.comparison, block
        ):
            times = f"{factor:.0f} times" if factor > 1 else f"1/{1 / factor:.0f} of"
            yield f"a step of {strategy} in block {block.number} takes {times} that of its own full run"
    last = state.last
    if last and last.unlike > dependence.CERTAIN:
        wider = ", so that the intervals are wider" if last.alike else ""
        yield f"blocks are more like the one before them than chance makes them{wider}"


def noise_text(noise: Noise, margin: float, rivals: int) -> str:
    """Return a sentence on the noise of the blocks, and what the next study needs.

    Args:
        noise: The noise.
        margin: Margin of the next study.
        rivals: Number of alternatives.
    """
    if noise.ratio is None:
        return "two blocks of a model and worker count are the fewest that tell of noise"
    needed = noise.blocks_for(margin, rivals)
    takes = "needs more blocks than the verdict has here"
    if needed is not None:
        takes = f"takes about {counted(needed, 'block')}"
    return (
        f"two strategies' ratio scatters by {noise.ratio:.1%} from block to block; among {rivals + 1} "
        f"equally fast ones a margin of {100 * margin:.3g} % {takes}"
    )


def is_open(state: State) -> bool:
    """Return whether a comparison of several strategies has not ended."""
    return state.open and len(state.comparison.strategies) > 1


# ---------------------------------------------------------------- claims


def claim_of(analysis: Course, state: State, blocks: list[PairedBlock]) -> tuple[str, str]:
    """Return the kind of the conclusion (one of CLAIMS, `only` or `none`), and its sentence.

    Args:
        analysis: The analysis.
        state: State of the comparison.
        blocks: Its blocks.
    """
    last, margin = analysis.claimed(state), analysis.evidence.margin
    if len(state.comparison.strategies) == 1:
        return (
            "only",
            f"{state.comparison.strategies[0]} is the only strategy here: there is nothing to compare.",
        )
    if last is None:
        return "none", "Nothing is known yet: no block was judged."
    where, sure = on_node(blocks), f"(95 %{of_how_many(blocks)})"
    if not analysis.checked(state):
        where = f" by its steps{where}"  # no full run could confirm whole trainings
    if not state.active:
        return (
            "none",
            f"No strategy is left: {'; '.join(f'{d.strategy} {d.reason}' for d in state.drops)}.",
        )
    few = last.counted < judging.MIN_BLOCKS
    if state.compared == 1 or (len(state.active) == 1 and few):
        return "only", f"{state.active[0]} is the only strategy left{where}."
    if not set(state.active) <= {last.leader, *last.ratios} or last.leader not in state.active:
        out = next(d for d in reversed(state.drops) if d.against is None)
        return "none", f"{out.strategy} is out ({out.reason}); the others are judged next."
    if few:
        return "none", (
            f"{last.leader} leads after {counted(last.counted, 'block')}; nothing is claimed before "
            f"{judging.MIN_BLOCKS}."
        )
    if last.fastest:
        return "fastest", f"{last.leader} is the fastest of {state.compared}{where} {sure}."
    shown = share_of(last.at_most)
    if decided(analysis, state):
        return (
            "within",
            f"{last.leader} is within {100 * margin:.3g} % of the fastest{where} {sure}.",
        )
    if shown > MUCH:
        return "none", (
            f"{last.leader} leads after {counted(last.counted, 'block')}{where}, and nothing is claimed: "
            "by these blocks something may be more than twice as fast."
        )
    return "at most", f"{last.leader} is at most {shown:.1%} slower than the fastest{where} {sure}."


def on_node(blocks: list[PairedBlock]) -> str:
    """Return `` on node X`` if blocks ran on few node sets, which limits the conclusion."""
    sets = sorted({block.hosts for block in blocks})
    if not 0 < len(sets) < judging.MIN_SETS:
        return ""
    if len(sets) == 1:
        return f" on {'node' if len(sets[0]) == 1 else 'nodes'} {', '.join(sets[0])}"
    named = " and ".join(", ".join(hosts) for hosts in sets)
    return f" on {node_sets(len(sets), sets)} alone, {named}"


def of_how_many(blocks: Sequence[PairedBlock]) -> str:
    """Return ``, on 4 nodes`` of a conclusion that is about more than its own nodes."""
    sets = {block.hosts for block in blocks}
    return f", on {node_sets(len(sets), sets)}" if len(sets) >= judging.MIN_SETS else ""


def node_sets(count: int, sets: Iterable[tuple[str, ...]]) -> str:
    """`2 nodes`, or `2 sets of nodes` where a block takes several."""
    return (
        f"{count} sets of nodes"
        if any(len(hosts) > 1 for hosts in sets)
        else counted(count, "node")
    )


def ratio_values(state: State, strategy: str) -> dict[str, Any]:
    """Return values of a strategy against the leader.

    A dropped strategy has the values of that time.
    """
    last = state.last
    drop: Drop | None = next((d for d in reversed(state.drops) if d.strategy == strategy), None)
    values: dict[str, Any] = {
        "strategy": strategy, "state": "open", "against": None, "ratio": None, "low": None, "high": None,
        "at_least": None, "blocks": last.blocks if last else 0, "reason": "",
    }  # fmt: skip
    ratio = None
    if drop is not None:
        values |= {"state": drop.kind, "blocks": drop.blocks, "reason": drop.reason}
        ratio, values["against"] = drop.ratio, drop.against
    elif last is not None and strategy == last.leader:
        values |= {"state": "leader", "ratio": 1.0}
    elif last is not None and strategy in last.ratios:
        kind = (
            "slower" if strategy in last.slower else "equal" if strategy in last.equal else "open"
        )
        values |= {"state": kind, "against": last.leader}
        ratio = last.ratios[strategy]
    if ratio is not None:
        names = ("ratio", "low", "high", "at_least")
        values |= {n: ratio_from(v) for n, v in zip(names, ratio, strict=True)}
        if values["low"] is None or values["high"] is None or values["low"] == 0:
            values |= {"low": None, "high": None, "at_least": None}
    return values | {"text": ratio_text(values), "words": standing_words(values)}


def standing_words(ratio: dict[str, Any]) -> str:
    """Return a strategy's result against the leader, as text."""
    if ratio["reason"]:
        return f"dropped after {counted(ratio['blocks'], 'block')}"
    words = {"open": "not told apart", "equal": f"equal within {100 * judging.EQUAL:.3g} %"}
    return words.get(ratio["state"], ratio["state"])


def ratio_text(ratio: dict[str, Any]) -> str:
    """Return a ratio with the bound that decides: `1.105 (at least 1.072)`."""
    if ratio["ratio"] is None:
        return ""
    if ratio["at_least"] is None:
        return f"{ratio['ratio']:.3f}"
    least = "below 0.1" if ratio["at_least"] < 0.1 else f"at least {ratio['at_least']:.3f}"
    return f"{ratio['ratio']:.3f} ({least})"


def ratio_from(log: float) -> float | None:
    """Return a ratio from its logarithm.

    Return None if it is not known, or too large or small to print.
    """
    return math.exp(log) if math.isfinite(log) and abs(log) < 50 else None


def look_values(look: Judged) -> dict[str, Any]:
    """Return a look as JSON keeps it; `intervals`: ratio, low, high and the lower bound."""
    intervals = {
        strategy: [ratio_from(v) for v in values] for strategy, values in look.ratios.items()
    }
    return {
        "blocks": look.blocks,
        "leader": look.leader,
        "at_most": ratio_minus_one(look.at_most),
        "intervals": intervals,
        "slower": list(look.slower),
    }


def ratio_minus_one(log: float) -> float | None:
    """Return the share by which a ratio exceeds 1, from its logarithm.

    Return None if it is not known.
    """
    ratio = ratio_from(log)
    return None if ratio is None else ratio - 1


def share_of(log: float) -> float:
    """Return the share by which a ratio exceeds 1, from its logarithm.

    Infinite if it is not known.
    """
    share = ratio_minus_one(log)
    return math.inf if share is None else share


# ---------------------------------------------------------------- how sure


def score_state(analysis: Course, state: State, strategy: str) -> str:
    """Return the state of a strategy's score: `equal`, `good`, `worse`, `not measured` or `no score`.

    Args:
        analysis: The analysis.
        state: State of the comparison.
        strategy: The strategy.
    """
    if not state.comparison.scored:
        return "no score"
    if state.comparison.equal[state.comparison.strategies.index(strategy)]:
        return "equal"
    if not analysis.scores.runs_of(state.comparison, strategy):
        return "not measured"
    return "worse" if analysis.scores.why_failed(state.comparison, strategy) else "good"


def confidence_in(
    analysis: Course, state: State, blocks: list[PairedBlock], claim: str, doubts: list[str]
) -> tuple[str, str]:
    """Return the confidence (`high`, `medium` or `low`), and the reason; docs/verdict.md has the rules.

    Args:
        analysis: The analysis.
        state: State of the comparison.
        blocks: Its blocks.
        claim: Kind of the conclusion.
        doubts: Sentences against its blocks.
    """
    last = analysis.claimed(state)
    if last is None or claim not in CLAIMS:
        return "low", "Nothing was compared." if claim == "only" else "Nothing is claimed yet."
    reasons, sure = [], True
    hosts = {host for block in blocks for host in block.hosts}
    if (sets := len({block.hosts for block in blocks})) < judging.MIN_SETS:
        sure = False
        which = "" if sets == 1 else f", and {judging.MIN_SETS} are the fewest that tell of others"
        reasons.append(
            f"All blocks ran on {', '.join(sorted(hosts))}: other nodes may order them differently{which}."
        )
    if any(block.device == "cpu" for block in blocks):
        sure = False
        reasons.append(f"It holds for {plural(worker_noun(['cpu']))} and says nothing of GPUs.")
    if open_score := unsettled_score(analysis, state):
        sure = False
        reasons.append(open_score)
    if not analysis.checked(state):
        sure = False
        if last.leader not in analysis.off_from_steps(state):
            reasons.append("No full run of it has checked the step times yet.")
        else:
            reasons.append("Allocations differ too much for its full runs to check the step times.")
    if doubts:
        sure = False
        reasons.append(f"Doubts: {'; '.join(doubts)}.")
    at_most = share_of(last.at_most)
    narrow = last.fastest or at_most <= judging.EQUAL + 1e-9
    if not narrow:
        by = f"up to {at_most:.1%}" if at_most <= MUCH else "much"
        reasons.insert(0, f"Something may be {by} faster.")
    near = last.fastest or at_most <= ROUGH
    level = "high" if sure and narrow else "medium" if near else "low"
    over = f"Over {counted(last.counted, 'block')} on {counted(len(hosts), 'host')}."
    return level, " ".join([over, *reasons])


def unsettled_score(analysis: Course, state: State) -> str | None:
    """Return why the leader's score may not be good enough, or None."""
    leader = state.last.leader
    if not state.comparison.scored:
        return "No score was measured (steps): equal scores are assumed."
    scores = analysis.scores
    if state.comparison.equal[state.comparison.strategies.index(leader)]:
        if any(run.status == "ok" for run in scores.reference(state.comparison)):
            return None
        return "No full run of its arithmetic has ended well yet."
    loss = scores.loss_of(state.comparison, leader)
    if loss is None:
        return f"The score of {leader} is not known."
    if loss.settled:
        return None
    differs = f"{abs(loss.lost):.2g} {'worse' if loss.lost > 0 else 'better'}"
    text = (
        f"Over {counted(loss.seeds, 'seed')} its {loss.score_name} is {differs} than the reference"
    )
    if not math.isfinite(loss.at_most):
        return f"{text}; one seed does not say by how much it may be worse ({loss.tolerance:g} allowed)."
    return f"{text} and may be {loss.at_most:.2g} worse (95 %, {loss.tolerance:g} allowed)."
