"""Answers which strategies fit a model on some GPUs, with batch, speed and cost.

The answer is for `stratbench plan --model NAME --gpus N`. Nothing is trained, and no study has to name the
model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from stratbench.cell.installation import PACKAGE
from stratbench.extensions.plan.check import (
    DryRun,
    Network,
    dry_run_requests,
    find_cell_refusal_reason,
)
from stratbench.extensions.plan.device_rates import (
    Device,
    find_gpu_datasheet,
    format_known_gpu_names,
    make_gpu_device,
)
from stratbench.extensions.plan.duration import BEST, USUAL, WORST, predict_step_duration
from stratbench.extensions.plan.footprint.footprint import Footprint
from stratbench.extensions.plan.needs import (
    CellToPlan,
    compute_data_bytes_on_device,
    derive_needs,
    make_cell_to_plan,
)
from stratbench.extensions.plan.one_model.one_network import make_model_study
from stratbench.extensions.plan.one_model.rows import (
    MICROBATCHES_A_STAGE,
    describe_unplanned_variants,
    list_model_split_variants,
)
from stratbench.extensions.plan.public_runs import estimate_time_from_public_runs
from stratbench.extensions.plan.schedule import FITS, classify_memory_fit
from stratbench.strategies import acceptance
from stratbench.study import resources
from stratbench.study.config.messages import ConfigError
from stratbench.study.job_environment import set_job_environment
from stratbench.study.model_question import Question
from stratbench.telemetry.machine.hardware import Datasheet
from stratbench.workload.data.dataset import Dataset, get_sample_kind

TEMPLATE = Path(__file__).parent / "templates" / "model_answer.yaml"
#: Number of GPUs per node if no config sets it.
NODE_GPUS = 8
#: Length of the training if the question sets none: in tokens for texts, and in samples for other data.
USUAL_TOKENS, USUAL_IMAGES = 1e9, 1e6


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on the GPU that needs most memory in a training step.

    Attributes:
        allocated_bytes: Value that torch.cuda.max_memory_allocated shows.
        reserved_bytes: Memory that PyTorch's allocator reserves, in expandable segments.
        shown_bytes: Value that nvidia-smi shows, with the CUDA context and NCCL's buffers.
    """

    allocated_bytes: int
    reserved_bytes: int
    shown_bytes: int


@dataclass(frozen=True)
class StrategyAnswer:
    """Prediction for a strategy, with or without activation checkpointing, at its largest batch.

    Attributes:
        strategy: Name of the strategy or variant.
        uses_checkpointing: Whether activations are checkpointed.
        reason: Why nothing is predicted; empty if something is.
        verdict: FITS, TIGHT or DOES_NOT_FIT, for that batch.
        micro_batch: Size of a micro-batch: samples that a copy of the model computes at once. If no size
            fits, it is the smallest one.
        global_batch: Samples per step on all GPUs.
        memory: Memory of a GPU with that batch.
        step_s: Seconds per step at best, at worst, and as a single time to compare by; None if the
            GPU's rate is unknown.
        time_source: Public runs behind the range; empty if it follows from the datasheet.
    """

    strategy: str
    uses_checkpointing: bool
    reason: str = ""
    verdict: str = ""
    micro_batch: int = 0
    global_batch: int = 0
    memory: GpuMemory | None = None
    step_s: tuple[float, float, float] | None = None
    time_source: str = ""

    @property
    def low_high_usual_samples_per_s(self) -> tuple[float, float, float] | None:
        """Samples per second on all GPUs: lowest, highest, and usual. None if unpredicted."""
        if self.step_s is None:
            return None
        best_s, worst_s, usual_s = self.step_s
        return self.global_batch / worst_s, self.global_batch / best_s, self.global_batch / usual_s


@dataclass(frozen=True)
class Answer:
    """Answer to the question which strategies fit a model on some GPUs.

    `strategy_answers` are sorted, with the fastest that fits first. `text_on_unplanned_variants` counts and
    names what was not planned.
    """

    question: Question
    gpu: Datasheet
    cluster: Mapping[str, Any]
    data: Dataset
    optimizer: str
    precision: str
    parameters: int
    strategy_answers: list[StrategyAnswer]
    variants: Mapping[str, Any]
    reasons_for_left_out_strategies: list[str]
    text_on_unplanned_variants: str

    @property
    def throughput_unit(self) -> str:
        """Unit of throughput: tokens, images or waveforms."""
        return "tokens" if self.data.is_text else get_sample_kind(self.data.shape)

    @property
    def num_training_samples_or_tokens(self) -> float:
        """Number of tokens (for texts) or samples of the whole training."""
        if self.data.is_text:
            return self.question.tokens or USUAL_TOKENS
        return self.question.samples or USUAL_IMAGES

    def compute_low_high_usual_throughput(
        self, strategy_answer: StrategyAnswer
    ) -> tuple[float, float, float]:
        """Return a choice's throughput in tokens or samples per second.

        The three values are the worst, the best, and the one to compare by.
        """
        each = self.data.shape[0] if self.data.is_text else 1
        return tuple(each * rate for rate in strategy_answer.low_high_usual_samples_per_s)


