"""Gang or elastic workers on a real SLURM: the same trainings in the same queue, one cluster an arm.

    PYTHONPATH=workflow python benchmarks/elastic_slurm.py

Writes a run to results/elastic/experiment/, and experiment.md; under 30 minutes on 2 cores. Each arm has a
cluster of its own: SLURM on 2 nodes of 8 pretend GPUs, fed with the same jobs of others at the same moments;
all clusters run side by side. At each of some moments a training is submitted, by each arm in its way.

Time is compressed: 1 s stands for COMPRESSION s. So jobs sleep, the others' and the trainings' alike. Real
are the queue, backfill, preemption, and who submits: worker jobs are kept by `train.elastic.keeper`, as
those of an elastic cell are. Its looks at the queue are not compressed (half a second here stands for
minutes), nor are SLURM's own delays. A pause is the one measured with real workers (pause.md), compressed.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "slurm"))
from cluster import SlurmCluster

from stratbench.cell.run_folder import RunFolder
from stratbench.plan.queue.background import LEAST_S, REQUEST_FACTORS, poisson, requested_s
from stratbench.plan.queue.simulator import Arrival, Rules
from stratbench.plan.queue.simulator import Cluster as Simulated
from stratbench.plan.queue.trainings import Checkpoints, Gang, Scaling, Split
from stratbench.study.slurm.worker_job import WorkerJob
from stratbench.train.elastic.keeper import Keeper
from stratbench.train.elastic.slurm_jobs import SlurmJobs

OUT = Path(__file__).parent / "results" / "elastic"
#: What one second stands for, in seconds: the others' jobs have a median of 8 s in place of half an hour.
COMPRESSION = 225.0
NODES, GPUS = 2, 8
#: The longest job of others, in seconds of the experiment.
LONGEST_S = 90.0
#: A training takes so long on so many GPUs: an hour.
WIDTH, TRAINING_S = 8, 16.0
#: Pauses of synchronous workers, in real seconds: this project's, and torchrun's by default (pause.md).
OWN_PAUSE_S, TORCHRUN_PAUSE_S = 0.2, 39.0
LOOK_S = 0.05
#: SLURM's delays in seconds, as queue_slurm.py has them.
START_S, END_S, REACT_S = 0.15, 0.09, 0.4
#: So that jobs of some seconds meet a scheduler that looks as often as a real one looks at jobs of hours.
SCHEDULER = (
    "bf_interval=1,bf_resolution=1,sched_interval=2,batch_sched_delay=0,bf_job_part_count_reserve=1,"
    "bf_max_job_test=1000,default_queue_depth=1000"
)


@dataclass(frozen=True)
class Arm:
    """A way to do the training. `gpus`: 0 for worker jobs of one GPU each."""

    title: str
    gpus: int = 0
    scatter: bool = False
    preemptible: bool = False
    #: Seconds without a step when a worker comes or goes; 0: asynchronous.
    pause_s: float = 0.0


ARMS = {
    "none": Arm("no training", gpus=-1),
    "gang": Arm("gang", gpus=WIDTH),
    "scattered": Arm("gang scattered", gpus=WIDTH, scatter=True),
    "half": Arm("gang N/2", gpus=WIDTH // 2),
    "split": Arm("split synchronous", pause_s=OWN_PAUSE_S),
    "async": Arm("split asynchronous, worth 1"),
    "spare-torchrun": Arm(
        "split synchronous by torchrun, preemptible", preemptible=True, pause_s=TORCHRUN_PAUSE_S
    ),
    "spare-split": Arm("split synchronous, preemptible", preemptible=True, pause_s=OWN_PAUSE_S),
    "spare-async": Arm("split asynchronous, worth 1, preemptible", preemptible=True),
}


@dataclass
class Training:
    """What one training took; dates are seconds since the start of the experiment."""

    arm: str
    moment: int
    submitted_s: float
    started_s: float = math.nan
    done_s: float = math.nan
    gpu_s: float = 0.0
    idle_gpu_s: float = 0.0
    #: Workers that came, and that went before the end.
    joins: int = 0
    losses: int = 0


class Cluster(SlurmCluster):
    """A test cluster with a queue as above, and a partition whose jobs all others preempt."""

    def _configure(self) -> None:
        super()._configure()
        text = self.conf.read_text(encoding="utf-8")
        text += (
            "PartitionName=spare Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=CANCEL\n"
            f"SchedulerParameters={SCHEDULER}\nPriorityType=priority/basic\n"
        )
        self.conf.write_text(
            text.replace("Default=YES", "Default=YES PriorityTier=10 PreemptMode=OFF"),
            encoding="utf-8",
        )


def recorded(trace: Path, jobs: int, seed: int) -> list[Arrival]:
    """A stretch of so many consecutive jobs of a trace: a CSV file with submit_s, gpus and duration_s.

    Widths are rounded up to a power of two; jobs wider than the cluster ask for all of it. A trace without
    requested times gets those of `poisson`.
    """
    with trace.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rng = random.Random(seed)
    first = rng.randrange(len(rows) - jobs + 1)
    found = []
    for row in rows[first : first + jobs]:
        gpus = min(NODES * GPUS, 1 << (max(1, int(row["gpus"])) - 1).bit_length())
        duration_s = max(LEAST_S, float(row["duration_s"]))
        request_s = requested_s(duration_s, rng.choice(REQUEST_FACTORS))
        found.append(Arrival(float(row["submit_s"]), gpus, duration_s, request_s))
    began_s = found[0].submit_s
    return [replace(a, submit_s=a.submit_s - began_s) for a in found]


def others(jobs: int, load: float, seed: int, trace: Path | None = None) -> list[Arrival]:
    """The jobs of others, compressed; their load is exact after the longest are cut."""
    found = recorded(trace, jobs, seed) if trace else poisson(jobs, load, NODES * GPUS, seed)
    short = [min(LONGEST_S, a.duration_s / COMPRESSION) for a in found]
    work = sum(a.gpus * s for a, s in zip(found, short, strict=True))
    scale = work / (load * NODES * GPUS) / found[-1].submit_s
    return [
        Arrival(
            a.submit_s * scale,
            a.gpus,
            s,
            60.0 * math.ceil(s * (a.request_s / a.duration_s) / 60),
        )
        for a, s in zip(found, short, strict=True)
    ]


class Queue:
    """The clock of one arm, and jobs that sleep in its cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.origin = cluster, time.time()
        self.marks = cluster.directory / "marks"
        self.marks.mkdir()

    def now(self) -> float:
        return time.time() - self.origin

    def sleep(self, name: str, request_s: float, seconds: float, *options: str) -> None:
        """Submit a job that sleeps, and marks its start and its end."""
        mark = self.marks / name
        note = f"echo $EPOCHREALTIME >> {mark}"
        script = f"#!/bin/bash\n{note}\nsleep {seconds:.3f}\n{note}\n"
        command = ["sbatch", "--parsable", "-J", name, "-o", "/dev/null", "--mem=50"]
        subprocess.run(
            [*command, f"--time={math.ceil(request_s / 60)}", *options],
            input=script,
            text=True,
            env=self.cluster.env,
            check=True,
            capture_output=True,
        )

    def dates(self, name: str) -> list[float]:
        """When the job started and ended, as far as it has."""
        with suppress(FileNotFoundError):
            return [
                float(x) - self.origin
                for x in (self.marks / name).read_text(encoding="utf-8").split()
            ]
        return []


