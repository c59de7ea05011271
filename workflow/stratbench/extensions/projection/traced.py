"""A step's schedule from its trace on fake tensors: the collectives, and computation between."""

from __future__ import annotations

from stratbench.extensions.plan.device_rates import Device
from stratbench.extensions.plan.footprint.request import Request
from stratbench.extensions.projection.replay import Schedule, TracedPhase, schedule_of

#: Assumed rate of a CPU core if the plan lacks it: to weigh bytes against operations.
CPU_MEMORY_BYTES_PER_S = 8e9


def traced_schedule(request: Request, samples: int, device: Device) -> Schedule:
    """Return the schedule of one training step of rank 0 with `samples` samples; takes seconds.

    Only fractions of the step's computation come from the device's rates. Its total is measured.

    Args:
        request: The request.
        samples: Samples of the step.
        device: The device.
    """
    from stratbench.extensions.plan.footprint import fake  # imports PyTorch

    trace, _ = fake.traced_steps(request, [samples])
    flops_per_s = device.flops_per_s or 1e12
    bytes_per_s = device.memory_bytes_per_s or CPU_MEMORY_BYTES_PER_S

    def seconds(flops: float, n_bytes: float) -> float:
        return flops / flops_per_s + n_bytes / bytes_per_s

    phases = [
        TracedPhase(
            phase.name,
            seconds(phase.flops, phase.touched_bytes),
            tuple(phase.collectives),
            tuple(seconds(*reached) for reached in phase.reached),
            phase.operations,
        )
        for phase in trace.phases[1:-1]
    ]
    return schedule_of(phases, request.on_cuda)
