"""The table of all columns of cells.csv and epochs.csv: name, kind, unit, source and definition.

This table determines the rows of `collect`, the types of the files' columns, the units and definitions of
metrics, and the report's glossary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from stratbench.analysis.records import derived
from stratbench.analysis.records.derived import get_field_by_path
from stratbench.cell.coordinates import Cell
from stratbench.cell.extensions import iter_imported_additions
from stratbench.cell.record import Record, RecordError, load_schema
from stratbench.strategies.base import Traits

Row = dict[str, Any]
#: The kind of a column's values: text, JSON as text (which is never shortened), a finite number, or a bool.
Kind = Literal["text", "json", "number", "flag"]
#: Maximum number of characters of a text in a column.
MAXIMUM = 1000


@dataclass(frozen=True)
class Column:
    """A column of cells.csv or epochs.csv, whose unknown values are empty."""

    name: str
    value_kind: Kind
    #: The unit of the values; empty for texts, counts and flags. `share` is a fraction of 1.
    unit: str
    #: Where a value comes from: the path of a field in the record, a function of the record, a value of the
    #: cell's timeline (`timeline: NAME`), or None if `collect` knows the value without a record.
    source: str | Callable[[Record], Any] | None
    #: The definition of the values. If empty, the record's schema describes the field.
    explicit_definition: str = ""

    @property
    def definition(self) -> str:
        """The meaning of the column's values, in a sentence."""
        if self.explicit_definition or not isinstance(self.source, str):
            return self.explicit_definition
        return find_field_description(self.source)

    @property
    def has_integer_values(self) -> bool:
        """Whether all numbers in the column are integers. The schema or the source's type decides."""
        if self.source is None:
            return get_type_hints(Cell).get(self.name) is int
        if callable(self.source):
            return set(get_args(get_type_hints(self.source)["return"])) == {int, type(None)}
        return "integer" in find_field_types(self.source)

    @property
    def has_text_values(self) -> bool:
        """Whether the column's values are always read as text, even if they look like numbers."""
        return self.value_kind in ("text", "json")


