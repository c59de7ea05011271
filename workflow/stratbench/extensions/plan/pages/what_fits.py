"""Provides footprints, bytes and rates as JSON, from which plan.html plans any batch on any GPU.

Nothing is predicted here. templates/what_fits.js repeats the formulas of `Footprint.needed_bytes`,
`Reduction` and `duration`. A test compares its results with the plan's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, replace
from statistics import fmean
from typing import Any

from stratbench.cell.settings import Settings
from stratbench.cell.text.words import GIB, MIB
from stratbench.extensions.plan import device_rates, duration, public_runs
from stratbench.extensions.plan.duration import Span
from stratbench.extensions.plan.footprint import reductions
from stratbench.extensions.plan.footprint.footprint import Affine, Footprint, ReductionSize
from stratbench.extensions.plan.footprint.traffic import compute_wire_bytes
from stratbench.extensions.plan.needs import (
    CellToPlan,
    compute_data_bytes_on_device,
    compute_wire_bytes_of_averaging_step,
)
from stratbench.extensions.plan.schedule import Plan, PlannedCell
from stratbench.strategies.base import Strategy
from stratbench.telemetry.machine.hardware import Datasheet, list_datasheets

#: Both values of an `Affine`: for no sample, and per sample.
FixedAndPerSample = tuple[float, float]
#: Segments of the page's memory bar, each with the purposes of memory (PARTS) that it sums up. A further
#: segment, `copy`, is the warm-up's copy of the states.
GROUPS = {
    "weights": ("parameters", "buffers"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "communication": ("buckets", "received", "gathered", "communication", "staging"),
    "activations": ("activations",),
    "temporary": ("temporaries", "scratch"),
}
#: Number of steps of an assumed long training, which shows whether workers exchange data in every step.
MANY_STEPS = 1 << 20
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "bf16-true")
#: Precisions in the order of the page's control.
SHOWN_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "bf16-true", "fp64")
#: Maximum number of workers to which the page extrapolates.
MAX_WORKERS = 1024
#: GPUs of common memory sizes. The page compares one if the config names no GPU with this size.
USUAL_CARDS = ("A10G", "L40S", "A100 SXM 80 GB", "H200 SXM")


def collect_page_data(plan: Plan) -> dict[str, Any]:
    """Return all values that the page needs. Sizes are in bytes, and times in seconds."""
    cells = [c for c in plan.cells if c.cell.repeat == 0]
    footprints: dict[str, int] = {}
    networks = [
        _collect_neural_network_values(plan, label, found, footprints)
        for label, found in _group_cells_by_neural_network(cells).items()
    ]
    return {
        "study": plan.study,
        "margin": plan.cluster["memory_margin"],
        "gpus_per_node": plan.cluster["gpus_per_node"],
        "own_of": ["CPU", plan.device],
        "beside": _choose_compared_devices([plan.device, *plan.compared_devices]),
        "devices": _list_devices(plan, cells),
        "groups": list(GROUPS),
        "footprints": [json.loads(text) for text in footprints],
        "networks": networks,
        "rates": {
            "utilisation": {"gpu": duration.GPU_UTILISATION, "cpu": duration.CPU_UTILISATION},
            "launch_s": {"gpu": duration.GPU_LAUNCH_S, "cpu": duration.CPU_LAUNCH_S},
            "memory": duration.MEMORY_UTILISATION,
            "link": duration.LINK_UTILISATION,
            "server": duration.SERVER_BYTES_PER_S,
            "hiding": duration.HIDING,
            "public": public_runs.get_public_time_ratios()._asdict(),
            "waiting_share": public_runs.MAX_WAITING_SHARE,
        },
        "sums": {
            "block": reductions.BLOCK_THREADS,
            "warp": reductions.WARP,
            "least": reductions.MIN_NUMBERS,
            "most": reductions.MAX_NUMBERS,
            "counter": reductions.COUNTER_BYTES,
        },
    }


# --- devices of the page -----------------------------------------------------------------------


def _list_devices(plan: Plan, cells: Iterable[PlannedCell]) -> list[dict[str, Any]]:
    """Return the devices that cells may use, the plan's own device first."""
    kinds = {c.subject.request.is_on_cuda for c in cells}
    found = []
    if True in kinds:
        order = {name: i for i, name in enumerate([plan.device, *plan.compared_devices])}
        known = sorted(list_datasheets(), key=lambda gpu: order.get(gpu.name, len(order)))
        found += [_collect_gpu_values(gpu, plan.cluster) for gpu in known]
    if False in kinds:
        found.append(_collect_cpu_values(plan.cluster))
    return found