def answer_model_question(
    config: Mapping[str, Any],
    question: Question,
    report_first: Callable[[Answer], None] = lambda _: None,
) -> Answer:
    """Answer which strategies fit a model on a number of GPUs.

    Args:
        config: Raw config with models, data sets and cluster; it may be empty.
        question: The question.
        report_first: Called with the answer for the first strategy, as soon as it is known.

    Raises:
        ConfigError: If the model, data set or GPU is unknown, or the config has mistakes.
    """
    sheet = _find_gpu_datasheet(question, config)
    template = _fill_study_template(question, config)
    config = dict(config) | {
        "cluster": {"gpus_per_node": NODE_GPUS} | (config.get("cluster") or {})
    }
    config, study, left_out = make_model_study(
        config, question.model, question.dataset, question.sequence, template
    )
    cluster = config["cluster"]
    if question.price is not None:
        cluster = cluster | {"price_per_gpu_hour": question.price}
    set_job_environment(config, str(PACKAGE.parent))
    rows = {
        name: template["variants"].get(name, {"strategy": name})
        for name in dict.fromkeys(cell.strategy for cell in study.cells)
    }
    unplanned = describe_unplanned_variants(
        question.gpus, _choose_gpus_per_node(question, config), rows
    )
    subjects = [_remove_evaluation(make_cell_to_plan(config, study, cell)) for cell in study.cells]
    first, data = subjects[0].settings, subjects[0].data
    _check_training_length(question, data)
    dry_runs: dict[Any, DryRun] = {}
    networks: dict[Network, Any] = {}

    def make_answer_for_cells(cells_to_answer: Iterable[CellToPlan]) -> Answer:
        choices = [
            _make_strategy_answer(
                s, networks[Network.from_request(s.request)], dry_runs[s.request], sheet, cluster
            )
            for s in cells_to_answer
        ]
        return Answer(
            question, sheet, cluster, data, first.optimizer, first.precision,
            max(n.num_parameters for n in networks.values()), sorted(choices, key=_make_speed_sort_key),
            template["variants"], list(dict.fromkeys(left_out)), unplanned,
        )  # fmt: skip

    folder = Path(config["results"]) / "plan-cache"
    early = [s for s in subjects if s.cell.strategy == subjects[0].cell.strategy]
    for some in (early, subjects):
        with redirect_stdout(sys.stderr):
            of_networks, of_requests = dry_run_requests([s.request for s in some], folder)
        networks |= of_networks
        dry_runs |= of_requests
        if some is early and len(early) < len(subjects):
            report_first(make_answer_for_cells(early))
    return make_answer_for_cells(subjects)


def _find_gpu_datasheet(question: Question, config: Mapping[str, Any]) -> Datasheet:
    if question.gpu:
        return find_gpu_datasheet(question.gpu, "--gpu")
    if named := (config.get("cluster") or {}).get("gpu"):
        return find_gpu_datasheet(named)
    raise ConfigError(
        f"--gpu: is missing; name a GPU, such as 'H100 80GB'. Known GPUs: {format_known_gpu_names()}"
    )


def _check_training_length(question: Question, data: Dataset) -> None:
    """Raise ConfigError for `--samples` with texts, or `--tokens` with other data."""
    length, data_kind = question.samples, "texts"
    wrong_option, right_option = "--samples", "--tokens"
    if not data.is_text:
        length, data_kind = question.tokens, get_sample_kind(data.shape)
        wrong_option, right_option = "--tokens", "--samples"
    if length is not None:
        raise ConfigError(
            f"{wrong_option} {length:g}: does not apply, since {question.model} is trained on {data_kind}; "
            f"give {right_option}"
        )


def _choose_gpus_per_node(question: Question, config: Mapping[str, Any]) -> int:
    """Return the largest number of GPUs per node that fills all nodes evenly."""
    node = (config.get("cluster") or {}).get("gpus_per_node", NODE_GPUS)
    return next(n for n in range(min(node, question.gpus), 0, -1) if question.gpus % n == 0)


