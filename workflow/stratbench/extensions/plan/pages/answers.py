"""Answers the questions that users ask before they submit a study."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from stratbench.cell.extensions import iter_imported_additions
from stratbench.cell.text.words import format_bytes, format_count, format_names
from stratbench.extensions.plan.duration import LowHigh
from stratbench.extensions.plan.footprint.footprint import Footprint
from stratbench.extensions.plan.footprint.request import RESHARDING
from stratbench.extensions.plan.needs import compute_data_bytes_on_device
from stratbench.extensions.plan.quantities import format_time_range, group_cells_by
from stratbench.extensions.plan.schedule import FITS, TIGHT, Plan, PlannedCell

#: How a sentence names each purpose of memory.
PART_NAMES = {
    "parameters": "the weights",
    "gradients": "the gradients",
    "optimizer": "the optimizer states",
    "buffers": "BatchNorm's statistics",
    "buckets": "DDP's buckets",
    "data": "the data set",
    "gathered": "FSDP's gathered weights and their gradients",
    "communication": "buffers of the collectives",
    "received": "receive buffers of pipeline stages",
    "staging": "the CPU backend's staging copies",
    "scratch": "copies that the CPU's convolutions work on",
    "activations": "the activations kept for backward",
    "temporaries": "temporary results of backward and optimizer",
}

#: Purposes of memory that is proportional to the number of parameters.
STATES = ("parameters", "gradients", "optimizer", "buckets", "gathered")
#: Two predicted times count as equal if they differ by at most this fraction.
ALIKE = 0.03
#: A planned time counts as near if it exceeds the shortest one by at most this fraction. In each of 36
#: published sweeps of PyTorch, the fastest strategy was among the near ones
#: (benchmarks/results/public-sweeps.md).
NEAR = 0.1


def answer_user_questions(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return the questions that a plan answers, each with the sentences of its answer."""
    return [
        (
            "Which cells fit, and which strategy is the fastest?",
            list(_iter_fastest_strategy_sentences(plan)),
        ),
        *_list_question_if_answered(
            "Which division of the model among workers is best?",
            list(_iter_model_split_sentences(plan)),
        ),
        ("Which batch size fits?", list(_iter_batch_size_sentences(plan))),
        *_list_question_if_answered(
            "By how much can the model grow and still fit?",
            list(_iter_model_growth_sentences(plan)),
        ),
        (
            "How does the peak memory change with the number of workers?",
            list(_iter_worker_count_sentences(plan)),
        ),
        (
            "Can FSDP keep the gathered weights between forward and backward?",
            list(_iter_resharding_sentences(plan)),
        ),
        ("What takes the memory?", list(_iter_memory_part_sentences(plan))),
        *(
            pair
            for _, a in iter_imported_additions("plan_additions")
            if a.questions
            for pair in a.questions(plan)
        ),
    ]


def _list_question_if_answered(question: str, sentences: list[str]) -> list[tuple[str, list[str]]]:
    return [(question, sentences)] if sentences else []


def _list_predicted_first_repeat_cells(plan: Plan) -> list[PlannedCell]:
    """Return the cells with a predicted footprint, without further repeats."""
    return [c for c in plan.cells if c.cell.repeat == 0 and c.footprint is not None]


def _iter_cells_on_most_workers(plan: Plan) -> Iterator[tuple[str, list[PlannedCell]]]:
    """Yield a label and the cells on the most workers, per experiment and model."""
    for (experiment, model), cells in group_cells_by(
        _list_predicted_first_repeat_cells(plan), "experiment", "model"
    ).items():
        workers = max(c.cell.gpus for c in cells)
        there = [c for c in cells if c.cell.gpus == workers]
        yield (
            f"{experiment}, {model}, {format_count(workers, 'worker')} on {there[0].fit.device}",
            there,
        )


