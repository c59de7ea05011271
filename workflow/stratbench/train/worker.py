"""The process of one worker: it joins others, trains, and writes its measurements.

The fork server imports this module once, so that forked processes need not import torch. The import must not
allocate tensors or start threads.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from stratbench.cell.extensions import import_attribute, iter_imported_additions
from stratbench.cell.run_folder import format_worker_name
from stratbench.cell.settings import Settings
from stratbench.cell.text.help_page import format_help_address
from stratbench.strategies import acceptance, make_strategy
from stratbench.strategies.base import Strategy, Worker
from stratbench.strategies.slowdown import Slowdown
from stratbench.telemetry.clock import Phases
from stratbench.telemetry.compiling import CompileWatch
from stratbench.telemetry.flops import count_flops
from stratbench.telemetry.heartbeat import STACK_SIGNAL, Heartbeat
from stratbench.telemetry.machine.foreign_processes import find_other_gpu_users, find_worker_gpu
from stratbench.telemetry.machine.nvml import Nvml
from stratbench.telemetry.memory import MemoryMeter
from stratbench.telemetry.provenance import collect_worker_provenance, hash_state_dict
from stratbench.telemetry.timeline import PhaseLog
from stratbench.train import loop
from stratbench.train.beside.profile import Profile
from stratbench.train.job import Job
from stratbench.train.locks import lock_cell_as_worker
from stratbench.train.nodes.rendezvous import connect_tcp_store
from stratbench.train.out_of_memory import is_out_of_memory_error
from stratbench.workload import task_trial, tasks
from stratbench.workload.data.device_data import DeviceData
from stratbench.workload.data.sources import DataError
from stratbench.workload.generators import OTHER_START, seed_random_generators
from stratbench.workload.network import models
from stratbench.workload.network.precision import get_batch_memory_format, get_weights_dtype
from stratbench.workload.users_code import ModelError, Refused

if TYPE_CHECKING:
    from stratbench.workload.network.trial import Trial

models.import_torchvision()
import torchvision.models  # noqa: E402, F401

EXIT_ERROR, EXIT_OOM = 1, 3
#: Longest time in seconds that a worker waits in one collective. The worker and the cell then fail.
COLLECTIVE_S = 600


def main(job_json: str, rank: int, local_rank: int) -> None:
    """Run the process of one worker, and exit.

    The exit code is 0 after a result, 3 without memory, and 1 after other errors.

    Args:
        job_json: Job of the cell, from `Job.to_json`.
        rank: Rank of the worker.
        local_rank: Rank of the worker on its node.
    """
    job = Job.from_json(job_json)
    redirect_output(job.folder.get_log_path(format_worker_name(rank)))
    write_stacks_on_signal(job.folder.get_stack_trace_path(format_worker_name(rank)))
    lock_cell_as_worker(job.folder.log_dir)
    if job.deadline_s is not None and time.monotonic() >= job.deadline_s:
        # The worker just ends: its agent detects that the time limit is over, and reports it.
        exit_immediately(EXIT_ERROR)
    try:
        result = train_as_worker(job, rank, local_rank)
    except Exception as e:
        traceback.print_exc()
        outcome, code = build_error_result_and_exit_code(e)
        # Only a RuntimeError that is not of the host's allocator may mean that the GPU is full.
        of_gpu = isinstance(e, RuntimeError) and "CPUAllocator" not in str(e)
        if code == EXIT_OOM and job.use_cuda and of_gpu:
            outcome["others"] = find_other_programs_on_gpu(job, rank)
        job.folder.write_worker_result(rank, outcome)
        exit_immediately(code)
    job.folder.write_worker_result(rank, result)
    exit_immediately(0)


def redirect_output(path: Path) -> None:
    """Redirect stdout and stderr of this process to a file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def write_stacks_on_signal(path: Path) -> None:
    """Make this process write the stacks of its threads to a file on each STACK_SIGNAL."""
    file = path.open("w", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)


