"""Makes the content of verdict.json: conclusions, intervals, dropped strategies, costs and noise."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from stratbench.cell.files import replace_non_finite_by_none
from stratbench.cell.text.words import choose_noun_for_workers, format_count, pluralize
from stratbench.extensions.verdict.block_rules import MATRIX_REPEATS, MAX_LOG_DEVIATION
from stratbench.extensions.verdict.blocks import VERDICT_VERSION, PairedBlock, add_verdict_digest
from stratbench.extensions.verdict.paired import checks, dependence, judging
from stratbench.extensions.verdict.paired.costs import VerdictGpuSeconds
from stratbench.extensions.verdict.paired.next_round import NextRound, is_comparison_decided
from stratbench.extensions.verdict.paired.noise import Noise, estimate_block_noise
from stratbench.extensions.verdict.paired.rounds import RoundReplay
from stratbench.extensions.verdict.paired.state import (
    ComparisonAnalysis,
    ComparisonState,
    DroppedStrategy,
)
from stratbench.statistics.moderated import ROUGH

#: Largest value that the conclusion "at most … slower than the fastest" may have: 1.0 is 100 %, twice the
#: time. Beyond it, nothing is claimed.
MAX_CLAIMED_SHARE = 1.0
#: Kinds of conclusions that make a claim about the leader.
CLAIMS = ("fastest", "within", "at most")


def make_verdict_content(
    replay: RoundReplay, next_round: NextRound, notes: list[str]
) -> dict[str, Any]:
    """Return the content of verdict.json.

    Args:
        replay: Replay of the rounds so far.
        next_round: The next round.
        notes: Sentences on blocks, full runs and cells that are not used.
    """
    costs = VerdictGpuSeconds(replay)
    # Sorted blocks make floating-point sums independent of the order of files.
    blocks = [replay.evidence.blocks[key] for key in sorted(replay.evidence.blocks)]
    noise, margin = estimate_block_noise(blocks), replay.evidence.margin
    rivals = max((len(s.comparison.strategies) - 1 for s in replay.states), default=1)
    comparisons = [make_comparison_entry(replay, costs, state) for state in replay.states]
    unusable = [f"{b['experiment']}, {b['model']} on {b['gpus']}: {b['unusable']}"
                for b in comparisons if b["unusable"]]  # fmt: skip
    matrix = [
        comparison["matrix_gpu_hours"]
        for comparison in comparisons
        if len(comparison["strategies"]) > 1
    ]
    return add_verdict_digest({
        "schema_version": VERDICT_VERSION,
        "study": replay.evidence.study,
        "margin": margin,
        "rounds": replay.round,
        "done": next_round.is_verdict_done,
        "reason": next_round.end_reason,
        "hours": "worker-hours" if any(b.device_kind == "cpu" for b in blocks) else "GPU-hours",
        "spent_gpu_hours": next_round.spent_gpu_hours,
        "expected_gpu_hours": next_round.expected_gpu_hours,
        "budget_gpu_hours": replay.evidence.budget_gpu_hours,
        "matrix_gpu_hours": None if None in matrix else sum(matrix),
        "matrix_repeats": MATRIX_REPEATS,
        "next": {
            "blocks": len(next_round.block_entries),
            "full_runs": [str(c) for c in next_round.cells_to_train_in_full],
            "may_follow": next_round.max_later_block_rounds,
        },
        "comparisons": comparisons,
        "noise": noise.as_dict() | {"text": describe_block_noise(noise, margin, rivals)},
        "notes": [*notes, *unusable],
    })  # fmt: skip


def make_comparison_entry(
    replay: RoundReplay, costs: VerdictGpuSeconds, state: ComparisonState
) -> dict[str, Any]:
    """Return the entry of a comparison in verdict.json.

    Args:
        replay: Replay of the rounds so far.
        costs: GPU-seconds of the verdict.
        state: State of the comparison.
    """
    last, comparison = replay.get_corrected_analysis(state), state.comparison
    # Blocks after the latest interim analysis do not count, because they were not evaluated yet.
    blocks = replay.evidence.list_blocks_of_comparison(comparison.comparison_key)[
        : last.num_blocks if last else None
    ]
    unusable = next(checks.iter_reasons_for_unusable_blocks(blocks), None)
    claim, text = make_conclusion_kind_and_sentence(replay, state, blocks)
    if unusable and claim != "only":
        claim, text = "none", f"Nothing is claimed: {unusable}."
    matrix_s = costs.estimate_full_matrix_gpu_seconds(state)
    doubts = list(iter_doubt_sentences(replay, state, blocks))
    level, reason = assess_confidence_and_reasons(replay, state, blocks, claim, doubts)
    return {
        "experiment": comparison.comparison_key.experiment,
        "model": comparison.comparison_key.model,
        "dataset": comparison.dataset,
        "gpus": comparison.comparison_key.gpus,
        "workers": format_count(
            comparison.comparison_key.gpus,
            choose_noun_for_workers({block.device_kind for block in blocks[:1]}),
        ),
        "strategies": list(comparison.strategies),
        "traits": {
            a: vars(t) for a, t in zip(comparison.strategies, comparison.traits, strict=False)
        },
        "served": dict(zip(comparison.strategies, comparison.uses_servers, strict=True)),
        "trained": dict(zip(comparison.strategies, comparison.settings_hashes, strict=False)),
        "device": blocks[0].device_kind if blocks else None,
        "hosts": sorted({host for block in blocks for host in block.hosts}),
        "node_sets": len({block.hosts for block in blocks}),
        "blocks": last.num_blocks if last else len(blocks),
        "unusable": unusable,
        "checked": replay.is_leader_confirmed_by_full_runs(state),
        "steps": blocks[0].timed_steps_per_segment if blocks else None,
        "open": state.is_open and len(comparison.strategies) > 1,
        "claim": claim,
        "claimed": claim in CLAIMS,
        "text": text,
        "leader": last.leader if last else None,
        "at_most": compute_ratio_minus_1_or_none(last.max_log_advantage_over_leader)
        if last
        else None,
        "confidence": level,
        "confidence_reason": reason,
        "doubts": doubts,
        "ratios": [make_strategy_entry(state, strategy) for strategy in comparison.strategies],
        "looks": [make_analysis_entry(look) for look in state.looks],
        "step_s": {
            strategy: [
                replace_non_finite_by_none(math.exp(b.compute_log_step_time(strategy)))
                for b in blocks
            ]
            for strategy in comparison.strategies
        },
        "full_steps": comparison.full_run_steps,
        "scores": {
            strategy: classify_score(replay, state, strategy) for strategy in comparison.strategies
        },
        "block_gpu_hours": costs.sum_block_gpu_seconds(state) / 3600,
        "full_run_gpu_hours": costs.sum_full_run_gpu_seconds(state) / 3600,
        "matrix_gpu_hours": None if matrix_s is None else matrix_s / 3600,
    }


def iter_doubt_sentences(
    replay: RoundReplay, state: ComparisonState, blocks: Sequence[PairedBlock]
) -> Iterator[str]:
    """Yield a sentence on each reason to doubt a comparison's blocks.

    Args:
        replay: Replay of the rounds so far.
        state: State of the comparison.
        blocks: Blocks of the comparison.
    """
    for strategy, logs in replay.compute_full_run_deviations(state).items():
        logs_apart = sorted(log for log in logs if abs(log) > MAX_LOG_DEVIATION)
        if logs_apart:
            ends = " to ".join(
                f"{math.expm1(log):+.1%}" for log in dict.fromkeys(logs_apart[:1] + logs_apart[-1:])
            )
            yield (
                f"the time of {format_count(len(logs_apart), 'full run')} of {strategy} differs by {ends} "
                "from the number of steps times the step time in the blocks"
            )
    if (correction := replay.find_full_run_correction(state)) and (
        before := compute_ratio_minus_1_or_inf(state.latest_analysis.max_log_advantage_over_leader)
    ) < MAX_CLAIMED_SHARE:
        yield (
            f"according to the blocks, no strategy is more than {before:.1%} faster than "
            f"{state.latest_analysis.leader}; according to the full runs, {correction.nearest_rival} may be"
        )
    for block in blocks:
        for strategy, factor in checks.iter_strategies_contradicting_full_runs(
            replay.evidence, state.comparison, block
        ):
            times = f"{factor:.0f} times" if factor > 1 else f"1/{1 / factor:.0f} of"
            yield (
                f"a step of {strategy} in block {block.block_number} takes {times} the step time of its own "
                "full run"
            )
    last = state.latest_analysis
    if last and last.block_similarity_sds > dependence.CERTAIN_SDS:
        wider = ", so that the intervals are widened" if last.reuses_few_nodes else ""
        yield f"successive blocks are more similar than chance explains{wider}"


def describe_block_noise(noise: Noise, margin: float, num_rivals: int) -> str:
    """Return a text on the noise between blocks and the number of necessary blocks.

    Args:
        noise: Noise of the blocks.
        margin: Share within which strategies shall be compared.
        num_rivals: Number of strategies other than the leader.
    """
    if noise.log_ratio_sd is None:
        return "the noise is unknown: to estimate it takes two blocks of one model and worker count"
    needed = noise.count_blocks_for_margin(margin, num_rivals)
    takes = "takes more blocks than a verdict runs"
    if needed is not None:
        takes = f"takes about {format_count(needed, 'block')}"
    return (
        f"the time ratio of two strategies has a standard deviation of {noise.log_ratio_sd:.1%} between "
        f"blocks; a conclusion within {100 * margin:.3g} % among {num_rivals + 1} equally fast strategies "
        f"{takes}"
    )


def make_conclusion_kind_and_sentence(
    replay: RoundReplay, state: ComparisonState, blocks: list[PairedBlock]
) -> tuple[str, str]:
    """Return the kind of a comparison's conclusion, and the conclusion as a sentence.

    The kind is one of CLAIMS, `only` (one strategy is left) or `none` (nothing is claimed).

    Args:
        replay: Replay of the rounds so far.
        state: State of the comparison.
        blocks: Blocks of the comparison.
    """
    last, margin = replay.get_corrected_analysis(state), replay.evidence.margin
    if len(state.comparison.strategies) == 1:
        return (
            "only",
            f"{state.comparison.strategies[0]} is the only strategy: there is nothing to compare.",
        )
    if last is None:
        return "none", "Nothing is known yet: no block has been evaluated."
    where, sure = describe_nodes(blocks), f"(95 %{describe_node_count(blocks)})"
    if not replay.is_leader_confirmed_by_full_runs(state):
        # No full run confirms the time of a whole training, so the claim is about the time of a step.
        where = f" by its steps{where}"
    if not state.active_strategies:
        reasons = "; ".join(
            f"{drop.strategy} {drop.drop_reason}" for drop in state.dropped_strategies
        )
        return "none", f"No strategy is left: {reasons}."
    few = last.num_common_blocks < judging.MIN_BLOCKS
    if state.num_compared_strategies == 1 or (len(state.active_strategies) == 1 and few):
        return "only", f"{state.active_strategies[0]} is the only strategy left{where}."
    if (
        not set(state.active_strategies) <= {last.leader, *last.log_time_ratios_to_leader}
        or last.leader not in state.active_strategies
    ):
        out = next(d for d in reversed(state.dropped_strategies) if d.leader_when_dropped is None)
        return (
            "none",
            f"{out.strategy} is excluded ({out.drop_reason}); the others are evaluated next.",
        )
    if few:
        return "none", (
            f"{last.leader} is fastest after {format_count(last.num_common_blocks, 'block')}; a conclusion "
            f"takes at least {judging.MIN_BLOCKS}."
        )
    if last.is_leader_fastest:
        return (
            "fastest",
            f"{last.leader} is the fastest of {state.num_compared_strategies}{where} {sure}.",
        )
    shown = compute_ratio_minus_1_or_inf(last.max_log_advantage_over_leader)
    if is_comparison_decided(replay, state):
        return (
            "within",
            f"{last.leader} is within {100 * margin:.3g} % of the fastest{where} {sure}.",
        )
    if shown > MAX_CLAIMED_SHARE:
        return "none", (
            f"{last.leader} is fastest after {format_count(last.num_common_blocks, 'block')}{where}, but "
            "nothing is claimed: another strategy may still be more than twice as fast."
        )
    return "at most", f"{last.leader} is at most {shown:.1%} slower than the fastest{where} {sure}."


def describe_nodes(blocks: list[PairedBlock]) -> str:
    """Return the words that restrict a conclusion to nodes, such as ` on node gpu01`.

    The text is empty if the blocks ran on three sets of nodes or more.
    """
    sets = sorted({block.hosts for block in blocks})
    if not 0 < len(sets) < judging.MIN_SETS:
        return ""
    if len(sets) == 1:
        return f" on {'node' if len(sets[0]) == 1 else 'nodes'} {', '.join(sets[0])}"
    named = " and ".join(", ".join(hosts) for hosts in sets)
    return f" on {format_node_set_count(sets)} alone, {named}"


def describe_node_count(blocks: Sequence[PairedBlock]) -> str:
    """Return the words on the number of nodes, such as `, on 4 nodes`.

    The text is empty if the blocks ran on fewer than three sets of nodes.
    """
    sets = {block.hosts for block in blocks}
    return f", on {format_node_set_count(sets)}" if len(sets) >= judging.MIN_SETS else ""


def format_node_set_count(sets: Collection[tuple[str, ...]]) -> str:
    """Return the number of node sets as text: `2 nodes` or `2 sets of nodes`."""
    if any(len(hosts) > 1 for hosts in sets):
        return f"{len(sets)} sets of nodes"
    return format_count(len(sets), "node")


def make_strategy_entry(state: ComparisonState, strategy: str) -> dict[str, Any]:
    """Return the entry of a strategy in its comparison in verdict.json.

    The entry has the strategy's state, and the ratio of its time to the leader's. For a dropped strategy, the
    ratio is the one at which it was dropped.
    """
    last = state.latest_analysis
    drop: DroppedStrategy | None = next(
        (d for d in reversed(state.dropped_strategies) if d.strategy == strategy), None
    )
    values: dict[str, Any] = {
        "strategy": strategy, "state": "open", "against": None, "ratio": None, "low": None, "high": None,
        "at_least": None, "blocks": last.num_blocks if last else 0, "reason": "",
    }  # fmt: skip
    ratio = None
    if drop is not None:
        values |= {
            "state": drop.drop_kind,
            "blocks": drop.num_blocks_when_dropped,
            "reason": drop.drop_reason,
        }
        ratio, values["against"] = drop.log_time_ratio_to_leader, drop.leader_when_dropped
    elif last is not None and strategy == last.leader:
        values |= {"state": "leader", "ratio": 1.0}
    elif last is not None and strategy in last.log_time_ratios_to_leader:
        kind = (
            "slower"
            if strategy in last.slower_strategies
            else "equal"
            if strategy in last.equal_strategies
            else "open"
        )
        values |= {"state": kind, "against": last.leader}
        ratio = last.log_time_ratios_to_leader[strategy]
    if ratio is not None:
        names = ("ratio", "low", "high", "at_least")
        values |= {n: convert_log_to_ratio(v) for n, v in zip(names, ratio, strict=True)}
        if values["low"] is None or values["high"] is None or values["low"] == 0:
            values |= {"low": None, "high": None, "at_least": None}
    return values | {
        "text": format_ratio_with_bound(values),
        "words": describe_state_relative_to_leader(values),
    }


def describe_state_relative_to_leader(strategy_entry: dict[str, Any]) -> str:
    """Return a strategy's state relative to the leader in words, such as `not told apart`.

    Args:
        strategy_entry: Entry of the strategy in verdict.json.
    """
    if strategy_entry["reason"]:
        return f"dropped after {format_count(strategy_entry['blocks'], 'block')}"
    words = {"open": "not told apart", "equal": f"equal within {100 * judging.EQUAL:.3g} %"}
    return words.get(strategy_entry["state"], strategy_entry["state"])


def format_ratio_with_bound(strategy_entry: dict[str, Any]) -> str:
    """Format a time ratio with its lower bound, such as `1.105 (at least 1.072)`."""
    if strategy_entry["ratio"] is None:
        return ""
    if strategy_entry["at_least"] is None:
        return f"{strategy_entry['ratio']:.3f}"
    least = (
        "below 0.1"
        if strategy_entry["at_least"] < 0.1
        else f"at least {strategy_entry['at_least']:.3f}"
    )
    return f"{strategy_entry['ratio']:.3f} ({least})"


def convert_log_to_ratio(log_ratio: float) -> float | None:
    """Return a ratio from its logarithm, or None if it is too large to print."""
    return math.exp(log_ratio) if math.isfinite(log_ratio) and abs(log_ratio) < 50 else None


def make_analysis_entry(look: ComparisonAnalysis) -> dict[str, Any]:
    """Return the entry of an interim analysis in verdict.json.

    Its key `intervals` has four numbers per strategy: the time ratio, both ends of its interval, and its
    lower bound.
    """
    intervals = {
        strategy: [convert_log_to_ratio(v) for v in values]
        for strategy, values in look.log_time_ratios_to_leader.items()
    }
    return {
        "blocks": look.num_blocks,
        "leader": look.leader,
        "at_most": compute_ratio_minus_1_or_none(look.max_log_advantage_over_leader),
        "intervals": intervals,
        "slower": list(look.slower_strategies),
    }


def compute_ratio_minus_1_or_none(log_ratio: float) -> float | None:
    """Return a ratio minus 1 from the ratio's logarithm. None if the ratio is infinite."""
    ratio = convert_log_to_ratio(log_ratio)
    return None if ratio is None else ratio - 1


