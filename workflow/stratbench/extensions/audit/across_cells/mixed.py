"""Rules on what compared cells must have in common: one table, with a rule for each row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stratbench.analysis.records.derived import value_at
from stratbench.cell.record import Record
from stratbench.cell.settings import OF_A_VARIANT
from stratbench.cell.text.words import shortened
from stratbench.extensions.audit.rule import Affects, AuditData, Case, Rule, Severity, rule

#: Fields of a worker's provenance that depend on the moment or the rank, not on the machine.
OWN = (
    *("device", "load_1m", "host.affinity", "gpu.uuid", "gpu.index", "gpu.pci_bus_id", "slurm"),
    *("topology", "environment.CUDA_VISIBLE_DEVICES", "environment.NVIDIA_VISIBLE_DEVICES"),
    *("environment.GLOO_SOCKET_IFNAME", "environment.NCCL_SOCKET_IFNAME"),
    "environment.TORCHINDUCTOR_CACHE_DIR",  # a folder of the job, which the worker sets
)
#: Fields that all cells of a comparison have, or none, by the start of their path.
STATED = ("settings.", "worker.", "provenance.git.")
#: Defaults in the record of a cell whose workers have reported nothing, by the start of their path.
OF_WORKERS = ("strategy.wrap_groups", "strategy.traits.")
#: Text for a field that one cell or worker lacks and others have.
NOT_STATED = "not stated"
#: Settings that differ on purpose between the cells of an experiment.
VARIED = ("strategy", "options", "gpus", "per_worker_batch", "seed")


@dataclass(frozen=True)
class Compared:
    """Fields that compared cells must have in common, by the start of their path.

    `within`: coordinates that the cells must share to be compared, besides experiment and model.
    """

    rule: str
    severity: Severity
    affects: Affects
    explanation: str
    fields: tuple[str, ...]
    within: tuple[str, ...] = ()


# fmt: off
#: A field belongs to the first row that names it; the last row takes the rest of the workers' provenance.
TABLE = (
    Compared("mixed-precision", "unusable", "all", "Cells of a comparison compute in different precisions.",
        ("settings.precision", "strategy.details.compute_dtype", "strategy.details.weights_dtype",
         "worker.flags.float32_matmul_precision", "worker.flags.matmul_tf32", "worker.flags.cudnn_tf32",
         "worker.flags.default_dtype", "worker.environment.NVIDIA_TF32_OVERRIDE",
         "worker.environment.TORCH_ALLOW_TF32")),
    Compared("mixed-tasks", "unusable", "all",
        "Cells of a comparison learn different tasks, whose scores and speeds do not compare.",
        ("task", "settings.own_task")),
    Compared("mixed-data", "unusable", "all",
        "Cells of a comparison were trained or tested on different data.", ("data", "settings.data_spec")),
    Compared("mixed-models", "unusable", "all",
        "Cells of a comparison trained models that differ in size, resolution, classes or work.",
        ("model.parameters", "model.trainable_parameters", "model.input_shape", "model.classes",
         "model.batchnorm", "model.dropout", "compute.forward_flops_per_sample")),
    Compared("mixed-optimizers", "unusable", "all",
        "Cells of a comparison were trained by different optimizers, or keep their states in different "
        "types.",
        ("settings.optimizer", "settings.betas", "settings.eps", "strategy.details.optimizer_dtype")),
    Compared("mixed-variants", "unusable", "all",
        "Cells of one strategy or variant were trained with different settings.",
        tuple(f"settings.{key}" for key in OF_A_VARIANT), ("strategy",)),
    Compared("mixed-settings", "unusable", "all",
        "Cells of a comparison were trained with different settings.", ("settings",)),
    Compared("mixed-seeds", "unusable", "score",
        "All cells of a repeat draw weights and samples from one seed.", ("seed",), ("repeat",)),
    Compared("mixed-batches", "unusable", "all",
        "Cells of a comparison on as many workers divide the data into different batches.",
        ("batch.global_batch", "batch.steps_per_epoch"), ("gpus",)),
    Compared("mixed-devices", "unusable", "time", "Cells of a comparison ran on different devices.",
        ("provenance.device", "worker.gpu.name", "worker.gpu.memory_bytes", "worker.gpu.capability",
         "worker.gpu.multiprocessors", "worker.host.cpu_model")),
    Compared("mixed-clocks", "warning", "time",
        "GPUs of a comparison were allowed other clocks, power or links.", ("worker.gpu",)),
    Compared("mixed-hosts", "note", "time",
        "Cells of a comparison ran on different hosts, which may differ in more than their GPUs.",
        ("worker.host.name", "worker.host.os")),
    Compared("mixed-cores", "warning", "time",
        "Cells of a comparison on as many workers had different cores, threads or memory.",
        ("worker.host", "cores", "provenance.threads_per_worker", "provenance.nodes",
         "provenance.workers_per_node", "worker.environment.OMP_NUM_THREADS"), ("gpus",)),
    Compared("mixed-versions", "warning", "all",
        "Cells of a comparison ran with different versions of torch or of its libraries.",
        ("worker.software",)),
    Compared("mixed-drivers", "note", "time", "Cells of a comparison ran with different GPU drivers.",
        ("worker.driver",)),
    Compared("mixed-revisions", "note", "all",
        "Cells of a comparison were trained by different revisions of the code.",
        ("provenance.git", "provenance.stratbench")),
    Compared("mixed-methods", "warning", "memory",
        "Peaks of memory of a comparison were measured in different ways.", ("memory.method",)),
    Compared("mixed-environments", "warning", "all",
        "Workers of a comparison ran with different flags or environments.",
        ("worker.flags", "worker.environment", "worker")),
)
# fmt: on


def values_by_path(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every value in nested objects, with its path; a list is one value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from values_by_path(inner, f"{path}.{key}")


def texts_by_path(record: Record) -> dict[str, set[str]]:
    """Return fields that could make a record incomparable: texts by path, over all workers."""
    texts: dict[str, set[str]] = defaultdict(set)
    parts = (
        "settings", "strategy", "model", "task", "data", "batch", "memory", "provenance", "score",
    )  # fmt: skip
    leaves = [leaf for part in parts for leaf in values_by_path(record[part], part)]
    for part in ("compute", "communication"):
        leaves += values_by_path(record.get(part), part)
    seed = value_at(record, "settings.seed")
    leaves += [("seed", seed)]
    by_worker = [
        dict(values_by_path(worker["provenance"] or {}, "worker")) for worker in record["workers"]
    ]
    for path in dict.fromkeys(path for one in by_worker for path in one):
        leaves += [(path, NOT_STATED if one.get(path) is None else one[path]) for one in by_worker]
    for worker in record["workers"]:
        leaves.append(("cores", len(value_at(worker["provenance"], "host.affinity") or ()) or None))
    for path, value in leaves:
        if not record["workers"] and path.startswith(OF_WORKERS):
            continue
        # The strategy chooses how to reach a format: `float16 (autocast)`.
        word = path == "strategy.details.compute_dtype" and isinstance(value, str)
        if value is not None:
            texts[path].add(str(value.split()[0] if word else value))
    return texts


@lru_cache(maxsize=10_000)
def row_comparing(path: str) -> int | None:
    """Return the row of TABLE that compares a field.

    Return None if the field may differ.
    """
    name = path.removeprefix("worker.")
    if name != path and any(name == own or name.startswith(f"{own}.") for own in OWN):
        return None
    if any(path == f"settings.{key}" or path.startswith(f"settings.{key}.") for key in VARIED):
        return None
    if path == "settings.global_batch":  # of weak scaling; see mixed-batches
        return None
    for i, entry in enumerate(TABLE):
        if any(path == start or path.startswith(f"{start}.") for start in entry.fields):
            return i
    return None


@lru_cache(maxsize=1)
def records_by_row(evidence: AuditData) -> list[list[tuple[Record, dict[str, set[str]]]]]:
    """Return every record for each row of TABLE, with its values of the row's fields."""
    by_row: list[list[tuple[Record, dict[str, set[str]]]]] = [[] for _ in TABLE]
    for record in evidence.records:
        parts: list[dict[str, set[str]]] = [{} for _ in TABLE]
        for path, values in texts_by_path(record).items():
            if (entry := row_comparing(path)) is not None:
                parts[entry][path] = values
        for entry, part in enumerate(parts):
            by_row[entry].append((record, part))
    return by_row


