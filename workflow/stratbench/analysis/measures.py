"""The measures of tables and figures as data: their columns, units and definitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIB = 2**20
#: What marks a figure that the audit doubts, in tables as in figures.
DOUBT = "†"


#: The strategy without any distribution, on one worker: what speedups are against.
ALONE = "single"


@dataclass(frozen=True)
class Measure:
    """One measure: a column of cells.csv (times `scale`), or its ratio to a baseline's."""

    name: str
    title: str
    unit: str
    column: str
    definition: str
    scale: float = 1.0
    better: Literal["lower", "higher"] | None = "lower"  # None: neither
    #: `self`: divided by the same strategy at one worker; `single`: by strategy `single`; another
    #: name: by that strategy on as many workers.
    baseline: Literal["self", "single", "ddp", "ps-sync"] | None = None
    #: The baseline divided by it, instead.
    inverted: bool = False
    #: Divide by the number of workers too.
    per_worker: bool = False
    #: Which of the audit's findings cast doubt on it.
    concerns: Literal["time", "memory", "accuracy"] = "time"
    #: Digits after the point; None: three significant digits.
    decimals: int | None = None

    @property
    def heading(self) -> str:
        """Title with the unit, as axes and captions carry it."""
        return f"{self.title} ({self.unit})" if self.unit else self.title


_THROUGHPUT = "throughput_samples_per_s"
_SPEEDUP = (
    "Ratio of training throughputs; it equals the ratio of training times where as many samples "
    "entered the weights. They do in cells of one experiment, but where a server drops late pushes."
)

MEASURES: dict[str, Measure] = {
    m.name: m
    for m in (
        Measure(
            "training_time",
            "Training time",
            "s",
            "train_time_s",
            "Wall-clock time of the training steps of all epochs, device-synchronised at both "
            "ends, of the slowest worker. Warm-up, start-up, data staging and evaluation are not "
            "in it.",
        ),
        Measure(
            "throughput",
            "Training throughput",
            "samples/s",
            _THROUGHPUT,
            "Training samples of all workers whose gradients entered the weights, divided by the "
            "training time: what a server dropped, or what overflowed, was no training.",
            better="higher",
        ),
        Measure(
            "achieved",
            "Achieved arithmetic rate",
            "GFLOP/s",
            "achieved_flops_per_s",
            "Three times the operations of the forward pass (backward computes two gradients) for "
            "every sample, divided by the training time; all workers together.",
            scale=1e-9,
            better="higher",
        ),
        Measure(
            "mfu",
            "Model FLOPs utilisation (MFU)",
            "%",
            "mfu",
            "The achieved arithmetic rate in percent of the datasheet peak of all workers' GPUs in "
            "the precision of the training.",
            scale=100,
            better="higher",
        ),
        Measure(
            "speedup",
            "Speedup over one worker",
            "",
            _THROUGHPUT,
            f"Against the same strategy with one worker. {_SPEEDUP}",
            better="higher",
            baseline="self",
            decimals=2,
        ),
        Measure(
            "efficiency",
            "Scaling efficiency",
            "",
            _THROUGHPUT,
            "Speedup over the same strategy with one worker, divided by the number of workers.",
            better="higher",
            baseline="self",
            per_worker=True,
            decimals=2,
        ),
        Measure(
            "speedup_vs_single",
            "Speedup over single",
            "",
            _THROUGHPUT,
            "Against strategy single, a bare training loop in one process, which has no cost of "
            f"distribution. {_SPEEDUP}",
            better="higher",
            baseline="single",
            decimals=2,
        ),
        Measure(
            "efficiency_vs_single",
            "Efficiency against single",
            "",
            _THROUGHPUT,
            "Speedup over strategy single, divided by the number of workers.",
            better="higher",
            baseline="single",
            per_worker=True,
            decimals=2,
        ),
        Measure(
            "time_vs_ddp",
            "Training time against ddp",
            "",
            "train_time_s",
            "Training time divided by that of ddp on as many workers.",
            baseline="ddp",
            decimals=2,
        ),
        Measure(
            "time_vs_sync",
            "Training time against ps-sync",
            "",
            "train_time_s",
            "Training time divided by that of ps-sync on as many workers.",
            baseline="ps-sync",
            decimals=2,
        ),
        Measure(
            "memory",
            "Peak memory per worker",
            "MiB",
            "peak_memory_bytes",
            "Of the worker that used most. On a GPU the peak that the framework allocated, model "
            "states included; on a CPU the high-water mark of the resident set above the process's "
            "base before training, which holds weights and momentum already.",
            scale=1 / MIB,
            concerns="memory",
            decimals=0,
        ),
        Measure(
            "model_states",
            "Model states per worker",
            "MiB",
            "model_states_bytes",
            "Parameters, gradients, optimizer state and buffers that the largest worker holds "
            "between two steps, counted exactly. Activations and communication buffers are not in "
            "it, nor is what a parameter server holds.",
            scale=1 / MIB,
            concerns="memory",
        ),
        Measure(
            "memory_reduction",
            "Memory reduction against ddp",
            "",
            "peak_memory_bytes",
            "Peak memory per worker of ddp on as many workers, divided by it. Sharding divides the "
            "model states by the number of workers at most, and activations not at all. On a CPU "
            "weights and momentum are in neither peak.",
            better="higher",
            baseline="ddp",
            inverted=True,
            concerns="memory",
            decimals=2,
        ),
        Measure(
            "sent_per_step",
            "Sent by a worker in a step",
            "MiB",
            "sent_bytes_per_step",
            "Counted, not measured on a wire. Collectives: of every tensor that is reduced, gathered "
            "or broadcast, what a ring sends, whatever algorithm the backend chose. Parameter "
            "servers: what the worker pushes.",
            scale=1 / MIB,
        ),
        Measure(
            "bandwidth",
            "Implied bandwidth of a worker",
            "GB/s",
            "implied_bytes_per_s",
            "The larger of what a worker sends and receives in a step, times its steps in a second: "
            "its link moves no less while it trains.",
            scale=1e-9,
            better=None,
        ),
        Measure(
            "energy",
            "Energy of the GPUs per sample",
            "J",
            "joules_per_sample",
            "Of the GPUs' energy counters during the training steps; the processors, the memory and "
            "the rest of the machine are not in it.",
        ),
        Measure(
            "time_to_target",
            "Training time to the target accuracy",
            "s",
            "time_to_target_s",
            "Training time at the end of the first epoch whose test accuracy reached the target of "
            "the configuration (target_accuracy).",
        ),
        Measure(
            "accuracy",
            "Test accuracy after the last epoch",
            "%",
            "accuracy_final",
            "Share of the whole test set classified correctly, evaluated outside the timed region.",
            scale=100,
            better="higher",
            concerns="accuracy",
            decimals=2,
        ),
        Measure(
            "utilisation",
            "Utilisation while training",
            "%",
            "utilisation_pct",
            "Mean of the samples taken during training. Of a GPU: the share of time in which any "
            "kernel ran, by NVML; communication and waiting kernels count, so that equal "
            "utilisation proves nothing. Of a CPU process: of one core.",
            better="higher",
            decimals=1,
        ),
    )
}