# fmt: off
_ALL_COLUMNS: tuple[Column, ...] = (
    Column("study", "text", "", None, "Name of the study."),
    Column("experiment", "text", "", None, "Name of the experiment."),
    Column("strategy", "text", "", None, "Name of the strategy, or of the variant."),
    Column("model", "text", "", None, "Name of the model."),
    Column("dataset", "text", "", None, "Name of the data set."),
    Column("gpus", "number", "", None,
           "Number of workers, each a GPU or a CPU process. Parameter servers are not counted."),
    Column("repeat", "number", "", None, "Number of the repeat, from 0."),
    Column("status", "text", "", "status",
           "Outcome of the cell: ok, oom, timeout, diverged or unsupported; missing, error or infeasible if "
           "there is no usable record; incomparable if a command of the user did other work than the cells "
           "to compare with."),
    Column("reason", "text", "", "reason", "A sentence on why the cell ended early."),
    Column("strategy_base", "text", "", "strategy.name"),
    Column("strategy_kind", "text", "", "strategy.kind"),
    *(
        Column(trait.name, "flag" if trait.type == "bool" else "number", "",
               f"strategy.traits.{trait.name}")
        for trait in fields(Traits)
    ),
    Column("train_time_s", "number", "s", "time.train_time_s",
           "Wall-clock time of the slowest worker for the training steps of all epochs, synchronised with "
           "the device at both ends. It excludes start-up, warm-up, data staging and evaluation."),
    Column("throughput_samples_per_s", "number", "samples/s", "time.throughput_samples_per_s",
           "Training samples of all workers divided by the training time. A sample counts if its gradient "
           "updated the weights, not if the gradient overflowed or a parameter server dropped it."),
    Column("task", "text", "", "task.name"),
    Column("score_name", "text", "", "task.score"),
    Column("score_unit", "text", "", "task.unit"),
    Column("score_better", "text", "", "task.better"),
    Column("score_tolerance", "number", "", "task.tolerance"),
    Column("score_chance_level", "number", "", "task.guess"),
    Column("score_final", "number", "", "score.final",
           "The score of the experiment's task on the whole test set after the last epoch, evaluated outside "
           "the training time. Accuracy is the share of correctly classified samples. Loss is the mean "
           "cross-entropy of the next token."),
    Column("score_best", "number", "", "score.best"),
    Column("score_error", "number", "", derived.get_score_standard_error,
           "Standard error of the score, from the finite number of test samples."),
    Column("perplexity", "number", "", derived.compute_perplexity,
           "The exponential of a score in nats per token: the number of equally likely tokens that would "
           "give the same loss."),
    Column("least_loss", "number", "nats/token", "task.least_loss"),
    Column("throughput_unit", "text", "", "task.counts"),
    Column("counts_per_sample", "number", "", "task.counts_per_sample"),
    Column("evaluated_on", "text", "", "score.evaluated_on"),
    Column("memory_method", "text", "", "memory.method"),
    Column("parameters_bytes", "number", "bytes", "memory.model_states.parameters_bytes"),
    Column("gradients_bytes", "number", "bytes", "memory.model_states.gradients_bytes"),
    Column("optimizer_bytes", "number", "bytes", "memory.model_states.optimizer_bytes"),
    Column("buffers_bytes", "number", "bytes", "memory.model_states.buffers_bytes"),
    Column("step_p50_ms", "number", "ms", "time.step_ms.p50",
           "Median of the step times of all workers together."),
    Column("step_p90_ms", "number", "ms", "time.step_ms.p90",
           "90th percentile of the step times of all workers together."),
    Column("step_p99_ms", "number", "ms", "time.step_ms.p99",
           "99th percentile of the step times of all workers together."),
    Column("step_mean_ms", "number", "ms", "time.step_ms.mean",
           "Mean of the step times of all workers together."),
    Column("data_ms", "number", "ms", "time.breakdown_ms.data",
           "Mean time per step that a worker waits for its batch."),
    Column("bubble_share", "number", "share", "time.bubble_share",
           "The share of a mean step in which the workers of a pipeline waited for other stages or for data "
           "from them."),
    Column("predicted_bubble_share", "number", "share", "strategy.details.predicted_bubble_share",
           "The bubble share of a pipeline with equal stages and without communication time: "
           "(S - 1) / (v m + S - 1), with S workers, m micro-batches and v stages per worker."),
    Column("setup_s", "number", "s", "time.setup_s"),
    Column("data_s", "number", "s", "time.data_s"),
    Column("warmup_s", "number", "s", "time.warmup_s"),
    Column("eval_s", "number", "s", "time.eval_s"),
    Column("total_s", "number", "s", "time.total_s"),
    Column("queue_wait_s", "number", "s", "time.queue_wait_s"),
    Column("time_to_result_s", "number", "s", derived.compute_time_to_result_s,
           "Time from the submission of the cell's job to its end, including the wait in the queue, for "
           "cells in SLURM."),
    Column("time_limit_s", "number", "s", "time.time_limit_s"),
    Column("achieved_flops_per_s", "number", "FLOP/s", "compute.achieved_flops_per_s",
           "Floating-point operations of all workers divided by the training time. A sample counts three "
           "times the operations of its forward pass, since backward computes two gradients. "
           "Recomputation by activation checkpointing does not count."),
    Column("mfu", "number", "share", "compute.mfu",
           "The achieved arithmetic rate divided by the datasheet peak of all workers' GPUs in the "
           "precision of the training."),
    Column("sent_bytes_per_step", "number", "bytes", "communication.sent_bytes_per_step",
           "Bytes that a worker sends per step, counted and not measured on the network. A collective "
           "counts as a ring algorithm sends it, whichever algorithm the backend chose. With parameter "
           "servers, the bytes that the worker pushes count."),
    Column("received_bytes_per_step", "number", "bytes", "communication.received_bytes_per_step"),
    Column("exposed_communication_ms", "number", "ms", "communication.exposed_ms"),
    Column("implied_bytes_per_s", "number", "bytes/s", "communication.implied_bytes_per_s",
           "Steps per second times the larger of the bytes that a worker sends and receives per step: a "
           "lower bound on the bandwidth that training uses."),
    Column("busiest_server_bytes_per_s", "number", "bytes/s",
           "communication.busiest_server_bytes_per_s"),
    Column("train_joules", "number", "J", "energy.train_joules"),
    Column("joules_per_sample", "number", "J", "energy.joules_per_sample",
           "Energy per sample by the energy counters of the GPUs during the training steps. CPUs, main "
           "memory and the rest of the machine are excluded."),
    Column("profile_trace", "text", "", "profile.trace"),
    Column("samples_seen", "number", "samples", "batch.samples_seen"),
    Column("samples_applied", "number", "samples", "batch.samples_applied"),
    Column("updates_applied", "number", "", "batch.updates_applied"),
    Column("global_batch", "number", "samples", "batch.global_batch"),
    Column("per_worker_batch", "number", "samples", "batch.per_worker_batch"),
    Column("steps_per_epoch", "number", "", "batch.steps_per_epoch"),
    Column("epochs", "number", "", "settings.epochs"),
    Column("steps", "number", "", "settings.steps"),
    Column("precision", "text", "", "settings.precision"),
    Column("compile", "flag", "", "settings.compile"),
    Column("compile_s", "number", "s", "time.compile_s"),
    Column("recompilations", "number", "", "time.recompilations"),
    Column("activation_checkpointing", "text", "", "settings.activation_checkpointing"),
    Column("compute_dtype", "text", "", "strategy.details.compute_dtype"),
    Column("model_parameters", "number", "", "model.parameters"),
    Column("trainable_parameters", "number", "", "model.trainable_parameters",
           "Number of parameters that are trained; the others are frozen."),
    Column("classes", "number", "", "model.classes"),
    Column("batchnorm", "flag", "", "model.batchnorm"),
    Column("loss_adds_up", "flag", "", "task.loss_adds_up",
           "Whether the loss of a batch is the mean of the losses of its parts. Then the split into "
           "workers and micro-batches does not change it. Empty if unknown."),
    Column("initial_weights_sha256", "text", "", "model.initial_weights_sha256"),
    Column("data_sha256", "text", "", "data.sha256"),
    Column("synthetic_data", "flag", "", "data.synthetic"),
    Column("test_samples", "number", "samples", "data.test_samples"),
    Column("peak_memory_bytes", "number", "bytes", derived.get_peak_memory_bytes,
           "Peak memory of the worker that used most. On a GPU it is the peak that PyTorch allocated, "
           "including model states. On a CPU it is the growth of the resident set size since the start "
           "of training, when weights and momentum are already allocated."),
    Column("requested_peak_bytes", "number", "bytes", "memory.requested_peak_bytes",
           "Peak of the bytes requested from the GPU's allocator, which allocates whole blocks, by the "
           "worker with the largest peak memory. It includes the workspaces of cuBLAS."),
    Column("cublas_bytes", "number", "bytes", "memory.cublas_bytes",
           "Bytes of cuBLAS's workspaces on a GPU, for the worker with the largest peak memory. The peak "
           "memory includes them."),
    Column("model_states_bytes", "number", "bytes", derived.get_model_states_bytes,
           "Exact bytes of parameters, gradients, optimizer state and buffers between two steps, for the "
           "worker with the most. Activations, communication buffers and the memory of parameter servers "
           "are excluded."),
    Column("target_score", "number", "", None,
           "The score to reach, from `target_score` of the configuration."),
    Column("time_to_target_s", "number", "s", None,
           "Training time until the end of the first epoch whose test score reached the target score."),
    Column("device_kind", "text", "", derived.get_device_kind, "Kind of the workers' device: cuda or cpu."),
    Column("device_name", "text", "", derived.format_device_names, "Names of the GPUs, or of the CPUs."),
    Column("device_memory_bytes", "number", "bytes", derived.get_min_device_memory_bytes,
           "Memory of the GPU with the least memory."),
    Column("host", "text", "", derived.format_host_names, "Names of the hosts of the workers."),
    Column("cpu_model", "text", "", derived.format_cpu_models, "CPU models of the hosts."),
    Column("cpu_cores", "number", "", derived.count_usable_cpu_cores,
           "Number of CPU cores that all workers together may use."),
    Column("torch", "text", "", derived.format_torch_versions, "Version of PyTorch."),
    Column("driver", "text", "", derived.format_driver_versions, "Version of the GPU driver."),
    Column("revision", "text", "", derived.format_git_revision,
           "Commit of the code that trained the cell, with `+changes` if files differed from the commit."),
    Column("planned_repeats", "number", "", "provenance.planned_repeats"),
    Column("other_cpu_cores", "number", "", derived.get_cores_used_by_other_processes,
           "CPU cores that other processes used when the cell started, on the busiest node."),
    Column("node_cores", "number", "", derived.count_node_cores,
           "Number of logical CPU cores of the smallest node."),
    Column("start_skew_ms", "number", "ms", derived.get_max_start_skew_ms,
           "Time from the start of an epoch on the first worker to its start on the last worker, for the "
           "epoch with the largest difference."),
    Column("slowdown", "text", "", derived.describe_slowdown,
           "How workers were slowed down on purpose."),
    Column("throttled_share", "number", "share", "timeline: throttled_share",
           "Share of the samples during training in which heat or the power limit slowed a GPU down."),
    Column("utilisation_pct", "number", "%", "timeline: utilisation_pct",
           "Mean utilisation over the samples during training. For a GPU it is NVML's share of time in "
           "which any kernel ran, including communication and waiting kernels. For a CPU process it is the "
           "share of one core."),
    Column("breakdown_ms", "json", "ms", derived.format_step_breakdown_ms,
           "Mean time per step in each phase."),
    Column("staleness", "json", "", derived.format_staleness_counts,
           "Number of pushes by staleness, which is the index in the list. The staleness of a push is the "
           "number of updates since the weights that it was computed from."),
    Column("processes", "number", "", derived.count_processes,
           "Number of workers plus parameter servers. GPU-hours, worker-hours and costs count only the "
           "workers."),
    *(Column(*values) for _, columns in iter_imported_additions("columns") for values in columns),
    Column("record_path", "text", "", None, "Path of the record below results/<study>."),
    Column("log_path", "text", "", None, "Path of the log below results/<study>."),
)
# fmt: on