def shape(gpus: int, scatter: bool) -> list[str]:
    """Whole nodes, or GPUs anywhere."""
    if scatter:
        return [f"--ntasks={gpus}", "--gpus-per-task=1"]
    nodes = -(-gpus // GPUS)
    return [f"--nodes={nodes}", f"--ntasks={nodes}", f"--gres=gpu:{gpus // nodes}"]


def gang(queue: Queue, arm: Arm, training: Training) -> None:
    """One job of all GPUs."""
    name, seconds = f"t{training.moment}", TRAINING_S * WIDTH / arm.gpus
    queue.sleep(name, 1.5 * seconds, seconds, *shape(arm.gpus, arm.scatter))
    while len(dates := queue.dates(name)) < 2:
        time.sleep(LOOK_S)
    training.started_s, training.done_s = dates
    training.joins, training.gpu_s = 1, arm.gpus * (dates[1] - dates[0])


class Sleepers(SlurmJobs):
    """Worker jobs that only sleep, and say by their process id that they are there."""

    def __init__(self, queue: Queue, asked: WorkerJob, name: str) -> None:
        folder = RunFolder(queue.marks / name)
        folder.path.mkdir()
        super().__init__(asked, folder, name)
        self.folder = folder.path

    def script(self, number: int) -> str:
        return f"#!/bin/bash\necho $$ > {self.folder}/{number}\nexec sleep 1000\n"

    def present(self, numbers: Sequence[int]) -> set[int]:
        """Of some workers those that are there: a server would know by their connections."""
        found = set()
        for number in numbers:
            with suppress(FileNotFoundError, ValueError):
                pid = int((self.folder / str(number)).read_text(encoding="utf-8"))
                if Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").split()[2] != "Z":
                    found.add(number)
        return found


def split(queue: Queue, arm: Arm, training: Training) -> None:
    """Worker jobs of one GPU, until they have done the work of the gang together."""
    options = ("--partition=spare",) if arm.preemptible else ()
    asked = WorkerJob(1, 1, 50, max(1, math.ceil(3 * TRAINING_S / 60)), options)
    jobs = Sleepers(queue, asked, f"t{training.moment}")
    left_s, there, ever, stopped_until = TRAINING_S * WIDTH, set(), set(), 0.0
    with Keeper(jobs, WIDTH, jobs.folder / "jobs.jsonl") as keeper:
        before = queue.now()
        while left_s > 0:
            time.sleep(LOOK_S)
            now = queue.now()
            alive = [e.number for e in keeper.jobs() if e.ended_unix_s is None]
            present = jobs.present(alive)
            training.gpu_s += len(there) * (now - before)
            steps_s = max(0.0, now - max(before, min(now, stopped_until)))
            left_s -= len(there) * steps_s
            training.idle_gpu_s += len(there) * (now - before - steps_s)
            if present != there:
                training.losses += len(there - present)
                ever |= present
                if there:  # the first one waits for nobody
                    stopped_until = now + arm.pause_s / COMPRESSION
                there = present
                if math.isnan(training.started_s):
                    training.started_s = now
                keeper.look_soon()
            before = now
            keeper.check()
        training.done_s = queue.now()
        training.joins = len(ever)
        keeper.finish()


def run_arm(name: str, arrivals: list[Arrival], moments: int, out: Path) -> None:
    """One arm on a cluster of its own; writes its trainings, and how long others waited."""
    arm = ARMS[name]
    at = [arrivals[-1].submit_s * (k + 1) / (moments + 1) for k in range(moments)]
    trainings: list[Training] = []
    with (
        tempfile.TemporaryDirectory(prefix="sb-") as folder,
        Cluster(Path(folder), gpus=GPUS) as cluster,
    ):
        # What `SlurmJobs` asks is asked of this cluster.
        os.environ.clear()
        os.environ.update(cluster.env)
        queue = Queue(cluster)
        todo = [(a.submit_s, i) for i, a in enumerate(arrivals)]
        todo += [(t, -1 - k) for k, t in enumerate(at) if arm.gpus >= 0]
        running: list[threading.Thread] = []
        submitted: dict[str, float] = {}
        for due_s, what in sorted(todo):
            time.sleep(max(0.0, due_s - queue.now()))
            if what < 0:
                training = Training(name, -1 - what, queue.now())
                trainings.append(training)
                work = gang if arm.gpus else split
                running.append(threading.Thread(target=work, args=(queue, arm, training)))
                running[-1].start()
            else:
                a = arrivals[what]
                submitted[f"b{what}"] = queue.now()
                queue.sleep(f"b{what}", a.request_s, a.duration_s, *shape(a.gpus, False))
        for thread in running:
            thread.join()
        while cluster.run("squeue", "-h"):
            time.sleep(1)
        waits = [queue.dates(job)[0] - at_s for job, at_s in submitted.items() if queue.dates(job)]
    rounded = [
        {k: round(v, 2) if isinstance(v, float) else v for k, v in asdict(t).items() if k != "arm"}
        for t in trainings
    ]
    wait_s = round(statistics.fmean(waits), 2)
    out.write_text(json.dumps({"others_wait_s": wait_s, "trainings": rounded}), encoding="utf-8")


# ---------------------------------------------------------------- the table


def interval(values: Sequence[float], rng: random.Random) -> tuple[float, float]:
    """95 % of the mean, by resampling the moments."""
    draws = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(2000))
    return draws[50], draws[1949]