_CROSSES = "A cross on the horizontal axis is a cell without a result, named in the panel."


@dataclass(frozen=True)
class Plot:
    """A figure of every experiment: its title, how to read it, and what it needs to be shown."""

    title: str
    reading: str
    chart: str = "Line chart"
    #: Column of cells.csv without which there is nothing to draw.
    needs: str = "status"
    #: Whether the report shows it at once, and not folded.
    primary: bool = False

    def caption(self, name: str) -> str:
        """What the figure shows and how to read it; `name` is its own in PLOTS."""
        return f"{MEASURES[name].definition} {self.reading}" if name in MEASURES else self.reading


#: Figures by name, in the order of the report; those with a measure's name show that measure.
PLOTS = {
    "training_time": Plot(
        MEASURES["training_time"].heading,
        "A cross with a label stands for a cell without a result.",
        "Bar chart",
        primary=True,
    ),
    "throughput": Plot(
        MEASURES["throughput"].heading, f"Dotted: a strategy that has one worker only. {_CROSSES}"
    ),
    "speedup": Plot(MEASURES["speedup"].heading, f"Dashed: the ideal. {_CROSSES}"),
    "speedup_vs_single": Plot(
        MEASURES["speedup_vs_single"].heading, f"Dashed: the ideal. {_CROSSES}", primary=True
    ),
    "breakdown": Plot(
        "A step by phase (ms)",
        "Mean of all workers' steps on the most workers, in the phases that the strategy can "
        "separate. Communication that overlaps the backward pass is inside it.",
        "Stacked bar chart",
        "breakdown_ms",
    ),
    "memory": Plot(
        MEASURES["memory"].heading,
        "On GPUs the black line across a bar is the part that model states take; the peak of a CPU "
        "process is above a base that holds most of them. A cross with a label stands for a cell "
        "without a result.",
        "Bar chart",
        primary=True,
    ),
    "accuracy": Plot(
        MEASURES["accuracy"].heading,
        "By epoch; with repeats, the line is the median and the band goes from the lowest to the "
        "highest. A cross ends the line of a cell that was cut short.",
        "Line chart by epoch",
        primary=True,
    ),
    "accuracy_over_time": Plot(
        "Test accuracy over training time",
        "On the most workers of the experiment; the time is that of the training steps alone. With "
        "repeats, the medians of both at each epoch.",
        "Line chart by time",
    ),
    "tradeoff": Plot(
        "Training time, memory and accuracy together",
        "Each point is a strategy on the number of workers beside it; its area is the peak memory "
        "of a worker. The grey line joins those that no other beats in both time and accuracy.",
        "Scatter chart",
    ),
    "staleness": Plot(
        "Staleness of the pushes to parameter servers",
        "Share of the pushes that were computed from a state so many updates old, on the most "
        "workers, over all shards and repeats.",
        "Line chart by staleness",
        "staleness",
    ),
    "utilisation": Plot(
        MEASURES["utilisation"].heading,
        "A cross with a label stands for a cell without a result.",
        "Bar chart",
        "utilisation_pct",
    ),
    "utilisation_timelines": Plot(
        "Utilisation of each worker over time (%)",
        "The first repeat on the most workers, from the start of the cell; shaded: training. "
        "Dashed: servers.",
        "Line charts by time",
        "utilisation_pct",
    ),
    "memory_timelines": Plot(
        "Memory of each worker over time (MiB)",
        "The first repeat on the most workers, from the start of the cell; shaded: training. On a "
        "GPU the device's memory in use; on a CPU the process's resident set. Dashed: servers.",
        "Line charts by time",
        "utilisation_pct",
    ),
}


def number(value: float, decimals: int | None) -> str:
    """`value` with `decimals` digits after the point, or with three significant digits or more."""
    if decimals is None:
        magnitude = abs(value)
        decimals = 0 if magnitude >= 100 else 1 if magnitude >= 10 else 2 if magnitude >= 1 else 3
    return f"{value:.{decimals}f}"


def status_label(status: str, time_limit_s: float | None, reason: str | None = None) -> str:
    """What a table prints in place of a number, for a cell that is not `ok`."""
    if status == "infeasible":
        return f"infeasible ({reason})"
    if status == "timeout":
        return f">{time_limit_s:g} s" if time_limit_s else "timeout"
    return {"oom": "OOM", "diverged": "div."}.get(status, status)