#: The columns of cells.csv by name, in order. An extension's column replaces a core column of its name.
BY_NAME = {column.name: column for column in _ALL_COLUMNS}
CELL_COLUMNS = tuple(BY_NAME.values())
#: The names of the columns of cells.csv.
COLUMNS = tuple(BY_NAME)
#: The columns whose values together identify a cell.
COORDINATES = COLUMNS[:7]
#: Beginning of a column's source if its values come from the cell's timeline.
_TIMELINE = "timeline: "

# fmt: off
#: Columns of epochs.csv after those of the cell. Their sources are fields of an epoch in the record.
_OF_EPOCH = (
    Column("epoch", "number", "", "score.per_epoch.epoch"),
    Column("train_time_s", "number", "s", "score.per_epoch.train_time_s"),
    Column("train_loss", "number", "", "score.per_epoch.train_loss"),
    Column("test_loss", "number", "", "score.per_epoch.test_loss"),
    Column("score", "number", "", "score.per_epoch.score"),
    Column("score_error", "number", "", "score.per_epoch.score_error"),
    Column("answers_left_out", "number", "", "score.per_epoch.answers_left_out"),
)
# fmt: on
#: The columns of epochs.csv by name.
EPOCH_BY_NAME = {name: BY_NAME[name] for name in COORDINATES} | {c.name: c for c in _OF_EPOCH}
EPOCH_COLUMNS = tuple(EPOCH_BY_NAME)


