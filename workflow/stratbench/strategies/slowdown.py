"""Slows chosen workers down, in the same way under every strategy, to study stragglers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from stratbench.cell.settings import Settings


class Slowdown:
    """Slows a worker by a sleep between forward and backward of each step.

    With factor f, a step takes f times as long as the same computation without the delay, which is measured
    before the training. The host first waits for the GPU; otherwise the sleep would overlap with the GPU's
    computation. `sigma` multiplies each step's time by a log-normal factor (at least 1, since a worker cannot
    become faster) from a generator that the cell's seed and the rank determine.
    """

    def __init__(
        self, compute_s: float, factor: float, sigma: float, seed: int, device: torch.device
    ) -> None:
        import random

        self.device = device
        self.compute_s = compute_s
        self.factor = factor
        self.sigma = sigma
        self.factors: list[float] = []
        self._random = random.Random(seed)
        self._active = factor > 1 or sigma > 0

    @classmethod
    def from_settings(
        cls,
        s: Settings,
        rank: int,
        model: nn.Module,
        shape: tuple[int, ...],
        classes: int,
        device: torch.device,
    ) -> Slowdown:
        """Return the slowdown that the settings define for a rank; by default it never sleeps.

        Args:
            s: Settings of the cell.
            rank: Rank of the worker.
            model: The bare model.
            shape: Shape of a sample.
            classes: Number of classes.
            device: Device of the worker.
        """
        block = s.slowdown or {}
        factor = float(block.get("factor", 1)) if rank in block.get("workers", []) else 1.0
        sigma = float(block.get("sigma", 0))
        active = factor > 1 or sigma > 0
        compute_s = measure_forward_backward_s(s, model, shape, classes, device) if active else 0.0
        return cls(compute_s, factor, sigma, s.seed * 1009 + rank, device)

    def sleep_before_backward(self) -> None:
        if not self._active:
            return
        from stratbench.telemetry.clock import synchronise

        jitter = max(self._random.lognormvariate(0.0, self.sigma), 1.0) if self.sigma else 1.0
        self.factors.append(self.factor * jitter)
        synchronise(self.device)
        time.sleep((self.factors[-1] - 1) * self.compute_s)

    def summarize_slowdown(self) -> dict[str, Any]:
        """Return this worker's slowdown factors and its step time without slowdown, for the record."""
        return {
            "factor": self.factor,
            "sigma": self.sigma,
            "step_without_ms": self.compute_s * 1e3,
            "mean_factor": sum(self.factors) / len(self.factors),
        }


def measure_forward_backward_s(
    s: Settings, model: nn.Module, shape: tuple[int, ...], classes: int, device: torch.device
) -> float:
    """Return the median seconds of the unwrapped model's forward and backward on one step's samples.

    The model's state does not change.

    Args:
        s: Settings of the cell.
        model: The bare model.
        shape: Shape of a sample.
        classes: Number of classes.
        device: Device of the worker.
    """
    import statistics

    from stratbench.strategies import get_strategy_class
    from stratbench.telemetry.clock import synchronise
    from stratbench.workload.data.device_data import make_example_batch
    from stratbench.workload.network.precision import (
        create_autocast_context,
        get_batch_memory_format,
    )
    from stratbench.workload.tasks import compute_loss_and_weight, get_task, has_value_targets

    state = {k: v.clone() for k, v in model.state_dict().items()}
    dtype = next(model.parameters()).dtype
    samples = get_strategy_class(s.strategy).samples_per_step(s) // s.gradient_accumulation_steps
    layout = get_batch_memory_format(s.precision, device.type)
    task = get_task(s, shape)
    of = has_value_targets(task), s.task == "text-classification"
    x, y = make_example_batch(samples, shape, classes, device, dtype, layout, *of)
    times = []
    for _ in range(4):
        synchronise(device)
        begun = time.perf_counter()
        with create_autocast_context(s.precision, device):
            loss, _ = compute_loss_and_weight(task, model(x), y)
        loss.backward()
        synchronise(device)
        times.append(time.perf_counter() - begun)
        model.zero_grad(set_to_none=True)
    model.load_state_dict(state)
    return s.gradient_accumulation_steps * statistics.median(times[1:])
