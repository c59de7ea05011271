"""Builds the schedule of a training step from a trace on fake tensors."""

from __future__ import annotations

from stratbench.extensions.plan.device_rates import Device
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.projection.replay import Schedule, TracedPhase, build_schedule

#: Memory bandwidth of a CPU core that is assumed if the plan has none. Only the ratio to the core's FLOP/s
#: matters.
CPU_MEMORY_BYTES_PER_S = 8e9


def trace_schedule(request: Request, samples: int, device: Device) -> Schedule:
    """Trace one training step of rank 0, and return its schedule. This takes seconds.

    From the device's rates follow only shares of the step's computation. Its total time is measured.

    Args:
        request: Request of the cell to trace.
        samples: Samples of the step.
        device: Device whose rates are used.
    """
    # Imported here, because this module loads PyTorch, which takes seconds.
    from stratbench.extensions.plan.footprint import fake

    trace, _ = fake.trace_training_steps(request, [samples])
    flops_per_s = device.flops_per_s or 1e12
    bytes_per_s = device.memory_bytes_per_s or CPU_MEMORY_BYTES_PER_S

    def compute_operation_s(flops: float, n_bytes: float) -> float:
        return flops / flops_per_s + n_bytes / bytes_per_s

    phases = [
        TracedPhase(
            phase.name,
            compute_operation_s(phase.flops, phase.touched_bytes),
            tuple(phase.collectives),
            tuple(
                compute_operation_s(*reached)
                for reached in phase.flops_and_bytes_before_collectives
            ),
            phase.operations,
        )
        for phase in trace.phases[1:-1]
    ]
    return build_schedule(phases, request.is_on_cuda)