def simulated(arm: Arm, run: dict, arrivals: list[Arrival], draws: int = 20) -> float | None:
    """The mean time to the result by `plan.queue`, in seconds; None for what others preempt.

    As `queue_slurm.py` draws it: SLURM's delays are inputs, and the next allocation comes a little later.
    """
    if arm.preemptible or arm.gpus < 0:
        return None
    rng, times = random.Random(0), []
    last_s, moments = arrivals[-1].submit_s, run["moments"]
    for _ in range(draws):
        late = [
            replace(a, duration_s=a.duration_s + rng.expovariate(1 / REACT_S)) for a in arrivals
        ]
        rules = Rules(
            reserve=1, backfill_s=1.0, depth=500, start_delay_s=START_S, end_delay_s=END_S
        )
        sim = Simulated(NODES, GPUS, late, rules)
        trainings = []
        for k in range(moments):
            sim.run_until(last_s * (k + 1) / (moments + 1))
            own = (Scaling(0.0), Checkpoints(1800.0, 0.0), 0.0)
            if arm.gpus:
                request_s = 60.0 * math.ceil(1.5 * TRAINING_S * WIDTH / arm.gpus / 60)
                work = (WIDTH * TRAINING_S, request_s, arm.gpus)
                trainings.append(Gang(*work, *own, scatter=arm.scatter))
            else:
                request_s = 60.0 * math.ceil(3 * TRAINING_S / 60)
                trainings.append(Split(WIDTH * TRAINING_S, request_s, WIDTH, *own))
            trainings[-1].begin(sim)
        sim.run_until()
        times += [t.time_to_result_s for t in trainings]
    return statistics.fmean(times)


