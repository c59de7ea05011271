"""Computes the footprint of a cell: memory and traffic of one rank, for any batch.

Two training steps with different batches run on fake tensors (`fake.py`). Every event of a step has a fixed
size and a size per sample, so that two steps give the peak for all batches.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from stratbench.extensions.plan.footprint.reductions import Reduction
from stratbench.extensions.plan.footprint.request import MicrobatchCounts, Request
from stratbench.strategies import get_mesh
from stratbench.telemetry.flops import TRAINING_FLOPS, count_flops
from stratbench.workload.network import models
from stratbench.workload.users_code import ModelError

if TYPE_CHECKING:
    from stratbench.extensions.plan.footprint.equal_blocks import Blocks
    from stratbench.extensions.plan.footprint.trace import OperatorTrace, Phase
    from stratbench.extensions.servers.strategy import ParameterServer
    from stratbench.strategies.base import Strategy
    from stratbench.telemetry.collectives import CollectiveCall
    from stratbench.workload.network.trial import Trial

#: Numbers of samples per part of a batch in the two traced steps.
BATCHES = (16, 32)


@dataclass(frozen=True)
class Affine:
    """A quantity that is linear in the batch: fixed + per_sample * batch."""

    fixed: float
    per_sample: float

    def evaluate_at(self, batch: int) -> float:
        return self.fixed + self.per_sample * batch

    @classmethod
    def fit_two_values(cls, values: tuple[float, float], parts: int = 1) -> Affine:
        """Return the line through two values, which belong to two batch sizes.

        The batch sizes are BATCHES times `parts`.
        """
        slope = (values[1] - values[0]) / (parts * (BATCHES[1] - BATCHES[0]))
        return cls(values[0] - slope * parts * BATCHES[0], slope)


@dataclass(frozen=True)
class ReductionSize:
    """Size of a CUDA reduction, as linear functions of the batch size.

    Attributes:
        outputs: Number of sums.
        inputs: Number of terms of each sum.
        together: Number of sums that a thread computes together.
        partial_sum_bytes: Bytes of a partial sum.
    """

    outputs: Affine
    inputs: Affine
    together: int
    partial_sum_bytes: int

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> ReductionSize:
        return cls(**fields | {k: Affine(**fields[k]) for k in ("outputs", "inputs")})

    def compute_kernel_buffer_bytes(self, batch: int, resident_threads: int) -> int:
        outputs, inputs = (round(line.evaluate_at(batch)) for line in (self.outputs, self.inputs))
        made = Reduction(outputs, inputs, self.together, self.partial_sum_bytes)
        return made.compute_kernel_buffer_bytes(resident_threads)


@dataclass(frozen=True)
class Moment:
    """Memory at a moment of a step, at which memory peaks for some batch size.

    `reduction_sums` are sums at this moment, whose buffer on a GPU is not included in the bytes.
    """

    phase: str
    total_bytes: Affine
    parts_bytes: dict[str, Affine]
    reduction_sums: ReductionSize | None = None

    def compute_reduction_kernel_buffer_bytes(self, batch: int, resident_threads: int) -> int:
        """Return the bytes of the buffer of the reductions at this moment, on a GPU.

        The GPU holds `resident_threads` threads at once. The bytes are 0 if this number is unknown.
        """
        if self.reduction_sums is None or not resident_threads:
            return 0
        return self.reduction_sums.compute_kernel_buffer_bytes(batch, resident_threads)

    def compute_total_bytes(self, batch: int, resident_threads: int) -> float:
        return self.total_bytes.evaluate_at(batch) + self.compute_reduction_kernel_buffer_bytes(
            batch, resident_threads
        )


@dataclass(frozen=True)
class MemoryPeak:
    """Peak memory of one rank in bytes, with the phase of the peak and the bytes by purpose."""

    n_bytes: int
    phase: str
    parts_bytes: dict[str, int]


@dataclass(frozen=True)
class Footprint:
    """Predicted memory and traffic of rank 0, whose shards are the largest.

    Attributes:
        model_states_bytes: Bytes of each kind of model state.
        between_steps_bytes: Bytes that exist between two steps, by part.
        peak_moments: Moments of a step that are the peak for some batch.
        evaluation_peak: Peak of the evaluation.
        collectives: Kind and bytes of each collective of a step, then its ranks if not all, and its
            bytes per sample if any.
        flops_per_sample: Operations of the forward pass.
        training_flops_per_sample: Operations of forward and backward, without those that frozen
            parameters save.
        operations_per_step: Number of launched operations.
        touched_bytes: Bytes that operations read and write per step.
        flat_tensor_bytes: Flat weights and buffers that a worker of a parameter server pushes and pulls.
        host_bytes: Bytes that are stored on the host of a GPU, by part.
        bytes_created_by_first_step: Part of `between_steps_bytes` that does not exist before the first step.
        frozen_parameter_bytes: Bytes of this rank's parameters that are never trained.
        max_fsdp_stream_bytes: Maximum bytes that FSDP has at once to gather and to scatter.
        attention_share: Fraction of `flops_per_sample` in fused attention, which is slower than
            products.
        recomputed_flops_per_sample: Additional operations of checkpointed blocks that are computed
            again.
        stage_footprints: Footprint of the first rank of each pipeline stage; the other attributes are
            those of the first stage.
    """

    model_states_bytes: dict[str, int]
    between_steps_bytes: dict[str, int]
    peak_moments: list[Moment]
    evaluation_peak: MemoryPeak
    collectives: list[tuple[Any, ...]]
    flops_per_sample: float
    training_flops_per_sample: float
    operations_per_step: int
    touched_bytes: Affine
    flat_tensor_bytes: dict[str, int]
    host_bytes: dict[str, int] = field(default_factory=dict)
    bytes_created_by_first_step: int = 0
    frozen_parameter_bytes: int = 0
    max_fsdp_stream_bytes: int = 0
    is_on_cuda: bool = False
    attention_share: float = 0.0
    recomputed_flops_per_sample: float = 0.0
    stage_footprints: list[Footprint] = field(default_factory=list)

    @property
    def footprints_of_stages(self) -> list[Footprint]:
        """Footprints of all pipeline stages, or of one rank without stages."""
        return self.stage_footprints or [self]

    def find_fullest_rank_footprint(self, batch: int, resident_threads: int = 0) -> Footprint:
        """Return the footprint of the rank that needs most memory.

        It has the `stage_footprints` of all stages.
        """
        fullest = max(
            self.footprints_of_stages, key=lambda f: f.compute_needed_bytes(batch, resident_threads)
        )
        return replace(fullest, stage_footprints=self.stage_footprints)

    @property
    def executed_flops_per_sample(self) -> float:
        """Operations per sample of a step, with those that checkpointed blocks compute again."""
        return self.training_flops_per_sample + self.recomputed_flops_per_sample

    @property
    def slowest_rank_footprint(self) -> Footprint:
        """Footprint of the pipeline rank that computes most."""
        return max(self.footprints_of_stages, key=lambda f: f.executed_flops_per_sample)

    def compute_training_peak(self, batch: int, resident_threads: int = 0) -> MemoryPeak:
        """Return the peak of a training step with `batch` samples on this rank.

        Args:
            batch: Samples of the step.
            resident_threads: Threads that the GPU holds at once, which sizes buffers of sums; 0 without
                buffers.
        """
        highest = max(
            self.peak_moments, key=lambda m: m.compute_total_bytes(batch, resident_threads)
        )
        parts = {k: round(v.evaluate_at(batch)) for k, v in highest.parts_bytes.items()}
        if buffer_bytes := highest.compute_reduction_kernel_buffer_bytes(batch, resident_threads):
            parts["scratch"] = parts.get("scratch", 0) + buffer_bytes
        return MemoryPeak(
            round(highest.compute_total_bytes(batch, resident_threads)), highest.phase, parts
        )

    def compute_reserved_bytes(self, batch: int, resident_threads: int = 0) -> int:
        """Return the bytes that PyTorch's allocator reserves on a GPU, in expandable segments.

        FSDP gathers and scatters in separate streams, whose memory no other stream can use. They contain
        gathered and scattered tensors, and gradients, which result from them.
        """
        peak = self.compute_training_peak(batch, resident_threads)
        if not self.max_fsdp_stream_bytes:
            return peak.n_bytes
        gradients_bytes = 0 if self.host_bytes else self.model_states_bytes["gradients_bytes"]
        pools = {"communication": self.max_fsdp_stream_bytes, "gradients": gradients_bytes}
        held = peak.parts_bytes
        return peak.n_bytes + sum(max(0, n - held.get(part, 0)) for part, n in pools.items())

    def compute_needed_bytes(self, batch: int, resident_threads: int = 0) -> int:
        """Return the maximum bytes that a cell needs, without the data set.

        On a CPU the warm-up trains and evaluates while its copy of the states is in the same memory.
        """
        peak_bytes = self.compute_training_peak(batch, resident_threads).n_bytes
        return max(peak_bytes, self.evaluation_peak.n_bytes) + self.warmup_copy_device_bytes

    @property
    def warmup_copy_host_bytes(self) -> int:
        """Bytes of host memory for the warm-up's copy of trained parameters and buffers."""
        held = self.between_steps_bytes
        trained_bytes = max(0, held.get("parameters", 0) - self.frozen_parameter_bytes)
        return trained_bytes + held.get("buffers", 0)

    @property
    def warmup_copy_device_bytes(self) -> int:
        """Bytes of device memory for the warm-up's copy of the states: 0 on GPUs."""
        return 0 if self.is_on_cuda else self.warmup_copy_host_bytes

    def largest_batch(
        self,
        available_bytes: float,
        resident_threads: int = 0,
        compute_data_bytes: Callable[[int], int] = lambda _: 0,
    ) -> int:
        """Return the maximum samples per rank that fit into `available_bytes` on every rank, or 0.

        Args:
            available_bytes: Memory of a device.
            resident_threads: Threads that the GPU holds at once.
            compute_data_bytes: Returns the bytes of the data for a number of samples.
        """
        return bisect_right(
            range(1, 1 << 24),
            available_bytes,
            key=lambda batch: (
                max(
                    f.compute_needed_bytes(batch, resident_threads)
                    for f in self.footprints_of_stages
                )
                + compute_data_bytes(batch)
            ),
        )

    def sum_payload_bytes_by_kind(self) -> dict[str, int]:
        """Return the bytes of tensors in a step's collectives, by kind."""
        payload: dict[str, int] = {}
        for kind, n_bytes, *_ in self.collectives:
            payload[kind] = payload.get(kind, 0) + n_bytes
        return payload

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Footprint:
        """Return the footprint from a dict made by `asdict`, possibly read from JSON."""
        moments = [
            Moment(
                m["phase"],
                Affine(**m["total_bytes"]),
                {k: Affine(**v) for k, v in m["parts_bytes"].items()},
                m["reduction_sums"] and ReductionSize.from_dict(m["reduction_sums"]),
            )
            for m in fields["peak_moments"]
        ]
        return cls(
            **fields
            | {
                "peak_moments": moments,
                "evaluation_peak": MemoryPeak(**fields["evaluation_peak"]),
                "collectives": [tuple(c) for c in fields["collectives"]],
                "touched_bytes": Affine(**fields["touched_bytes"]),
                "stage_footprints": [cls.from_dict(f) for f in fields["stage_footprints"]],
            }
        )