def find_field_description(path: str) -> str:
    """Return the description that the record's schema has for the field at a dotted path.

    Raises:
        KeyError: The schema has no such field.
    """
    node = load_schema()
    for key in path.split("."):
        node = node.get("items", node)["properties"][key]
    return node["description"]


def find_field_types(path: str) -> list[str]:
    """Return the types that the record's schema declares for a field. Empty if it declares none.

    The field is given by its dotted path.
    """
    node = load_schema()
    for key in path.split("."):
        node = node.get("items", node)
        options = [node, *node.get("anyOf", ()), *node.get("oneOf", ())]
        node = next((o["properties"][key] for o in options if key in o.get("properties", ())), {})
    types = node.get("type", [])
    return [types] if isinstance(types, str) else types


# Columns are listed once by their kind of source, since `build_row_from_record` runs for every record.
_FIELDS = [
    (column.name, column.source)
    for column in CELL_COLUMNS
    if isinstance(column.source, str) and not column.source.startswith(_TIMELINE)
]
_FUNCTIONS = [(column.name, column.source) for column in CELL_COLUMNS if callable(column.source)]
_OF_TIMELINE = [
    (column.name, column.source.removeprefix(_TIMELINE))
    for column in CELL_COLUMNS
    if isinstance(column.source, str) and column.source.startswith(_TIMELINE)
]


