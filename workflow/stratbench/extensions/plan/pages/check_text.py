"""Writes the result of the check of a study as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from stratbench.cell.coordinates import Cell
from stratbench.cell.text.words import format_count, format_names
from stratbench.extensions.plan.check import CheckResult, Network, StudyCheck
from stratbench.extensions.plan.needs import CellToPlan
from stratbench.strategies import get_strategy_class
from stratbench.strategies.base import Strategy
from stratbench.study.reasons import (
    format_skip_reasons,
    format_worker_counts,
    remove_cell_from_reason,
)
from stratbench.workload.data.dataset import get_sample_kind
from stratbench.workload.tasks import OwnTask

#: Maximum number of shard groups that are listed. Of more groups, only the smallest and the largest size are
#: named.
MAX_GROUPS = 16
#: Text on what happens to a parameter in a step that has no gradient for it, by the strategy's
#: `updates_by_zeros`.
WITHOUT_GRADIENT = {
    False: "left as it is",
    True: "updated by zeros, so that momentum and decay go on",
}


def format_check_result(checked: StudyCheck) -> str:
    """Return the text that `snakemake check` prints."""
    return "\n".join(_iter_check_result_lines(checked))


def _iter_check_result_lines(checked: StudyCheck) -> Iterator[str]:
    yield f"Study {checked.study.name}: {format_count(len(checked.checks_by_network), 'network')}"
    for network, found in checked.checks_by_network.items():
        cells = [s for s in checked.cells_to_plan if Network.from_request(s.request) == network]
        yield ""
        unchecked = {
            s.cell: reason
            for s in cells
            if (reason := checked.dry_runs_by_request[s.request].unchecked_reason)
        }
        yield from _iter_neural_network_lines(
            network, found, cells, checked.refusal_reasons_by_cell, unchecked
        )
    yield ""
    all_cells = format_count(len(checked.cells_to_plan), "cell")
    faulty = {
        s.cell
        for s in checked.cells_to_plan
        if checked.checks_by_network[Network.from_request(s.request)].fault is not None
    }
    reasons = checked.refusal_reasons_by_cell
    for end, refused in (
        (
            "cannot be trained by any strategy, and a run would stop before its first cell",
            {cell: reason for cell, reason in reasons.items() if cell in faulty},
        ),
        (
            "would end as unsupported",
            {cell: reason for cell, reason in reasons.items() if cell not in faulty},
        ),
    ):
        if refused:
            yield f"{len(refused)} of {all_cells} {end}:"
            yield from (f"  {line}" for line in format_skip_reasons(refused.items()))
    if not reasons:
        yield f"none of {all_cells} would end as unsupported"
    if n := sum(
        bool(checked.dry_runs_by_request[s.request].unchecked_reason) for s in checked.cells_to_plan
    ):
        yield f"{format_count(n, 'cell')} could not be checked before the training"


def _iter_neural_network_lines(
    network: Network,
    check_result: CheckResult,
    cells_to_plan: list[CellToPlan],
    refusal_reasons: Mapping[Cell, str],
    unchecked_reasons: Mapping[Cell, str],
) -> Iterator[str]:
    datasets = ", ".join(sorted({s.cell.dataset for s in cells_to_plan}))
    own = json.loads(network.own_task_json)
    task = f", {OwnTask(own['call'])}" if own else ""
    yield f"{network.model} on {datasets}{task}"
    if check_result.fault is not None:
        yield f"   cannot be trained: {check_result.fault}"
        return
    if check_result.unchecked_reason is not None:
        yield f"   not checked: {check_result.unchecked_reason}"
        return
    shape = ", ".join(map(str, network.input_shape))
    kind = get_sample_kind(network.input_shape).replace("texts", "tokens")
    gives = f"scores for {network.classes:,} {'tokens' if kind == 'tokens' else 'classes'}"
    if network.values:
        gives = format_count(network.classes, "value")
    frozen = (
        f", {check_result.num_frozen_parameters:,} of them frozen"
        if check_result.num_frozen_parameters
        else ""
    )
    yield (
        f"   {check_result.num_parameters:,} parameters{frozen}; takes {kind} [batch, {shape}], gives {gives}"
    )
    normalises = (
        "BatchNorm: each worker normalises over its own batch"
        if check_result.has_batchnorm
        else "no BatchNorm"
    )
    yield f"   {normalises}; {'dropout' if check_result.has_dropout else 'no dropout'}"
    yield f"   shard groups, {check_result.wrap_rule}: {_describe_shard_groups(check_result)}"
    trained = [s for s in cells_to_plan if s.cell not in refusal_reasons]
    if check_result.writes_buffers and trained:
        said = _format_strategies_by_note(trained, lambda strategy: strategy.buffers_note)
        yield f"   buffers that forward writes: {said}"
    if check_result.parameters_without_gradient and trained:
        said = _format_strategies_by_note(
            trained, lambda strategy: WITHOUT_GRADIENT[strategy.updates_by_zeros]
        )
        names = format_names(check_result.parameters_without_gradient)
        yield f"   without a gradient in some steps, {names}: {said}"
    yield from (f"   {remark}" for remark in check_result.remarks)
    for strategy in dict.fromkeys(s.cell.strategy for s in cells_to_plan):
        own = [s.cell for s in cells_to_plan if s.cell.strategy == strategy]
        if next(
            s for s in cells_to_plan if s.cell.strategy == strategy
        ).request.is_trained_by_command:
            yield f"   {strategy}: is a command of yours, which is not tried before it trains"
            continue
        if works := [c for c in own if c not in refusal_reasons and c not in unchecked_reasons]:
            yield f"   {strategy}: works with {_describe_worker_counts(works, own)}"
        for outcome, reasons in (
            ("not checked", unchecked_reasons),
            ("unsupported", refusal_reasons),
        ):
            for reason in dict.fromkeys(reasons[c] for c in own if c in reasons):
                of = [c for c in own if reasons.get(c) == reason]
                counts, reason = _describe_worker_counts(of, own), remove_cell_from_reason(reason)
                yield f"   {strategy}: {outcome} with {counts}: {reason}"


def _format_strategies_by_note(
    cells_to_plan: list[CellToPlan], get_note: Callable[[type[Strategy]], str]
) -> str:
    """Return each note on strategies with the names of these strategies, as text."""
    names: dict[str, list[str]] = {}
    for name, used in {s.cell.strategy: s.settings.strategy for s in cells_to_plan}.items():
        names.setdefault(get_note(get_strategy_class(used)), []).append(name)
    return "; ".join(f"{note} ({', '.join(those)})" for note, those in names.items())


def _describe_shard_groups(check_result: CheckResult) -> str:
    if not check_result.shard_groups:
        return "none, so that fsdp gathers all at once"
    groups = check_result.shard_groups
    if len(groups) <= MAX_GROUPS:
        said = ", ".join(f"{label} {size:,}" for label, size in groups)
    else:
        sizes = sorted(size for _, size in groups)
        said = f"{len(groups)} of {sizes[0]:,} to {sizes[-1]:,}"
    return f"{said}; in none: {check_result.num_root_parameters:,}"


def _describe_worker_counts(cells: list[Cell], all_cells: list[Cell]) -> str:
    """Return a text on the numbers of workers that cells have.

    The text names their experiments if cells in `all_cells` have others.
    """
    names = dict.fromkeys(c.experiment for c in cells)
    others = {c.experiment for c in all_cells} - names.keys()
    return format_worker_counts({c.gpus for c in cells}) + (
        f" in {', '.join(names)}" if others else ""
    )