def compute_ratio_minus_1_or_inf(log_ratio: float) -> float:
    """Return the share by which a ratio exceeds 1, from its logarithm. The share may be infinite."""
    share = compute_ratio_minus_1_or_none(log_ratio)
    return math.inf if share is None else share


def classify_score(replay: RoundReplay, state: ComparisonState, strategy: str) -> str:
    """Return the class of a strategy's score: `equal`, `good`, `worse`, `not measured` or `no score`.

    `equal` means that the arithmetic of the strategy equals DDP's.

    Args:
        replay: Replay of the rounds so far.
        state: State of the comparison.
        strategy: Name of the strategy.
    """
    if not state.comparison.has_scored_full_runs:
        return "no score"
    if state.comparison.equals_ddp[state.comparison.strategies.index(strategy)]:
        return "equal"
    if not replay.scores.list_requested_full_runs(state.comparison, strategy):
        return "not measured"
    return "worse" if replay.scores.find_exclusion_reason(state.comparison, strategy) else "good"


def assess_confidence_and_reasons(
    replay: RoundReplay,
    state: ComparisonState,
    blocks: list[PairedBlock],
    claim: str,
    doubts: list[str],
) -> tuple[str, str]:
    """Return the confidence in a conclusion (`high`, `medium` or `low`), and its reasons as sentences.

    The rules are those in docs/verdict.md.

    Args:
        replay: Replay of the rounds so far.
        state: State of the comparison.
        blocks: Blocks of the comparison.
        claim: Kind of the conclusion.
        doubts: Reasons to doubt the blocks, as sentences.
    """
    last = replay.get_corrected_analysis(state)
    if last is None or claim not in CLAIMS:
        return "low", "Nothing was compared." if claim == "only" else "Nothing is claimed yet."
    reasons, sure = [], True
    hosts = {host for block in blocks for host in block.hosts}
    if (sets := len({block.hosts for block in blocks})) < judging.MIN_SETS:
        sure = False
        which = (
            ""
            if sets == 1
            else f"; conclusions on other nodes take {judging.MIN_SETS} sets of nodes"
        )
        reasons.append(
            f"All blocks ran on {', '.join(sorted(hosts))}: on other nodes the order of strategies may "
            f"differ{which}."
        )
    if any(block.device_kind == "cpu" for block in blocks):
        sure = False
        reasons.append(
            f"The conclusion holds for {pluralize(choose_noun_for_workers(['cpu']))}, and not for GPUs."
        )
    if open_score := find_doubt_on_leader_score(replay, state):
        sure = False
        reasons.append(open_score)
    if not replay.is_leader_confirmed_by_full_runs(state):
        sure = False
        if last.leader not in replay.compute_full_run_deviations(state):
            reasons.append("No full run of the leader has confirmed its step time yet.")
        else:
            reasons.append(
                "Allocations differ too much for full runs to confirm the leader's step time."
            )
    if doubts:
        sure = False
        reasons.append(f"Doubts: {'; '.join(doubts)}.")
    at_most = compute_ratio_minus_1_or_inf(last.max_log_advantage_over_leader)
    narrow = last.is_leader_fastest or at_most <= judging.EQUAL + 1e-9
    if not narrow:
        by = f"up to {at_most:.1%}" if at_most <= MAX_CLAIMED_SHARE else "much"
        reasons.insert(0, f"Another strategy may be {by} faster.")
    near = last.is_leader_fastest or at_most <= ROUGH
    level = "high" if sure and narrow else "medium" if near else "low"
    over = f"Over {format_count(last.num_common_blocks, 'block')} on {format_count(len(hosts), 'host')}."
    return level, " ".join([over, *reasons])