def make_footprint(request: Request, trial: Trial | None = None) -> Footprint:
    """Return the footprint of a request, from a complete trace on fake tensors.

    With a `trial` of its model, Refused is raised if the strategy does not support the model.
    """
    mesh = get_mesh(request.strategy, dict(request.options), request.world_size)
    footprints = [
        trace_two_steps(request, stage, trial).make_footprint() for stage in range(mesh.stages)
    ]
    return (
        footprints[0]
        if len(footprints) == 1
        else replace(footprints[0], stage_footprints=footprints)
    )


@dataclass(frozen=True)
class TracedSteps:
    """Trace of two training steps of one worker on fake tensors, with different batch sizes.

    Attributes:
        request: The traced request.
        parts: Number of parts into which the batch of each step was divided.
        blocks: The few equal blocks that the model was traced with, or None for all.
        trace: The trace.
        strategy: The strategy after the steps.
        phases_of_both_steps: Phases of each step.
        first_event_numbers: Numbers of the events at which the steps and the evaluation begin.
        collectives_of_step: Collectives of a step, each with its bytes per sample.
        moments_of_other_steps: Moments of steps of other kinds.
    """

    request: Request
    parts: int
    blocks: Blocks | None
    trace: OperatorTrace
    strategy: Strategy
    phases_of_both_steps: tuple[list[Phase], list[Phase]]
    first_event_numbers: list[int]
    collectives_of_step: list[CollectiveCall]
    moments_of_other_steps: list[Moment]

    @property
    def live_bytes_of_both_steps(self) -> list[list[int]]:
        """Allocated bytes after each event, for each of the two steps."""
        length = self.first_event_numbers[1] - self.first_event_numbers[0]
        return [
            self.trace.list_live_bytes_after_events(edge, edge + length)
            for edge in self.first_event_numbers[:2]
        ]

    @property
    def forward_and_attention_flops(self) -> tuple[int, int]:
        """Operations of the second step's forward, and how many of them are fused attention."""
        forward = [phase for phase in self.phases_of_both_steps[1] if phase.name == "forward"]
        return sum(p.flops for p in forward), sum(p.attention_flops for p in forward)

    @property
    def recomputed_flops(self) -> int:
        """Operations of the second step that checkpointed blocks compute a second time."""
        return sum(phase.recomputed_flops for phase in self.phases_of_both_steps[1])

    @cached_property
    def model_flops_per_sample(self) -> dict[str, float]:
        """Operations per sample of the whole model, as a job counts them."""
        forward_flops = self.forward_and_attention_flops[0] / (self.parts * BATCHES[1])
        return _count_flops_per_sample(self.request, forward_flops, self.blocks)

    def compute_rank_training_flops(
        self, model_flops_per_sample: dict[str, float], forward_flops_of_rank: int
    ) -> float:
        """Return the operations per sample of forward and backward on one rank.

        With divided layers, a rank computes a part of the forward. Otherwise it computes all of it.

        Args:
            model_flops_per_sample: Operations per sample of the whole model, like the attribute.
            forward_flops_of_rank: Operations of the second step's forward on this rank.
        """
        training_flops = model_flops_per_sample["training_flops_per_sample"]
        if self.strategy.worker.mesh.workers_per_replica == 1:
            return training_flops
        forward_flops = forward_flops_of_rank / (self.parts * BATCHES[1])
        return training_flops * (forward_flops / model_flops_per_sample["forward_flops_per_sample"])

    def make_footprint(self) -> Footprint:
        """Return the footprint that follows from the two traced steps."""
        request, trace, strategy, edges = (
            self.request,
            self.trace,
            self.strategy,
            self.first_event_numbers,
        )
        parts, (flops, attention_flops) = self.parts, self.forward_and_attention_flops
        touched = [
            float(sum(phase.touched_bytes for phase in step)) for step in self.phases_of_both_steps
        ]
        moments = self.find_peak_moments() + self.moments_of_other_steps
        return Footprint(
            model_states_bytes=strategy.compute_model_state_bytes(),
            between_steps_bytes=drop_purposes_without_bytes(
                trace.get_device_bytes_by_purpose(edges[0])
            ),
            peak_moments=_select_highest_moments(moments, parts),
            evaluation_peak=_find_evaluation_peak(trace, edges[2]),
            collectives=[c.as_tuple for c in self.collectives_of_step],
            flops_per_sample=flops / (parts * BATCHES[1]),
            training_flops_per_sample=self.compute_rank_training_flops(
                self.model_flops_per_sample, flops
            ),
            operations_per_step=sum(phase.operations for phase in self.phases_of_both_steps[1]),
            touched_bytes=Affine.fit_two_values((touched[0], touched[1]), parts),
            flat_tensor_bytes=_compute_flat_tensor_bytes(strategy)
            if request.is_worker_of_server
            else {},
            host_bytes=trace.get_host_bytes_by_purpose(edges[0]),
            bytes_created_by_first_step=sum(t.nbytes for t in strategy.list_late_tensors()),
            frozen_parameter_bytes=_compute_frozen_parameter_bytes(strategy),
            max_fsdp_stream_bytes=trace.find_max_fsdp_stream_bytes(*edges[1:]),
            is_on_cuda=request.is_on_cuda,
            attention_share=attention_flops / flops if flops else 0.0,
            recomputed_flops_per_sample=self.recomputed_flops / (parts * BATCHES[1]),
        )

    def find_peak_moments(self) -> list[Moment]:
        """Return the moments at which a step's memory peaks for some batch size.

        The batches have at least one sample per part.
        """
        lines = [
            Affine.fit_two_values(pair, self.parts)
            for pair in zip(*self.live_bytes_of_both_steps, strict=True)
        ]
        chosen: list[tuple[int, ReductionSize | None]] = [
            (i, None) for i in find_highest_line_indices(lines, self.parts)
        ]
        for sums, at in self.list_positions_by_reduction_size().items():
            highest = find_highest_line_indices([lines[i] for i in at], self.parts)
            chosen += [(at[i], sums) for i in highest]
        return [
            self.make_moment(
                lines[i],
                [
                    self.trace.get_device_bytes_by_purpose(edge + i)
                    for edge in self.first_event_numbers[:2]
                ],
                i,
                sums,
            )
            for i, sums in chosen
        ]

    def make_moment(
        self,
        total_bytes: Affine,
        bytes_by_purpose: Sequence[Mapping[str, int]],
        num_events: int,
        reduction_sums: ReductionSize | None,
    ) -> Moment:
        """Return the moment after a number of a step's events.

        Args:
            total_bytes: Memory at the moment.
            bytes_by_purpose: Its bytes by purpose in both steps.
            num_events: Number of the step's events before the moment.
            reduction_sums: Reduction at the moment, if any.
        """
        small, large = bytes_by_purpose
        held = {k: Affine.fit_two_values((small[k], large[k]), self.parts) for k in small}
        # The last of the first n events has the number n - 1.
        phase = self.trace.get_phase_name_of_event(
            self.first_event_numbers[1] + max(num_events - 1, 0)
        )
        used = {k: v for k, v in held.items() if v.fixed or v.per_sample}
        return Moment(phase, total_bytes, used, reduction_sums)

    def list_positions_by_reduction_size(self) -> dict[ReductionSize, list[int]]:
        """List where in a step CUDA reductions take place, by the size of the reduction.

        A place is a number of events since the step began. Only reductions that may need a buffer are
        included.
        """
        made = [
            [(at - edge, r) for phase in step for at, r in phase.reductions]
            for step, edge in zip(
                self.phases_of_both_steps, self.first_event_numbers[:2], strict=True
            )
        ]
        indices: dict[ReductionSize, list[int]] = {}
        for (at, one), (_, other) in zip(*made, strict=True):
            sums = ReductionSize(
                Affine.fit_two_values((one.outputs, other.outputs), self.parts),
                Affine.fit_two_values((one.inputs, other.inputs), self.parts),
                max(one.sums_per_thread, other.sums_per_thread),
                one.partial_sum_bytes,
            )
            indices.setdefault(sums, []).append(at)
        return indices


