"""Stage 3: checks that every model family, precision and strategy trains as `single` does."""

from __future__ import annotations

import math
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stage import Stage
from stratbench.train import loop
from stratbench.train import worker as worker_process
from stratbench.train.beside.profile import record_profiler_trace
from stratbench.train.job import Job
from stratbench.workload.data.device_data import draw_epoch_order
from subject import (
    VARIANTS,
    Trainee,
    differ,
    job_of,
    prepared,
    served_by_threads,
    set_up,
    settings,
    spec_of,
    trace_events,
    weights_of,
)

FAMILIES = (
    "vgg-compact", "resnet-compact", "convnext-compact", "densenet-compact", "efficientnet-compact",
)  # fmt: skip
BATCH, STEPS = 8, 3
CLASSES = spec_of(BATCH)["classes"]
#: How far losses (of single's) and weights (of single's change) may be from single's, by precision.
LIMITS = {
    "fp64": (1e-9, 1e-9), "fp32": (1e-4, 1e-2), "tf32": (1e-2, 0.2), "bf16": (5e-2, 0.5),
    "fp16": (2e-2, 0.5),
}  # fmt: skip
#: FSDP2's own mixed precision is other arithmetic than autocast.
POLICY_LIMITS = (0.1, 1.0)
#: cuDNN's and PyTorch's kernels that change an image's memory format.
TRANSPOSES = re.compile("nchwToNhwc|nhwcToNchw|transpose", re.IGNORECASE)


@dataclass
class Trained:
    """What a few steps gave: losses, weights before and after, how many outputs had which layout."""

    losses: list[float]
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    layouts: dict[str, int]
    transposes: int | None


def run(stage: Stage) -> None:
    data_dir = prepared(stage, BATCH * STEPS)
    families = FAMILIES[:1] if stage.small else FAMILIES
    precisions = ("fp64", "fp32", "tf32", "bf16", "fp16") if stage.on_cuda else ("fp64", "fp32")
    variants = [v for v in VARIANTS if stage.on_cuda or v != "fsdp-policy"]
    first = job_of(settings("ddp", stage.device), data_dir, stage.folder("group"))
    device = torch.device(stage.device, 0) if stage.on_cuda else torch.device("cpu")
    worker_process.configure_torch(first.settings, device, 1)
    worker_process.join_process_group(first, 0, device)
    tensor_float(stage, device)
    missed = []
    for precision in precisions:
        for family in families:
            single: Trained | None = None
            for variant in variants:
                name = f"{family} {precision} {variant}"
                if stage.left_s < 8:
                    missed.append(name)
                    continue
                with stage.attempt(name):
                    s = settings(variant, stage.device, model=family, precision=precision)
                    job = job_of(s, data_dir, stage.folder(name.replace(" ", "-")))
                    # A profiled step for one family with BatchNorm and one without is enough.
                    wanted = stage.on_cuda and precision == "bf16" and family in FAMILIES[1:3]
                    server = served_by_threads(job) if variant == "ps" else nullcontext()
                    with server:
                        found = train(set_up(job), job, profiled=wanted and variant != "ps")
                    if single is None:
                        single = found
                    compare(stage, name, single, found, precision)
    if missed:
        stage.check("all combinations were reached in time", False, f"not {len(missed)}: {missed}")
    stage.needs_gpu(
        "tf32, bf16, fp16 and FSDP2's own mixed precision", "steps do not synchronise the device",
        "equal counts of transpose kernels",
    )  # fmt: skip