def exit_immediately(code: int) -> None:
    """End the process without clean-up, which could wait forever for a lost worker."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class WorkerStart(NamedTuple):
    """State of a worker before it loads data and model: strategy, clocks and meters."""

    strategy: Strategy
    device: torch.device
    memory: MemoryMeter
    heartbeat: Heartbeat
    log: PhaseLog
    phases: Phases
    #: Seconds from the start of the cell to the start of this worker.
    started_s: float


def start_worker(job: Job, worker_number: int, local_rank: int) -> WorkerStart:
    """Configure PyTorch in a worker process, and create what the worker measures with.

    Args:
        job: Job of the cell.
        worker_number: Rank of the worker. If each worker is a SLURM job, the number of that job.
        local_rank: Rank of the worker on its node.
    """
    s = job.settings
    device = torch.device("cuda", local_rank) if job.use_cuda else torch.device("cpu")
    configure_torch(s, device, job.threads)
    # The meter measures the memory without model and data, so it is created before them.
    memory = MemoryMeter(device)
    heartbeat = Heartbeat(job.folder.get_heartbeat_path(worker_number))
    log = PhaseLog(
        job.folder.get_phase_log_path(worker_number),
        worker_number,
        job.origin_s,
        heartbeat.record_progress,
    )
    strategy = make_strategy(s.strategy, s.options)
    return WorkerStart(strategy, device, memory, heartbeat, log, Phases(device, log), job.elapsed_s)


class BuiltModel(NamedTuple):
    """A worker's model and task, before the strategy wraps the model."""

    #: Name of a built-in model, or description of a user's own model.
    network: str | models.Model
    model: nn.Module
    #: Shape of a sample as the model takes it.
    shape: tuple[int, ...]
    task: tasks.Task
    loss_kind: tasks.LossKind
    #: Name and modules of each shard group, in the order of forward.
    groups: list[tuple[str, list[nn.Module]]]
    #: Results of a trial step of a user's own model. None: the model is built-in.
    trial: Trial | None
    #: Description of the model for the record's entry `model`.
    facts: dict[str, Any]
    #: Names and sizes of the shard groups for the record's entry `wrap_groups`. They are computed before a
    #: strategy changes the parameters.
    group_sizes: list[dict[str, Any]]


def train_as_worker(job: Job, rank: int, local_rank: int) -> dict[str, Any]:
    """Train the cell as one worker, and return the worker's measurements.

    Args:
        job: Job of the cell.
        rank: Rank of the worker.
        local_rank: Rank of the worker on its node.
    """
    s, start = job.settings, start_worker(job, rank, local_rank)
    strategy, device, memory, heartbeat, log, phases, _ = start
    watch = create_compile_watch(job) if s.compile else None
    with phases("rendezvous"):
        if strategy.needs_group:
            join_process_group(job, rank, device)
    with phases("data"):
        data = load_data(job, device)
    with phases("build"):
        ready = set_up_model(
            s, strategy, data, device, rank,
            rank=rank, world_size=job.world_size, local_world_size=job.count_workers_on_node_of_rank(rank),
            folder=job.folder, compile_watch=watch, heartbeat=heartbeat, mesh=strategy.mesh(job.world_size),
        )  # fmt: skip
        built, worker = ready.built, ready.worker
    train = import_attribute(strategy.loop) if strategy.loop else loop.train
    # Rank 0 stores the epochs. In a strategy's own training loop, any worker may be the one that evaluates
    # and stores.
    progress = loop.EpochProgress(job.folder if rank == 0 or strategy.loop else None)
    classes = [*(activity for _, activity in iter_imported_additions("activity_class")), Profile]
    activities = [
        cls(job, strategy, data, worker, phases) for cls in classes if cls.is_active_in(job)
    ]
    result = train(strategy, data, worker, phases, log, memory, progress, activities)
    measured = build_worker_result(result, start, rank)
    if watch is not None:
        measured["compile"] = watch.summarize_compilations()
    reports_for_all = strategy.is_evaluator
    for activity in activities:
        measured |= activity.end(result.status, reports_for_all)
    if reports_for_all:
        measured |= count_sample_flops(s, built)
    add_model_descriptions(measured, ready, strategy, data)
    strategy.close()
    return measured