def others_of(run: dict) -> list[Arrival]:
    """The jobs of others in a run. Those of a trace stand in it."""
    if "others" in run:
        return [Arrival(*values) for values in run["others"]]
    return others(run["jobs"], run["load"], run["seed"])


def rows_of(run: dict) -> Iterator[dict[str, str]]:
    """A row of the table for each arm."""
    rng = random.Random(0)
    arrivals = others_of(run)
    times = {
        name: {t["moment"]: t["done_s"] - t["submitted_s"] for t in arm["trainings"]}
        for name, arm in run["arms"].items()
    }
    for name, told in run["arms"].items():
        row = {"arm": ARMS[name].title}
        if trainings := told["trainings"]:
            taken = list(times[name].values())
            low, high = interval(taken, rng)
            row["time to result, s"] = f"{statistics.fmean(taken):.1f} [{low:.1f}, {high:.1f}]"
            pairs = [math.log(times[name][k] / times["gang"][k]) for k in times[name]]
            low, high = map(math.exp, interval(pairs, rng))
            ratio = math.exp(statistics.fmean(pairs))
            row["over the gang's"] = f"{ratio:.2f} [{low:.2f}, {high:.2f}]"
            by_plan = simulated(ARMS[name], run, arrivals)
            row["simulated, s"] = "" if by_plan is None else f"{by_plan:.1f}"
            waits = [t["started_s"] - t["submitted_s"] for t in trainings]
            row["wait to the first step, s"] = f"{statistics.fmean(waits):.1f}"
            for title, key in COUNTED.items():
                row[title] = f"{statistics.fmean(t[key] for t in trainings):.1f}"
        row["others' mean wait, s"] = f"{told['others_wait_s']:.1f}"
        yield row


COUNTED = {
    "GPU-s held": "gpu_s", "of them idle": "idle_gpu_s", "workers that came": "joins",
    "that were preempted": "losses",
}  # fmt: skip


def pairs_told(run: dict) -> Iterator[str]:
    """The asynchronous arms over the split synchronous ones, pair by pair, in sentences."""
    rng = random.Random(0)
    for ours, theirs in (("async", "split"), ("spare-async", "spare-split")):
        if not {ours, theirs} <= run["arms"].keys():
            continue
        times = [
            [t["done_s"] - t["submitted_s"] for t in run["arms"][name]["trainings"]]
            for name in (ours, theirs)
        ]
        logs = [math.log(a / b) for a, b in zip(*times, strict=True)]
        low, high = map(math.exp, interval(logs, rng))
        ratio = math.exp(statistics.fmean(logs))
        yield f"{ARMS[ours].title}, over {ARMS[theirs].title}: {ratio:.2f} [{low:.2f}, {high:.2f}]."