def build_row_from_record(record: Record, timeline: Path) -> Row:
    """Return the values of a row of cells.csv that a record and its timeline determine.

    Raises:
        RecordError: A column of numbers or flags would have a value that is not a finite number.
    """
    row: Row = {name: get_field_by_path(record, path) for name, path in _FIELDS}
    row |= {name: function(record) for name, function in _FUNCTIONS}
    figures = derived.compute_timeline_columns(timeline, row["device_kind"])
    row |= {name: figures.get(figure) for name, figure in _OF_TIMELINE}
    for name, value in row.items():
        if value is None:
            continue
        kind = BY_NAME[name].value_kind
        if kind == "text":
            row[name] = clean_and_shorten_text(str(value))
        elif kind != "json" and not (isinstance(value, int | float) and math.isfinite(value)):
            record_path, shown = timeline.parent / "record.json", repr(str(value)[:80])
            raise RecordError(f"{record_path}: {name} is {shown}, which is not a finite number")
    return row


def clean_and_shorten_text(text: str) -> str:
    """Return a text in one line, without control characters, cut to MAXIMUM characters."""
    line = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= MAXIMUM else line[: MAXIMUM - 1] + "…"


def read_table(path: Path, text_columns: Iterable[str] = (), **types: str) -> Any:
    """Return a CSV file that shares columns with cells.csv, as a pandas.DataFrame.

    Only an empty field is an absent value.

    Args:
        path: The file.
        text_columns: Names of further columns of text.
        types: Pandas types of other columns, by name.
    """
    import pandas as pd  # imported only here, since the import is slow and `collect` does without

    # With the dtype `object`, texts that look like numbers stay texts.
    texts = (*(c.name for c in CELL_COLUMNS if c.has_text_values), *text_columns)
    dtype = dict.fromkeys(texts, object) | types
    table = pd.read_csv(path, dtype=dtype, keep_default_na=False, na_values=[""])
    # A copy stores all columns of one type together, which makes it faster to group its rows.
    return table.copy()


def read_cells(path: Path) -> Any:
    """Return cells.csv as a pandas.DataFrame."""
    return read_table(path)


def read_epochs(path: Path) -> Any:
    """Return epochs.csv as a pandas.DataFrame."""
    return read_table(path)