class ReadyWorker(NamedTuple):
    """A worker after the strategy has set up its model."""

    built: BuiltModel
    slowdown: Slowdown
    worker: Worker


def set_up_model(
    s: Settings,
    strategy: Strategy,
    data: DeviceData,
    device: torch.device,
    slowdown_number: int,
    **worker_fields: Any,
) -> ReadyWorker:
    """Build and check the model, and set it up with the strategy.

    Args:
        s: Settings of the cell.
        strategy: Strategy of the cell.
        data: Data set.
        device: Device of the worker.
        slowdown_number: Number of the worker in `slowdown.workers`.
        worker_fields: Fields of `Worker` that do not follow from the settings and the model.

    Raises:
        Refused: If the strategy cannot train a user's model.
    """
    built = build_model_and_task(s, strategy, data, device)
    slowdown = Slowdown.from_settings(
        s, slowdown_number, built.model, built.shape, data.meta["classes"], device
    )
    worker = Worker(
        settings=s,
        device=device,
        wrap_groups=built.groups,
        delay_step=slowdown.sleep_before_backward,
        task=built.task,
        has_weighted_loss=built.loss_kind.weighs,
        total_steps=s.count_steps(data.train_samples),
        input_shape=built.shape,
        trial=built.trial,
        initial_weights_hash=built.facts["initial_weights_sha256"],
        **worker_fields,
    )
    check_equal_initial_weights(worker)
    if built.trial is not None:
        acceptance.check_model(strategy, built.network, built.model, worker)
    two = data.make_test_batch(0, 2)
    with acceptance.check_setup_keeps_scores(strategy, built.network, built.model, worker, *two):
        strategy.setup(built.model, worker)
    # Each worker gets its own seed: from here on, only dropout and the like draw random numbers.
    seed_random_generators(s.seed + 1 + worker.random_stream_index)
    return ReadyWorker(built, slowdown, worker)


def check_equal_initial_weights(worker: Worker) -> None:
    """Raise ModelError unless all workers have the same initial weights. All workers must call this.

    Raises:
        ModelError: If the weights of two workers differ.
    """
    if worker.world_size == 1 or not dist.is_initialized():
        return
    own = torch.tensor(
        [*bytes.fromhex(worker.initial_weights_hash)], dtype=torch.uint8, device=worker.device
    )
    all_of_them = own.new_empty(worker.world_size * len(own))
    dist.all_gather_into_tensor(all_of_them, own)
    if len({bytes(start.tolist()) for start in all_of_them.cpu().split(len(own))}) > 1:
        raise ModelError(f"model {worker.settings.model!r}: {OTHER_START}")


def add_model_descriptions(
    measured: dict[str, Any], ready: ReadyWorker, strategy: Strategy, data: DeviceData
) -> None:
    """Add descriptions of model, task, device and slowdown to a worker's measurements.

    Args:
        measured: Measurements of the worker, to which the descriptions are added in place.
        ready: The worker after its set-up, which has the built model and its task.
        strategy: Strategy of the cell.
        data: Data set.
    """
    built, s = ready.built, ready.worker.settings
    name, classes = tasks.get_task_name(s, built.shape), built.facts["classes"]
    least, kind = data.meta.get("least_loss"), built.loss_kind
    measured |= {
        "model": built.facts,
        "task": tasks.describe_task(built.task, name, classes, built.shape, least, kind),
        "wrap_groups": built.group_sizes if strategy.uses_wrap_groups else [],
        "provenance": collect_worker_provenance(ready.worker.device),
    }
    details = measured["strategy"]["details"]
    if ready.slowdown.factors:
        details["slowdown"] = ready.slowdown.summarize_slowdown()
    if built.trial is not None and acceptance.updates_parameters_without_gradient(
        strategy, built.trial, s
    ):
        details["moved_by_zeros"] = list(built.trial.names_skipped_in_some_steps)