def train(t: Trainee, job: Job, profiled: bool) -> Trained:
    """Warm up, then one epoch of `STEPS` steps; a collective's must not synchronise the device."""
    strategy, data, worker = t.strategy, t.data, t.worker
    order = draw_epoch_order(data.train_samples, worker.settings.seed, 0).to(worker.device)
    loop.warm_up(strategy, data, worker)
    before = weights_of(strategy)
    layouts = count_layouts(strategy)
    losses = []
    if strategy.kind == "server":
        for _, where in strategy.iter_tickets():
            losses.append(strategy.step(*data.make_training_batch(order[where])))
        strategy.load_snapshot(0)  # the servers' weights, as an evaluation takes them
    else:
        refuse_to_synchronise(worker.device, True)
        try:
            for indices in strategy.batches(order, 0):
                losses.append(strategy.step(*data.make_training_batch(indices)))
        finally:
            refuse_to_synchronise(worker.device, False)
    after = weights_of(strategy)
    counted = dict(layouts)
    kernels = None
    if profiled:
        trace = job.folder.profile_trace_path
        record_profiler_trace(strategy, data, worker, trace)
        kernels = sum(bool(TRANSPOSES.search(k["name"])) for k in trace_events(trace, "kernel"))
    strategy.close()
    return Trained([float(x) for x in losses], before, after, counted, kernels)


def refuse_to_synchronise(device: torch.device, on: bool) -> None:
    """While on, an operator that waits for the device raises."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error" if on else "default")


def count_layouts(strategy: Any) -> Counter[str]:
    """Counts, from now on, the outputs of convolutions and BatchNorms by memory format."""
    counts: Counter[str] = Counter()

    def see(module: Any, inputs: Any, output: torch.Tensor) -> None:
        last = output.is_contiguous(memory_format=torch.channels_last)
        counts["channels_last" if last else "contiguous"] += 1

    for module in strategy.model.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.BatchNorm2d)):
            module.register_forward_hook(see)
    return counts


def compare(stage: Stage, name: str, single: Trained, found: Trained, precision: str) -> None:
    if found is single:
        moved = differ(found.after, found.before, found.after)
        finite = all(math.isfinite(x) for x in found.losses)
        # Guessing costs ln(classes), and no cross entropy is below 0.
        possible = 0 < found.losses[0] < 3 * math.log(CLASSES)
        # In fp16 all of so few steps may be spent on finding the loss scale.
        holds = finite and possible and (moved == 1.0 or precision == "fp16")
        stage.check(f"{name} trains", holds, f"losses {found.losses}")
        return
    own_arithmetic = name.endswith("policy") and precision in ("bf16", "fp16")
    of_losses, of_weights = POLICY_LIMITS if own_arithmetic else LIMITS[precision]
    pairs = zip(single.losses, found.losses, strict=True)
    loss_off = max(abs(a - b) / abs(a) for a, b in pairs)
    apart = differ(single.before, single.after, found.after)
    same_start = all(torch.equal(a, b) for a, b in zip(single.before, found.before, strict=True))
    holds = loss_off <= of_losses and apart <= of_weights and same_start
    holds = holds and found.layouts == single.layouts
    said = f"losses {loss_off:.1e}, weights {apart:.1e} off; {found.layouts}"
    if found.transposes is not None:
        # FSDP2 copies in and out; none of its copies is a transposition.
        holds = holds and found.transposes == single.transposes
        said += f"; {found.transposes} transposing kernels, single {single.transposes}"
    stage.check(f"{name} is single", holds, said)


def tensor_float(stage: Stage, device: torch.device) -> None:
    """fp32 is computed in fp32; tf32 is TensorFloat-32 where the GPU has it."""
    has = stage.on_cuda and torch.cuda.get_device_capability(device)[0] >= 8
    for precision in ("tf32", "fp32"):
        worker_process.configure_torch(
            settings("single", stage.device, precision=precision), device, 1
        )
        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(512, 512, generator=generator).to(device) for _ in range(2))
        image = torch.randn(8, 64, 16, 16, generator=generator).to(device)
        weight = torch.randn(64, 64, 3, 3, generator=generator).to(device)
        off = {}
        for what, function, operands in (
            ("product", torch.matmul, (a, b)), ("convolution", torch.conv2d, (image, weight)),
        ):  # fmt: skip
            exact = function(*(t.double() for t in operands))
            off[what] = float((function(*operands).double() - exact).norm() / exact.norm())
        coarse = precision == "tf32" and has
        stage.check(
            f"{precision} is computed as such",
            all((error > 2e-5) == coarse for error in off.values()),
            ", ".join(f"{what} {error:.1e} off" for what, error in off.items()),
        )