def _choose_compared_devices(plan_devices: list[str]) -> list[str]:
    """Return the devices that the page compares: the plan's, and one per common memory size."""
    size = {gpu.name: gpu.memory_gib for gpu in list_datasheets()}
    known = {size.get(name) for name in plan_devices}
    usual = [name for name in USUAL_CARDS if size[name] not in known]
    return sorted([*plan_devices, *usual], key=lambda name: size.get(name, 0))


def _collect_gpu_values(gpu: Datasheet, cluster: Mapping[str, Any]) -> dict[str, Any]:
    each = {p: device_rates.make_gpu_device(gpu, p, cluster) for p in PRECISIONS}
    flops = {p: device.flops_per_s for p, device in each.items() if device.flops_per_s}
    return {
        **asdict(each["fp32"]),
        "whole_bytes": gpu.memory_gib * GIB,
        "flops_per_s": flops,
        "public": gpu.name in public_runs.GPUS,
    }


def _collect_cpu_values(cluster: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of this host's CPU, whose rate all workers share."""
    device = device_rates.make_cpu_device(cluster, 1)
    whole_bytes = cluster["mem_mib_per_gpu"] * MIB
    return {**asdict(device), "whole_bytes": whole_bytes, "flops_per_s": {"": device.flops_per_s}}


# --- networks of the page ------------------------------------------------------------------------


def _group_cells_by_neural_network(cells: Iterable[PlannedCell]) -> dict[str, list[PlannedCell]]:
    """Group the cells by network. The keys are the networks' labels on the page.

    Cells belong to one network if they differ only in settings that the page can change.
    """
    alike: dict[str, list[PlannedCell]] = {}
    for c in cells:
        alike.setdefault(_make_neural_network_key(c.subject), []).append(c)
    named: dict[str, list[PlannedCell]] = {}
    for found in alike.values():
        model, dataset = found[0].cell.model, found[0].cell.dataset
        same = [f[0].cell for f in alike.values() if f[0].cell.model == model]
        label = model
        if len({cell.dataset for cell in same}) > 1:
            label += f" on {dataset}"
        if sum(cell.dataset == dataset for cell in same) > 1:
            label += f", {', '.join(dict.fromkeys(c.cell.experiment for c in found))}"
        named[label] = found
    return named


def _make_neural_network_key(s: CellToPlan) -> str:
    """Return a key of a cell's network, without the settings that the page can change."""
    # The page can switch checkpointing on or off. Cells with partial checkpointing are a network of their
    # own.
    mode = s.settings.activation_checkpointing
    own_mode = isinstance(mode, str) and mode
    same: dict[str, Any] = {
        "strategy": "", "options": {}, "gpus": 1, "seed": 0, "global_batch": 1, "per_worker_batch": 1,
        "precision": "fp32", "activation_checkpointing": own_mode, "slowdown": s.settings.slowdown,
    }  # fmt: skip
    return replace(s.settings, **same).as_json()


def _collect_neural_network_values(
    plan: Plan, label: str, cells: list[PlannedCell], footprint_indices: dict[str, int]
) -> dict[str, Any]:
    first = cells[0].subject
    kinds: dict[str, dict[str, dict[int, Any]]] = {}
    for c in cells:
        kind = kinds.setdefault(make_settings_key(c.subject.settings), {})
        by_count = kind.setdefault(c.cell.strategy, {})
        by_count.setdefault(c.cell.gpus, _collect_strategy_values(plan, c, footprint_indices))
    s, samples = first.settings, f"{first.data.train_samples:,} samples"
    counts = sorted({c.cell.gpus for c in cells})
    lines = any(
        sum(entry.get("regular", False) for entry in by_count.values()) > 1
        for kind in kinds.values()
        for by_count in kind.values()
    )
    return {
        "name": label,
        "about": f"{first.cell.dataset}: {samples}; {'AdamW' if s.optimizer == 'adamw' else 'SGD'}",
        "length": f"{s.steps:,} steps"
        if s.steps
        else f"{s.epochs} {'epoch' if s.epochs == 1 else 'epochs'} of {samples}",
        "strategies": list(dict.fromkeys(c.cell.strategy for c in cells)),
        "counts": counts,
        "most_workers": max(MAX_WORKERS if lines else 0, counts[-1]),
        "precisions": [p for p in SHOWN_PRECISIONS if any(k.split("+")[0] == p for k in kinds)],
        "train_samples": first.data.train_samples,
        "epochs": s.epochs,
        "steps": s.steps,
        "batch": s.global_batch,
        "on_cuda": first.request.is_on_cuda,
        "kinds": kinds,
        "ahead": _collect_projected_times(plan, cells),
    }


def _collect_projected_times(
    plan: Plan, cells: list[PlannedCell]
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Return projected times for numbers of workers that the study does not have.

    The keys are the kind of cell and the strategy.
    """
    own = {replace(c.cell, gpus=0, repeat=0): c.subject.settings for c in cells}
    there = {replace(c.cell, repeat=0) for c in cells}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for cell, p in sorted(plan.projected_durations.items(), key=lambda item: item[0].gpus):
        settings = own.get(replace(cell, gpus=0))
        if settings is not None and cell not in there:
            of_kind = found.setdefault(make_settings_key(settings), {})
            told = _make_recorded_time_values("projected", p.global_batch, p.span)
            of_kind.setdefault(cell.strategy, []).append(told | {"workers": cell.gpus})
    return found


def _make_recorded_time_values(kind: str, batch: int, span: Span) -> dict[str, Any]:
    """Return a training's recorded or projected time for the page, with its source.

    `kind` is measured, projected, or nearby (scaled from another cell's record).
    """
    before = {"measured": "measured: ", "nearby": "between perfect scaling and none, from "}
    source = before.get(kind, "") + span.source
    return {"kind": kind, "batch": batch, "span": [*span], "source": source}


def make_settings_key(s: Settings) -> str:
    """Return a key of the page's data: the precision, with a suffix for checkpointing."""
    return s.precision + ("+checkpointing" if s.activation_checkpointing else "")


def _collect_strategy_values(
    plan: Plan, c: PlannedCell, footprint_indices: dict[str, int]
) -> dict[str, Any]:
    """Return the values with which the page plans a strategy on a number of workers.

    The only value without a footprint is `reason`.
    """
    if c.footprint is None:
        return {"reason": c.reason}
    s, needs = c.subject, c.needs
    fit = c.fits_on.get(plan.device) or c.fit
    recorded = (
        fit.train_span if fit is not None and fit.train_span != fit.device_rate_span else None
    )
    return {
        "footprints": [
            _get_or_add_footprint_index(f, footprint_indices)
            for f in c.footprint.footprints_of_stages
        ],
        "slowest": c.footprint.footprints_of_stages.index(c.footprint.slowest_rank_footprint),
        "regular": _is_linear_in_workers(s),
        "replicas": s.mesh.replicas,
        "pushes": s.steps_per_batch,
        "parts": s.request.num_accumulated_parts,
        "least": c.min_samples_per_worker,
        "nodes": needs.nodes,
        "data": _compute_fixed_and_per_sample_data_bytes(s),
        "wire": None if s.served else _make_sent_bytes_values(s, c.footprint, needs.nodes),
        "sent": needs.wire_bytes if s.served else 0,
        "awaits": s.strategy.waits_for_activations,
        "served": needs.served_bytes,
        "link": needs.link_bytes or 0,
        "bubble": s.bubble_share,
        "slowdown": s.slowdown,
        "fused": duration.COMPILED if s.settings.compile else 1,
        "host_s": duration.compute_offload_s_per_rate_case(needs.slowest_rank_footprint),
        "public": public_runs.is_like_public_runs(s.settings, s.data.is_text),
        "recorded": recorded
        and _make_recorded_time_values(
            _find_evidence_kind(plan, c), s.settings.global_batch, recorded
        ),
    }


def _find_evidence_kind(plan: Plan, c: PlannedCell) -> str:
    """Return what a time is based on: a measured, a projected or a nearby record."""
    if c.state == "done":
        return "measured"
    return "projected" if c.cell in plan.projected_durations else "nearby"


def _is_linear_in_workers(s: CellToPlan) -> bool:
    """Return whether memory and traffic are linear in 1 / workers, from two workers on.

    Each part of the states must be either complete on a worker or divided by all workers. All workers must
    exchange by rings.
    """
    n, traits = s.cell.gpus, s.request.traits
    divided = {traits.weight_parts, traits.optimizer_parts} <= {1, n}
    return n > 1 and divided and s.mesh.replicas == n and not s.served


def _compute_fixed_and_per_sample_data_bytes(s: CellToPlan) -> FixedAndPerSample:
    """Return bytes of data on the device: a fixed part, and bytes per sample."""
    fixed = compute_data_bytes_on_device(s, 0)
    return fixed, compute_data_bytes_on_device(s, 1) - fixed


def _make_sent_bytes_values(s: CellToPlan, footprint: Footprint, nodes: int) -> dict[str, Any]:
    """Return the bytes that a rank sends per step, as linear functions of its samples.

    `within` is the part in groups within a node. A rank sends in the first `start` steps, then in one of
    `period` steps. In the first `plain_steps` steps it sends `plain` bytes instead.
    """
    on_gloo, gpus = not s.request.is_on_cuda, s.cell.gpus
    node_ranks = -(-gpus // nodes)

    def compute_fixed_and_per_sample_sent_bytes(
        ranks_per_node: int | None = None,
    ) -> FixedAndPerSample:
        at = [
            fmean(
                compute_wire_bytes(f.collectives, gpus, on_gloo, n, ranks_per_node)
                for f in footprint.footprints_of_stages
            )
            for n in (0, 1)
        ]
        return at[0], at[1] - at[0]

    plain = [
        compute_wire_bytes_of_averaging_step(s, f, f.collectives, on_gloo)
        for f in footprint.footprints_of_stages
    ]
    start, period = find_num_first_steps_and_period(s.strategy)
    return {
        "line": compute_fixed_and_per_sample_sent_bytes(),
        "within": compute_fixed_and_per_sample_sent_bytes(node_ranks),
        "start": start,
        "period": period,
        "plain_steps": s.strategy.num_uncompressed_steps,
        "plain": fmean(plain),
    }


def find_num_first_steps_and_period(strategy: Strategy) -> tuple[int, int]:
    """Return how many first steps exchange data, and the period of later exchanges."""
    if strategy.count_exchanges(MANY_STEPS) == MANY_STEPS:
        return 0, 1
    return strategy.steps_that_change_the_work[-1], strategy.steps_until_work_repeats


def _get_or_add_footprint_index(footprint: Footprint, footprint_indices: dict[str, int]) -> int:
    """Return a footprint's index in the page's list of distinct footprints.

    A new footprint is added to the list.
    """
    text = json.dumps(_select_footprint_values(footprint), separators=(",", ":"))
    return footprint_indices.setdefault(text, len(footprint_indices))


def _select_footprint_values(footprint: Footprint) -> dict[str, Any]:
    """Return the values of a footprint with which the page predicts memory and time."""
    return {
        "moments": [
            [
                m.phase,
                _list_fixed_and_per_sample_bytes(m.parts_bytes),
                m.reduction_sums and _list_reduction_values(m.reduction_sums),
            ]
            for m in footprint.peak_moments
        ],
        "evaluation": _sum_bytes_by_group(footprint.evaluation_peak.parts_bytes),
        "copy": footprint.warmup_copy_device_bytes,
        "flops": footprint.executed_flops_per_sample,
        "attention": footprint.attention_share,
        "operations": footprint.operations_per_step,
        "touched": astuple(footprint.touched_bytes),
    }


def _list_fixed_and_per_sample_bytes(lines_by_purpose: Mapping[str, Affine]) -> list[float]:
    """Return each memory segment's fixed bytes, followed by its bytes per sample."""
    none = Affine(0, 0)
    return [
        sum(getattr(lines_by_purpose.get(part, none), of) for part in members)
        for members in GROUPS.values()
        for of in ("fixed", "per_sample")
    ]


def _sum_bytes_by_group(bytes_by_purpose: Mapping[str, int]) -> list[int]:
    return [sum(bytes_by_purpose.get(part, 0) for part in members) for members in GROUPS.values()]


def _list_reduction_values(sums: ReductionSize) -> list[float]:
    return [
        *astuple(sums.outputs),
        *astuple(sums.inputs),
        sums.together,
        sums.partial_sum_bytes,
    ]