def create_compile_watch(job: Job) -> CompileWatch:
    """Return a counter of compilations, after choosing the folder for the cell's compiled code.

    No other cell uses this folder.
    """
    # No other cell uses this folder: with a shared one, later cells would be faster.
    if job.folder.node_local_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.folder.node_local_dir / "compiled")
    return CompileWatch()


def load_data(job: Job, device: torch.device) -> DeviceData:
    """Load the cell's data set for training on a device.

    The data have the shape and dtype that the model takes.

    Raises:
        DataError: If the data set was prepared again after the launcher had read it.
    """
    s = job.settings
    data = DeviceData.load_prepared_data_set(
        job.data_dir,
        device,
        models.compute_input_shape(models.get_model_or_name(s), job.data_shape),
        dtype=get_weights_dtype(s.precision),
        memory_format=get_batch_memory_format(s.precision, device.type),
        data_placement=s.data_placement,
    )
    if data.meta != job.data:
        raise DataError(
            f"{job.data_dir} was prepared again while the cell started; start the cell again"
        )
    return data


def build_model_and_task(
    s: Settings, strategy: Strategy, data: DeviceData, device: torch.device
) -> BuiltModel:
    """Build the model with its initial weights, and the task; describe both for the record.

    Args:
        s: Settings of the cell.
        strategy: Strategy of the cell.
        data: Data set.
        device: Device of the worker.
    """
    network, classes = models.get_model_or_name(s), data.meta["classes"]
    shape = models.compute_input_shape(network, tuple(data.meta["shape"]))
    model = models.build_model_for_training(
        network,
        classes,
        shape,
        seed=s.seed,
        device=device,
        dtype=get_weights_dtype(s.precision),
        checkpointing_mode=s.activation_checkpointing,
    )
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "initial_weights_sha256": hash_state_dict(model.state_dict()),
        "input_shape": list(shape),
        "classes": classes,
        "batchnorm": models.has_batchnorm(model),
        "dropout": models.has_dropout(model),
    }
    task, kind = task_trial.run_task_trial(s, shape, classes, data.meta.get("values", False))
    groups = models.list_shard_groups(network, model)
    group_sizes = [
        {"label": label, "parameters": sum(p.numel() for m in ms for p in m.parameters())}
        for label, ms in groups
    ]
    trial = None
    if s.own_model:
        facts["own"] = models.describe_own_model_for_record(network, model, classes, shape)
        if formats := models.changed_parameter_dtypes_reason(model):
            facts["own"]["formats"] = formats
        samples = strategy.samples_per_step(s)
        acceptance.check_batchnorm_samples(
            network, facts["batchnorm"], samples, s.gradient_accumulation_steps
        )
        dtype = get_weights_dtype(s.precision)
        trial = models.run_model_trial(network, model, classes, shape, groups, task, dtype)
        facts["dropout"] = trial.forward_draws_random_numbers
    return BuiltModel(network, model, shape, task, kind, groups, trial, facts, group_sizes)


def count_sample_flops(s: Settings, built: BuiltModel) -> dict[str, int]:
    """Return the floating-point operations per sample of forward, and of a training step.

    The dict is empty if they cannot be counted because a user's own model reads values of tensors.
    """
    classes, shape = built.facts["classes"], built.shape
    try:
        return count_flops(partial(models.build_fake_model, built.network, classes, shape), shape)
    except Exception:
        if s.own_model is None:
            raise
        traceback.print_exc()
        return {}