def _iter_batch_size_sentences(plan: Plan) -> Iterator[str]:
    for setting, there in _iter_cells_on_most_workers(plan):
        settings, samples = there[0].subject.settings, there[0].subject.data.train_samples
        most = {
            c.cell.strategy: c.fit.largest_batch
            * (c.subject.settings.global_batch // c.subject.settings.per_worker_batch)
            for c in there
        }
        strategy, other = min(most, key=most.get), max(most, key=most.get)
        and_with_other = (
            f", and {most[other]:,} with {other}" if most[other] != most[strategy] else ""
        )
        fit = f"The largest batch that fits is {most[strategy]:,} samples with {strategy}{and_with_other}."
        if most[strategy] >= samples:
            fit = f"A batch of all {samples:,} training samples would fit."
        yield f"{setting}: the study's global batch is {settings.global_batch:,}. {fit}"


def compute_parameter_growth_range(
    footprint: Footprint, batch: int, available_bytes: float, resident_threads: int = 0
) -> LowHigh:
    """Return the factors by which the number of parameters can grow within a memory.

    Args:
        footprint: Predicted memory of one worker.
        batch: Samples per worker.
        available_bytes: Memory of a worker for everything but the data set.
        resident_threads: Threads that the GPU holds at once.

    Returns:
        Factors (low, high). Low: all memory grows with the parameters, as in a deeper network. High:
        only the states grow.
    """
    peak, copied_bytes = (
        footprint.compute_training_peak(batch, resident_threads),
        footprint.warmup_copy_device_bytes,
    )
    states_bytes = sum(peak.parts_bytes.get(part, 0) for part in STATES)
    rest_bytes = peak.n_bytes - states_bytes
    least = available_bytes / footprint.compute_needed_bytes(batch, resident_threads)
    return least, max(least, (available_bytes - rest_bytes) / (states_bytes + copied_bytes))


def _iter_model_growth_sentences(plan: Plan) -> Iterator[str]:
    """Yield sentences on which strategy is fastest if the model grows, among those that fit."""
    for setting, there in _iter_cells_on_most_workers(plan):
        growth = {
            c.cell.strategy: compute_parameter_growth_range(
                c.footprint,
                c.subject.samples_per_step,
                c.fit.room_bytes - c.needs.data_bytes,
                c.fit.resident_threads,
            )
            for c in there
            if c.fit.memory_verdict == FITS and c.fit.device_rate_span
        }
        timed = sorted(
            (c for c in there if c.cell.strategy in growth),
            key=lambda c: (c.fit.usual_s, -growth[c.cell.strategy][0]),
        )
        chain: list[str] = []
        for name in (c.cell.strategy for c in timed):
            if not chain or growth[name] > growth[chain[-1]]:
                chain.append(name)
        if chain:
            strategies_up_to_n_times = ", then ".join(
                f"{name} up to {_format_parameter_growth_range(growth[name])}" for name in chain
            )
            yield (
                f"{setting}, with this batch: the fastest strategy that fits is {strategies_up_to_n_times} "
                "the number of parameters."
            )


def _format_parameter_growth_range(growth_factors: LowHigh) -> str:
    low, high = (f"{n:,.0f}" if n >= 10 else f"{n:.1f}" for n in growth_factors)
    return f"{low} times" if low == high else f"{low} to {high} times"


def _iter_fastest_strategy_sentences(plan: Plan) -> Iterator[str]:
    """Yield sentences on how many cells fit, and which of these cells are fastest.

    One time of each cell at equal rates decides which is fastest.
    """
    for setting, there in _iter_cells_on_most_workers(plan):
        least = min(there, key=lambda c: c.fit.needed_bytes)
        able = [c for c in there if c.fit.may_run]
        tight = sum(c.fit.memory_verdict == TIGHT for c in there)
        if len(there) == 1:
            continue
        if not able:
            strategy, needed_memory = least.cell.strategy, format_bytes(least.fit.needed_bytes)
            yield f"{setting}: no cell fits; {strategy} needs the least memory, {needed_memory}."
            continue
        fit = len(able) - tight
        count = "all cells fit" if fit == len(there) else f"{fit} of {len(there)} cells fit"
        count += f", {tight} tight" if tight else ""
        told = f"{setting}: {count}; {least.cell.strategy} needs the least memory"
        best, near = (
            _select_nearly_fastest_cells(able, ALIKE),
            _select_nearly_fastest_cells(able, NEAR),
        )
        if all(c.state == "done" for c in able):
            told += "; all are trained, and `stratbench decide` names the fastest"
        elif best:
            ranges = {format_time_range(c.fit.device_rate_span) for c in best}
            told += (
                f"; fastest by the device's rates: {format_names([c.cell.strategy for c in best])}"
            )
            told += f" ({' or '.join(sorted(ranges))})" if len(ranges) < 3 else ""
            if len(near) > len(best):
                others = format_names([c.cell.strategy for c in near[len(best) :]])
                told += f"; within {100 * NEAR:.0f} %: {others}"
        yield f"{told}."


def _select_nearly_fastest_cells(cells: list[PlannedCell], max_excess: float) -> list[PlannedCell]:
    """Return the cells whose time for comparisons is close to the shortest, fastest first.

    A time is close if it exceeds the shortest by at most the fraction `max_excess`.
    """
    timed = sorted((c for c in cells if c.fit.device_rate_span), key=lambda c: c.fit.usual_s)
    return [c for c in timed if c.fit.usual_s <= timed[0].fit.usual_s * (1 + max_excess)]


def _iter_model_split_sentences(plan: Plan) -> Iterator[str]:
    """Yield sentences on which split of the model is fastest, and which needs least memory.

    T is the degree of tensor parallelism, and S the number of pipeline stages.
    """
    for setting, there in _iter_cells_on_most_workers(plan):
        divided = [c for c in there if c.subject.mesh.workers_per_replica > 1]
        if not divided:
            continue
        able = [c for c in divided if c.fit.may_run]
        least = min(divided, key=lambda c: c.fit.needed_bytes)
        told = [
            f"{_format_model_split(least)} needs the least memory, {format_bytes(least.fit.needed_bytes)}"
        ]
        if best := _select_nearly_fastest_cells(able, ALIKE):
            told.insert(
                0,
                f"fastest division that fits: {format_names([_format_model_split(c) for c in best])}",
            )
        told += [
            f"{_format_model_split(c)} does not fit: it needs {format_bytes(c.fit.needed_bytes)}"
            for c in divided
            if not c.fit.may_run
        ]
        yield f"{setting}: {'; '.join(told)}."


def _format_model_split(c: PlannedCell) -> str:
    """Return how a cell splits its model, such as `fsdp-tensor (T = 2, 4 replicas)`."""
    mesh = c.subject.mesh
    told = [f"{name} = {n}" for name, n in (("T", mesh.tensor), ("S", mesh.stages)) if n > 1]
    told += [f"{mesh.replicas} replicas"] if mesh.replicas > 1 else []
    return f"{c.cell.strategy} ({', '.join(told)})"


def _iter_worker_count_sentences(plan: Plan) -> Iterator[str]:
    known = _list_predicted_first_repeat_cells(plan)
    if len({(c.cell.experiment, c.cell.model, c.cell.strategy) for c in known}) == len(known):
        yield "No strategy of the study runs on two different numbers of workers."
    for (experiment, model), cells in group_cells_by(known, "experiment", "model").items():
        rows = []
        ordered = sorted(cells, key=lambda c: (c.cell.strategy, c.cell.gpus))
        for strategy, each in group_cells_by(ordered, "strategy").items():
            if len(each) < 2:
                continue
            first, last = each[0], each[-1]
            factor = first.fit.peak.n_bytes / last.fit.peak.n_bytes
            rows.append((strategy, first.cell.gpus, last.cell.gpus, factor))
        if rows:
            best = max(rows, key=lambda r: r[3])
            worst = min(rows, key=lambda r: r[3])
            strategy, fewest_workers, most_workers, factor = best
            and_with_other = f", and with {worst[0]} by {worst[3]:.2f}" if worst[3] < factor else ""
            yield (
                f"{experiment}, {model}: from {fewest_workers} to {most_workers} workers the peak memory of "
                f"a training step shrinks by a factor of {factor:.2f} with {strategy}{and_with_other}."
            )


def _iter_resharding_sentences(plan: Plan) -> Iterator[str]:
    if not plan.footprints_by_request_and_resharding:
        yield "The study has no cells with FSDP."
    followed = [
        c
        for c in _list_predicted_first_repeat_cells(plan)
        if c.subject.request in plan.footprints_by_request_and_resharding
    ]
    for (experiment, model, workers), cells in group_cells_by(
        followed, "experiment", "model", "gpus"
    ).items():
        # Cells that differ only in `reshard_after_forward` count as one kind.
        kinds = {
            c.subject.request.with_options(**{RESHARDING: "always"}): c for c in reversed(cells)
        }
        for c in reversed(kinds.values()):
            choice = plan.footprints_by_request_and_resharding[c.subject.request]
            always, never = choice["always"], choice["never"]
            batch, threads = c.subject.samples_per_step, c.fit.resident_threads
            peaks = [f.compute_training_peak(batch, threads).n_bytes for f in (always, never)]
            gathers = [f.sum_payload_bytes_by_kind().get("all_gather", 0) for f in (always, never)]
            largest = never.largest_batch(
                c.fit.room_bytes, threads, partial(compute_data_bytes_on_device, c.subject)
            )
            whether_batch_fits = (
                "the batch fits"
                if largest >= batch
                else f"the batch does not fit (at most {largest:,} samples do)"
            )
            strategy = f", {c.cell.strategy}" if len(kinds) > 1 else ""
            num_workers = format_count(workers, "worker")
            more_bytes = format_bytes(peaks[1] - peaks[0])
            fewer_bytes = format_bytes(gathers[0] - gathers[1])
            yield (
                f"{experiment}, {model}, {num_workers}{strategy}: keeping gathered weights takes "
                f"{more_bytes} more memory, and each step gathers {fewer_bytes} less; {whether_batch_fits}."
            )


def _iter_memory_part_sentences(plan: Plan) -> Iterator[str]:
    for (experiment, model), cells in group_cells_by(
        _list_predicted_first_repeat_cells(plan), "experiment", "model"
    ).items():
        workers = max(c.cell.gpus for c in cells)
        # Strategies whose workers do the same work are listed once, such as all parameter servers.
        distinct = {c.subject.request: c for c in reversed(cells) if c.cell.gpus == workers}
        for c in reversed(distinct.values()):
            parts = sorted(c.fit.peak.parts_bytes.items(), key=lambda p: -p[1])[:2]
            largest_parts = " and ".join(
                f"{PART_NAMES[name]} ({100 * n_bytes / c.fit.peak.n_bytes:.0f} %)"
                for name, n_bytes in parts
            )
            if each := c.fit.stage_peaks_bytes:
                largest_parts += (
                    f"; the peaks of the stages are {', '.join(map(format_bytes, each))}"
                )
            yield f"{experiment}, {model}, {c.cell.strategy} on {workers}: {largest_parts}."