def differences_of_row(evidence: AuditData, entry: int) -> Iterator[Case]:
    """Yield the fields of a row of TABLE in which compared cells differ."""
    names = ("experiment", "model", *TABLE[entry].within)
    groups: dict[tuple[Any, ...], list[tuple[Record, dict[str, set[str]]]]] = defaultdict(list)
    for record, facts in records_by_row(evidence)[entry]:
        groups[tuple(record["cell"][name] for name in names)].append((record, facts))
    for key, members in groups.items():
        where = dict(zip(names, key, strict=True))
        for path in dict.fromkeys(path for _, facts in members for path in facts):
            silent = {NOT_STATED} if path.startswith(STATED) else set()
            if path.startswith("worker."):  # cells whose workers left nothing are skipped
                members = [(record, facts) for record, facts in members if record["workers"]]
            by_record = [(record, facts.get(path, silent)) for record, facts in members]
            by_record = [(record, values) for record, values in by_record if values]
            if len(set().union(*(values for _, values in by_record))) > 1:
                yield where, describe_values(path, by_record)


def describe_values(path: str, by_record: Sequence[tuple[Record, set[str]]]) -> str:
    """Return a text on a field's values: the most frequent, and up to three others."""
    counts = Counter(value for _, values in by_record for value in values)
    usual, *others = (value for value, _ in counts.most_common())
    parts = [f"{path}: {shortened(usual)}"]
    for value in others[:3]:
        cells = [record["cell"] for record, values in by_record if value in values]
        named = ", ".join(dict.fromkeys(f"{c['strategy']} on {c['gpus']}" for c in cells))
        parts.append(f"{shortened(value)} ({shortened(named)})")
    return ", ".join(parts)


def rule_of_row(entry: int) -> Rule:
    """Return the rule that compares the fields of a row of TABLE."""
    compared = TABLE[entry]

    def check(evidence: AuditData) -> Iterator[Case]:
        yield from differences_of_row(evidence, entry)

    check.__doc__ = compared.explanation
    return rule(compared.rule, compared.severity, compared.affects)(check)


MIXED = tuple(map(rule_of_row, range(len(TABLE))))