def configure_torch(s: Settings, device: torch.device, threads: int) -> None:
    """Set PyTorch's threads, TensorFloat-32 and seeds, equally for every strategy.

    Args:
        s: Settings of the cell.
        device: Device of the worker.
        threads: CPU threads.
    """
    torch.set_num_threads(threads)
    seed_random_generators(s.seed)
    tf32 = s.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    if device.type == "cuda":
        torch.cuda.set_device(device)


def join_process_group(job: Job, rank: int, device: torch.device) -> None:
    """Join the process group of all workers, through a file or rank 0's TCP store.

    Args:
        job: Job of the cell.
        rank: Rank of the worker.
        device: Device of the worker.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    alone = job.n_nodes == 1
    if alone:
        store = dist.FileStore(str(job.folder.file_store_path), job.world_size)
    else:
        store = connect_tcp_store(job.folder, rank, job.world_size)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=job.world_size,
            device_id=device if device.type == "cuda" else None,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
    except RuntimeError as error:
        if "Unable to find address for" not in str(error):
            raise
        name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        raise RuntimeError(
            f"the network interface {name} of this machine, through which gloo connects workers, is "
            f"missing or down; activate it (ip link set {name} up), or set GLOO_SOCKET_IFNAME to another one "
            f"{format_help_address('is missing or down')}"
        ) from error
    # NCCL opens connections in its first collective. Here these count as rendezvous, not as a strategy's
    # warm-up.
    dist.all_reduce(torch.zeros(1, device=device))


def build_worker_result(
    result: loop.TrainingResult, start: WorkerStart, rank: int
) -> dict[str, Any]:
    """Return the worker's measurements as the run folder stores them, as JSON values.

    Args:
        result: Measurements of the loop.
        start: State of the worker before its model.
        rank: Rank of the worker.
    """
    clock, strategy = result.clock, start.strategy
    return {
        "status": result.status,
        "reason": result.reason,
        "rank": rank,
        "steps": result.steps,
        "samples": result.samples,
        "train_time_s": clock.train_time_s,
        "epoch_starts_s": clock.epoch_starts_s,
        "epoch_times_s": clock.epoch_times_s,
        "step_ms": clock.step_ms,
        "own_ms": clock.step_times_without_waits_ms,
        # In a strategy's own training loop, the time to queue a step may contain waits for other processes.
        "issue_ms": None if strategy.loop else clock.shortest_step_launch_ms,
        "core_wait_s": clock.core_waits.longest_core_wait_s,
        "breakdown_ms": clock.phase_means_ms,
        "phases_s": start.phases.compute_seconds_by_phase(),
        "started_s": start.started_s,
        "per_epoch": result.progress.epoch_results,
        "losses": result.losses,
        "memory": result.memory,
        "model_states": strategy.compute_model_state_bytes(),
        "strategy": strategy.report(),
        "communication": strategy.communication(),
    }


def build_error_result_and_exit_code(e: Exception) -> tuple[dict[str, Any], int]:
    """Return the result that a worker writes about its error, and the worker's exit code."""
    reason = str(e) if isinstance(e, Refused) else format_error_line(e)
    if is_out_of_memory_error(e):
        return {"status": "oom", "reason": reason}, EXIT_OOM
    status = "unsupported" if isinstance(e, Refused) else "error"
    return {"status": status, "reason": reason}, EXIT_ERROR


def find_other_programs_on_gpu(job: Job, rank: int) -> dict[str, Any] | None:
    """Return which other programs use this worker's GPU, or None if none are known."""
    place = job.folder.read_process_locations().get(format_worker_name(rank), {}).get("gpu", {})
    gpu = find_worker_gpu(Nvml(), place)
    if gpu is None:
        return None
    taken_bytes = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
    return find_other_gpu_users(gpu, os.getppid(), os.getpid(), taken_bytes or None)


def format_error_line(e: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0] if text else ''}".rstrip(": ")