def trace_two_steps(
    request: Request,
    stage: int = 0,
    trial: Trial | None = None,
    blocks: Blocks | None = None,
    microbatch_counts: MicrobatchCounts | None = None,
) -> TracedSteps:
    """Trace two steps of a pipeline stage's first rank, with different batch sizes.

    Args:
        request: The request.
        stage: Number of the stage.
        trial: Trial of the request's model.
        blocks: Equal blocks to keep in place of all.
        microbatch_counts: Turns of few micro-batches that a stage takes in place of all.

    Raises:
        ModelError: If the steps differ in more than their batch.
    """
    from stratbench.extensions.plan.footprint import fake

    parts = request.num_accumulated_parts
    if microbatch_counts is not None:
        parts = request.gradient_accumulation_steps * microbatch_counts.microbatches
    batches = [parts * batch for batch in BATCHES]
    trace, strategy = fake.trace_training_steps(
        request, batches, 0, stage, trial, blocks, microbatch_counts
    )
    steps, edges = _list_step_phases_and_first_events(trace)
    each = [[c for phase in step for c in phase.collectives] for step in steps]
    kinds = [[(c.collective_name, c.group_size) for c in calls] for calls in each]
    if edges[1] - edges[0] != edges[2] - edges[1] or kinds[0] != kinds[1]:
        raise ModelError(
            f"{models.describe_model(request.model_source)}: two training steps differ in more than their "
            "batch, for example because forward keeps a tensor for the next step; memory for other "
            "batches cannot be predicted"
        )
    collectives = []
    for call, other in zip(*each, strict=True):
        if call != other:
            line = Affine.fit_two_values((call.n_bytes, other.n_bytes), parts)
            call = replace(call, n_bytes=line.fixed, bytes_per_sample=line.per_sample)
        collectives.append(call)
    others = []
    # A strategy may have several kinds of steps. All are traced, since the peak is the maximum over all
    # kinds.
    for number in strategy.steps_that_change_the_work[1:]:
        other, _ = fake.trace_training_steps(request, batches, number, stage, trial)
        others += TracedSteps(
            request,
            parts,
            None,
            other,
            strategy,
            *_list_step_phases_and_first_events(other),
            [],
            [],
        ).find_peak_moments()
    return TracedSteps(request, parts, blocks, trace, strategy, steps, edges, collectives, others)