def table(run: dict) -> list[str]:
    """A run's lines of the page."""
    rows = list(rows_of(run))
    names = list(max(rows, key=len))
    begun, ended = run["load_average"]
    trace = f", {run['trace']}" if "trace" in run else ""
    of_trace = f", consecutive in the trace {run['trace']}," if "trace" in run else ""
    used = ": others used the machine" if begun > run["cores"] else ""
    return [
        f"## Load {run['load']:g}, seed {run['seed']}{trace}",
        "",
        f"{run['jobs']} jobs of others{of_trace} at an offered load of {run['load']:g}; {run['moments']}",
        f"trainings in each arm. {run['cores']} cores with a load average of {begun:.1f} at the start and",
        f"{ended:.1f} at the end{used}.",
        *([f"The trace: {run['source']}."] if run.get("source") else []),
        "",
        f"| {' | '.join(names)} |",
        f"|---{'|--:' * (len(names) - 1)}|",
        *(f"| {' | '.join(row.get(name, '') for name in names)} |" for row in rows),
        "",
        *(f"- {told}" for told in pairs_told(run)),
        "",
    ]


def write_page(out: Path) -> None:
    """Write experiment.md of all runs."""
    runs = [
        json.loads(p.read_text(encoding="utf-8")) for p in sorted((out / "experiment").glob("*"))
    ]
    lines = [
        "# Gang or elastic workers on a real SLURM",
        "",
        f"Made by `benchmarks/elastic_slurm.py`: SLURM on {NODES} nodes of {GPUS} pretend GPUs, one cluster",
        "an arm, side by side. Each training is an hour on 8 GPUs, at the same moments in each arm,",
        f"among the same jobs of others. Seconds are compressed: 1 s stands for {COMPRESSION:g} s. Brackets:",
        "95 % by resampling the moments. Simulated: by `plan/queue`, with the same jobs at the same moments.",
        "",
        "The queue, backfill, preemption and the keeper of worker jobs are real. Trainings sleep: an",
        "asynchronous worker's second counts as much as a synchronous one's (a worth of 1), and a pause is",
        "the measured one ([pause](pause.md)), compressed. The keeper's looks and SLURM's delays are not",
        "compressed: here they cost more than beside trainings of hours.",
        "",
    ]
    for run in runs:
        lines += table(run)
    text = "\n".join(lines)
    (out / "experiment.md").write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=Path, help="jobs of others from a CSV file: submit_s, gpus, duration_s"
    )
    parser.add_argument("--source", default="", help="of the trace: where it is from, its licence")
    parser.add_argument("--jobs", type=int, default=200, help="jobs of others")
    parser.add_argument(
        "--load", type=float, default=0.6, help="that they offer, without trainings"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the others' jobs")
    parser.add_argument("--moments", type=int, default=12, help="trainings in each arm")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if given.page:
        write_page(given.out)
        return
    arrivals = others(given.jobs, given.load, given.seed, given.trace)
    if given.arm:
        run_arm(given.arm, arrivals, given.moments, given.out)
        return
    begun = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__]
        for key in ("jobs", "load", "seed", "moments"):
            command += [f"--{key}", str(getattr(given, key))]
        command += ["--trace", str(given.trace)] if given.trace else []
        started = {
            arm: subprocess.Popen([*command, "--arm", arm, "--out", f"{folder}/{arm}.json"])
            for arm in given.arms
        }
        for arm, process in started.items():
            if process.wait():
                raise SystemExit(f"the arm {arm} failed")
        found = {
            arm: json.loads(Path(folder, f"{arm}.json").read_text(encoding="utf-8"))
            for arm in given.arms
        }
    run = {
        "jobs": given.jobs,
        "load": given.load,
        "seed": given.seed,
        "moments": given.moments,
        "cores": os.cpu_count(),
        "load_average": [begun, os.getloadavg()[0]],
        "arms": found,
    }
    if given.trace:
        rounded = [[round(x, 3) for x in astuple(a)] for a in arrivals]
        run |= {"trace": given.trace.stem, "source": given.source, "others": rounded}
    runs = given.out / "experiment"
    runs.mkdir(parents=True, exist_ok=True)
    name = (
        f"load-{given.load:g}-seed-{given.seed}{f'-{given.trace.stem}' if given.trace else ''}.json"
    )
    (runs / name).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    write_page(given.out)


if __name__ == "__main__":
    main()