def _fill_study_template(question: Question, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's study, adapted to the question's number of GPUs.

    The study has the form that `make_model_study` takes.
    """
    template = yaml.safe_load(TEMPLATE.read_text(encoding="utf-8"))
    strategies = template.pop("strategies")["alone" if question.gpus == 1 else "together"]
    node = _choose_gpus_per_node(question, config)
    divided = list_model_split_variants(node)
    template["variants"] |= divided
    strategies += divided
    # All strategies can divide this batch. The largest batch that fits follows later, from the footprint.
    template["experiment"]["global_batch"] = question.gpus * node * MICROBATCHES_A_STAGE
    template["numbers"] = {"gpus": {"strategies": strategies, "gpus": [question.gpus]}}
    return template


def _remove_evaluation(s: CellToPlan) -> CellToPlan:
    """Return a copy of the cell without evaluation.

    A question about a model leaves the batch size of an evaluation open.
    """
    return replace(s, request=replace(s.request, eval_batch=0))


def _make_strategy_answer(
    s: CellToPlan,
    network_check: Any,
    dry_run: DryRun,
    datasheet: Datasheet,
    cluster: Mapping[str, Any],
) -> StrategyAnswer:
    checkpointing = s.settings.activation_checkpointing
    reason = find_cell_refusal_reason(s, network_check, dry_run) or dry_run.unpredicted_reason
    if dry_run.footprint is None or reason:
        return StrategyAnswer(s.cell.strategy, checkpointing, reason=reason or "")
    least = acceptance.compute_min_samples_per_step(
        network_check.has_batchnorm, s.settings.gradient_accumulation_steps
    )
    device = make_gpu_device(datasheet, s.settings.precision, cluster)
    return predict_strategy_answer(s, dry_run.footprint, device, cluster, least)


def predict_strategy_answer(
    s: CellToPlan,
    footprint: Footprint,
    device: Device,
    cluster: Mapping[str, Any],
    min_samples: int = 1,
    batch: int | None = None,
    reads_text: bool | None = None,
) -> StrategyAnswer:
    """Predict memory and time of a cell at the largest batch that fits a device.

    If none fits, the smallest batch is predicted.

    Args:
        s: The cell, with any batch.
        footprint: Footprint of the cell's model and strategy.
        device: One GPU.
        cluster: The block `cluster` of the config.
        min_samples: Minimum number of samples that a copy of the model must compute at once.
        batch: Samples per step of a copy of the model, in place of the largest that fits.
        reads_text: Whether the cell's samples are texts; None if the data set says so.
    """
    threads, parts = device.resident_threads, s.request.num_accumulated_parts
    margin = cluster["memory_margin"]
    if batch is None:
        data_bytes = partial(compute_data_bytes_on_device, s)
        batch = footprint.largest_batch(
            device.compute_max_fitting_bytes(margin), threads, data_bytes
        )
        batch = max(batch // parts * parts, -(-min_samples // parts) * parts)
    settings = replace(s.settings, per_worker_batch=batch, global_batch=batch * s.mesh.replicas)
    samples = max(s.data.train_samples, settings.global_batch)
    s = replace(s, settings=settings, data=replace(s.data, train_samples=samples))
    fullest = footprint.find_fullest_rank_footprint(batch, threads)
    needs = derive_needs(s, fullest, resources.count_nodes(s.cell, cluster))
    needed_bytes = fullest.compute_needed_bytes(batch, threads) + needs.data_bytes
    reserved_bytes = fullest.compute_reserved_bytes(batch, threads) + needs.data_bytes
    step_s, runs = None, None
    if device.flops_per_s is not None:
        *ends, usual = [
            predict_step_duration(device, s, needs, rates) for rates in (BEST, WORST, USUAL)
        ]
        is_text = s.data.is_text if reads_text is None else reads_text
        runs = estimate_time_from_public_runs(device.name, settings, is_text, usual, num_steps=1)
        step_s = (*(runs or (step.seconds for step in ends)), usual.seconds)
    return StrategyAnswer(
        s.cell.strategy,
        settings.activation_checkpointing,
        verdict=classify_memory_fit(needed_bytes, device, margin),
        micro_batch=batch // parts,
        global_batch=settings.global_batch,
        memory=GpuMemory(
            needed_bytes,
            reserved_bytes,
            reserved_bytes + device.reserve_bytes,
        ),
        step_s=step_s,
        time_source=runs.source if runs else "",
    )


def _make_speed_sort_key(strategy_answer: StrategyAnswer) -> tuple[int, float]:
    """Return a key that sorts the fastest strategy that fits first, unpredicted ones last."""
    order = 2 if not strategy_answer.verdict else 0 if strategy_answer.verdict == FITS else 1
    if strategy_answer.low_high_usual_samples_per_s and order == 0:
        return order, -strategy_answer.low_high_usual_samples_per_s[2]
    return order, strategy_answer.memory.allocated_bytes if strategy_answer.memory else 0.0