def _list_step_phases_and_first_events(
    trace: OperatorTrace,
) -> tuple[tuple[list[Phase], list[Phase]], list[int]]:
    """Return the phases of both traced steps, and where steps and evaluation begin.

    The beginnings are numbers of events.
    """
    # The phases are, in order: setup, forward and backward and optimizer of the first step, the same of the
    # second step, and evaluate. Thus a step has n phases.
    n = len(trace.phases) // 2 - 1
    steps = (trace.phases[1 : 1 + n], trace.phases[1 + n : 1 + 2 * n])
    return steps, [p.first_event for p in (steps[0][0], steps[1][0], trace.phases[1 + 2 * n])]


def _compute_flat_tensor_bytes(strategy: ParameterServer) -> dict[str, int]:
    layout = strategy.flat.layout
    return {"weights": layout.weight_bytes, "buffers": layout.buffer_bytes}


def _compute_frozen_parameter_bytes(strategy: Strategy) -> int:
    from stratbench.telemetry.shards import get_local_shard

    frozen = [get_local_shard(p) for p in strategy.model.parameters() if not p.requires_grad]
    return sum(p.nbytes for p in frozen)


def _count_flops_per_sample(
    request: Request, forward_flops: float, blocks: Blocks | None
) -> dict[str, float]:
    """Return floating-point operations per sample of the whole model, as a job counts them.

    `forward_flops` are those of the traced forward, for a user's model that cannot be counted separately.
    """
    s = request.settings
    own = json.dumps(s.own_model, sort_keys=True)
    try:
        return _count_model_flops_per_sample(
            s.model, own, request.classes, request.input_shape, blocks
        )
    except Exception:  # a user's model may raise any exception
        if s.own_model is None:
            raise
        return {
            "forward_flops_per_sample": forward_flops,
            "training_flops_per_sample": TRAINING_FLOPS * forward_flops,
        }