def find_doubt_on_leader_score(replay: RoundReplay, state: ComparisonState) -> str | None:
    """Return the reason why the leader's score may not be good enough, or None."""
    leader = state.latest_analysis.leader
    if not state.comparison.has_scored_full_runs:
        return (
            "No score was measured, because the setting `steps` is set: equal scores are assumed."
        )
    scores = replay.scores
    if state.comparison.equals_ddp[state.comparison.strategies.index(leader)]:
        if any(run.status == "ok" for run in scores.list_reference_runs(state.comparison)):
            return None
        return "No full run of a strategy with DDP's arithmetic has ended well yet."
    loss = scores.estimate_score_loss(state.comparison, leader)
    if loss is None:
        return f"The score of {leader} is unknown."
    if loss.is_within_tolerance:
        return None
    differs = f"{abs(loss.score_loss):.2g} {'worse' if loss.score_loss > 0 else 'better'}"
    seeds = format_count(loss.num_seeds, "seed")
    text = f"Over {seeds} its {loss.score_name} is {differs} than the reference"
    allowed = f"{loss.score_tolerance:g} allowed"
    if not math.isfinite(loss.max_score_loss):
        return f"{text}; with one seed no bound on the difference is known ({allowed})."
    return f"{text} and may be {loss.max_score_loss:.2g} worse (95 %, {allowed})."