@cache
def _count_model_flops_per_sample(
    model: str, own_model_json: str, classes: int, shape: tuple[int, ...], blocks: Blocks | None
) -> dict[str, int]:
    """Count a model's floating-point operations per sample, once per process."""
    from stratbench.extensions.plan.footprint.fake import build_fake_model

    network = models.make_metadata_or_keep_name(model, json.loads(own_model_json))
    return count_flops(partial(build_fake_model, network, classes, shape, blocks), shape)


def _select_highest_moments(moments: list[Moment], min_batch: int) -> list[Moment]:
    """Return the moments that have the most memory for some batch size.

    Moments with different reductions are compared separately. `min_batch` is the smallest batch.
    """
    highest = []
    for sums in dict.fromkeys(m.reduction_sums for m in moments):
        same_sums = [m for m in moments if m.reduction_sums == sums]
        highest += [
            same_sums[i]
            for i in find_highest_line_indices([m.total_bytes for m in same_sums], min_batch)
        ]
    return highest


def find_highest_line_indices(lines: list[Affine], min_batch: int = 1) -> list[int]:
    """Return the indices of the lines that are highest for some batch size.

    Batches have `min_batch` samples or more. The indices are ordered by ascending slope.
    """
    batch, envelope = float(min_batch), []
    current = max(
        range(len(lines)), key=lambda i: (lines[i].evaluate_at(min_batch), lines[i].per_sample)
    )
    while True:
        envelope.append(current)
        best, best_at = None, float("inf")
        for i, line in enumerate(lines):
            steeper = line.per_sample - lines[current].per_sample
            if steeper > 0:
                meets_at = max((lines[current].fixed - line.fixed) / steeper, batch)
                if meets_at < best_at or (
                    meets_at == best_at and line.per_sample > lines[best].per_sample
                ):
                    best, best_at = i, meets_at
        if best is None:
            return envelope
        current, batch = best, best_at


def _find_evaluation_peak(trace: OperatorTrace, first_event: int) -> MemoryPeak:
    stop = len(trace.events)
    live = trace.list_live_bytes_after_events(first_event, stop)
    at = max(range(len(live)), key=live.__getitem__)
    return MemoryPeak(
        live[at],
        "evaluation",
        drop_purposes_without_bytes(trace.get_device_bytes_by_purpose(first_event + at)),
    )


def drop_purposes_without_bytes(bytes_by_purpose: dict[str, int]) -> dict[str, int]:
    return {k: v for k, v in bytes_by_purpose.items() if v}
