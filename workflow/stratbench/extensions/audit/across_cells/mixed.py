"""Rules of the audit on fields that compared cells must have in common: a table with a rule per row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stratbench.analysis.records.derived import get_field_by_path
from stratbench.cell.record import Record
from stratbench.cell.settings import OF_A_VARIANT
from stratbench.cell.text.words import shorten_for_table
from stratbench.extensions.audit.rule import AffectedValues, AuditData, Case, Rule, Severity, rule

#: Fields of a worker's provenance that depend on the time or the rank, and not on the machine.
WORKER_SPECIFIC_FIELDS = (
    *("device", "load_1m", "host.affinity", "gpu.uuid", "gpu.index", "gpu.pci_bus_id", "slurm"),
    *("topology", "environment.CUDA_VISIBLE_DEVICES", "environment.NVIDIA_VISIBLE_DEVICES"),
    *("environment.GLOO_SOCKET_IFNAME", "environment.NCCL_SOCKET_IFNAME"),
    "environment.TORCHINDUCTOR_CACHE_DIR",  # each job has another folder for this cache
)
#: Prefixes of record field paths. Such a field counts as different if only some compared cells have it.
FIELDS_REQUIRED_IN_ALL = ("settings.", "worker.", "provenance.git.")
#: Prefixes of record field paths whose values are only defaults in a record without workers.
FIELDS_OF_WORKERS = ("strategy.wrap_groups", "strategy.traits.")
#: Text for the value of a field that is missing in this record but not in others.
NOT_STATED = "not stated"
#: Settings that may differ between compared cells, because a study varies them.
VARIED_SETTINGS = ("strategy", "options", "gpus", "per_worker_batch", "seed")


#: Values of a record's fields as texts, by the path of the field. A field of workers has each worker's value.
FieldTexts = dict[str, set[str]]
RecordWithTexts = tuple[Record, FieldTexts]


@dataclass(frozen=True)
class ComparedFields:
    """Record fields that must be equal in compared cells, and the rule that checks them: a row of TABLE.

    Cells are compared if they share experiment, model and the coordinates in `shared_coordinates`. A field
    belongs to a row if its path begins with one of `field_path_prefixes`.
    """

    rule_id: str
    severity: Severity
    affects: AffectedValues
    explanation: str
    field_path_prefixes: tuple[str, ...]
    shared_coordinates: tuple[str, ...] = ()


# fmt: off
#: Rules and the record fields that they compare. A field belongs to the first row that names its path.
TABLE = (
    ComparedFields("mixed-precision", "unusable", "all",
        "Cells of a comparison compute in different precisions.",
        ("settings.precision", "strategy.details.compute_dtype", "strategy.details.weights_dtype",
         "worker.flags.float32_matmul_precision", "worker.flags.matmul_tf32", "worker.flags.cudnn_tf32",
         "worker.flags.default_dtype", "worker.environment.NVIDIA_TF32_OVERRIDE",
         "worker.environment.TORCH_ALLOW_TF32")),
    ComparedFields("mixed-tasks", "unusable", "all",
        "Cells of a comparison learn different tasks, whose scores and speeds do not compare.",
        ("task", "settings.own_task")),
    ComparedFields("mixed-data", "unusable", "all",
        "Cells of a comparison were trained or tested on different data.", ("data", "settings.data_spec")),
    ComparedFields("mixed-models", "unusable", "all",
        "Cells of a comparison trained models that differ in size, resolution, classes or work.",
        ("model.parameters", "model.trainable_parameters", "model.input_shape", "model.classes",
         "model.batchnorm", "model.dropout", "compute.forward_flops_per_sample")),
    ComparedFields("mixed-optimizers", "unusable", "all",
        "Cells of a comparison were trained by different optimizers, or keep their states in different "
        "types.",
        ("settings.optimizer", "settings.betas", "settings.eps", "strategy.details.optimizer_dtype")),
    ComparedFields("mixed-variants", "unusable", "all",
        "Cells of one strategy or variant were trained with different settings.",
        tuple(f"settings.{key}" for key in OF_A_VARIANT), ("strategy",)),
    ComparedFields("mixed-settings", "unusable", "all",
        "Cells of a comparison were trained with different settings.", ("settings",)),
    ComparedFields("mixed-seeds", "unusable", "score",
        "All cells of a repeat draw weights and samples from one seed.", ("seed",), ("repeat",)),
    ComparedFields("mixed-batches", "unusable", "all",
        "Cells of a comparison on as many workers divide the data into different batches.",
        ("batch.global_batch", "batch.steps_per_epoch"), ("gpus",)),
    ComparedFields("mixed-devices", "unusable", "time", "Cells of a comparison ran on different devices.",
        ("provenance.device", "worker.gpu.name", "worker.gpu.memory_bytes", "worker.gpu.capability",
         "worker.gpu.multiprocessors", "worker.host.cpu_model")),
    ComparedFields("mixed-clocks", "warning", "time",
        "GPUs of a comparison were allowed other clocks, power or links.", ("worker.gpu",)),
    ComparedFields("mixed-hosts", "note", "time",
        "Cells of a comparison ran on different hosts, which may differ in more than their GPUs.",
        ("worker.host.name", "worker.host.os")),
    ComparedFields("mixed-cores", "warning", "time",
        "Cells of a comparison on as many workers had different cores, threads or memory.",
        ("worker.host", "cores", "provenance.threads_per_worker", "provenance.nodes",
         "provenance.workers_per_node", "worker.environment.OMP_NUM_THREADS"), ("gpus",)),
    ComparedFields("mixed-versions", "warning", "all",
        "Cells of a comparison ran with different versions of torch or of its libraries.",
        ("worker.software",)),
    ComparedFields("mixed-drivers", "note", "time", "Cells of a comparison ran with different GPU drivers.",
        ("worker.driver",)),
    ComparedFields("mixed-revisions", "note", "all",
        "Cells of a comparison were trained by different revisions of the code.",
        ("provenance.git", "provenance.stratbench")),
    ComparedFields("mixed-methods", "warning", "memory",
        "Peaks of memory of a comparison were measured in different ways.", ("memory.method",)),
    ComparedFields("mixed-environments", "warning", "all",
        "Workers of a comparison ran with different flags or environments.",
        ("worker.flags", "worker.environment", "worker")),
)
# fmt: on


def iter_values_by_path(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield every value in nested dicts with its path. A list counts as one value."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, inner in value.items():
        yield from iter_values_by_path(inner, f"{path}.{key}")


def collect_field_texts_by_path(record: Record) -> FieldTexts:
    """Return a record's values that the rules compare, as texts by the field's path.

    A path has the values of all workers.
    """
    texts: FieldTexts = defaultdict(set)
    parts = (
        "settings", "strategy", "model", "task", "data", "batch", "memory", "provenance", "score",
    )  # fmt: skip
    leaves = [leaf for part in parts for leaf in iter_values_by_path(record[part], part)]
    for part in ("compute", "communication"):
        leaves += iter_values_by_path(record.get(part), part)
    seed = get_field_by_path(record, "settings.seed")
    leaves += [("seed", seed)]
    by_worker = [
        dict(iter_values_by_path(worker["provenance"] or {}, "worker"))
        for worker in record["workers"]
    ]
    for path in dict.fromkeys(path for one in by_worker for path in one):
        leaves += [(path, NOT_STATED if one.get(path) is None else one[path]) for one in by_worker]
    for worker in record["workers"]:
        leaves.append(
            ("cores", len(get_field_by_path(worker["provenance"], "host.affinity") or ()) or None)
        )
    for path, value in leaves:
        if not record["workers"] and path.startswith(FIELDS_OF_WORKERS):
            continue
        # Of a value such as `float16 (autocast)`, only the first word is compared.
        word = path == "strategy.details.compute_dtype" and isinstance(value, str)
        if value is not None:
            texts[path].add(str(value.split()[0] if word else value))
    return texts


@lru_cache(maxsize=10_000)
def find_row_index_of_field(path: str) -> int | None:
    """Return the index of the row in TABLE that compares the field at `path`.

    Return None if the field may differ.
    """
    name = path.removeprefix("worker.")
    if name != path and any(
        name == own or name.startswith(f"{own}.") for own in WORKER_SPECIFIC_FIELDS
    ):
        return None
    if any(
        path == f"settings.{key}" or path.startswith(f"settings.{key}.") for key in VARIED_SETTINGS
    ):
        return None
    # The global batch may differ with weak scaling. The rule mixed-batches compares it.
    if path == "settings.global_batch":
        return None
    for i, entry in enumerate(TABLE):
        if any(
            path == start or path.startswith(f"{start}.") for start in entry.field_path_prefixes
        ):
            return i
    return None


@lru_cache(maxsize=1)
def collect_records_by_table_row(evidence: AuditData) -> list[list[RecordWithTexts]]:
    """Return all records per row of TABLE, each with its values of the row's fields."""
    by_row: list[list[RecordWithTexts]] = [[] for _ in TABLE]
    for record in evidence.records:
        parts: list[FieldTexts] = [{} for _ in TABLE]
        for path, values in collect_field_texts_by_path(record).items():
            if (row_index := find_row_index_of_field(path)) is not None:
                parts[row_index][path] = values
        for row_index, part in enumerate(parts):
            by_row[row_index].append((record, part))
    return by_row


def iter_field_differences(evidence: AuditData, row_index: int) -> Iterator[Case]:
    """Yield the fields of one row of TABLE in which compared cells differ."""
    names = ("experiment", "model", *TABLE[row_index].shared_coordinates)
    groups: dict[tuple[Any, ...], list[RecordWithTexts]] = defaultdict(list)
    for record, facts in collect_records_by_table_row(evidence)[row_index]:
        groups[tuple(record["cell"][name] for name in names)].append((record, facts))
    for key, members in groups.items():
        where = dict(zip(names, key, strict=True))
        for path in dict.fromkeys(path for _, facts in members for path in facts):
            silent = {NOT_STATED} if path.startswith(FIELDS_REQUIRED_IN_ALL) else set()
            if path.startswith("worker."):  # cells without workers' results have no such fields
                members = [(record, facts) for record, facts in members if record["workers"]]
            by_record = [(record, facts.get(path, silent)) for record, facts in members]
            by_record = [(record, values) for record, values in by_record if values]
            if len(set().union(*(values for _, values in by_record))) > 1:
                yield where, describe_field_values(path, by_record)


def describe_field_values(path: str, values_by_record: Sequence[tuple[Record, set[str]]]) -> str:
    """Describe the values of a field, the most frequent one first.

    Up to three others follow with their cells.
    """
    counts = Counter(value for _, values in values_by_record for value in values)
    usual, *others = (value for value, _ in counts.most_common())
    parts = [f"{path}: {shorten_for_table(usual)}"]
    for value in others[:3]:
        cells = [record["cell"] for record, values in values_by_record if value in values]
        named = ", ".join(dict.fromkeys(f"{c['strategy']} on {c['gpus']}" for c in cells))
        parts.append(f"{shorten_for_table(value)} ({shorten_for_table(named)})")
    return ", ".join(parts)


def make_rule_of_table_row(row_index: int) -> Rule:
    """Make the audit rule that compares cells in the fields of one row of TABLE."""
    compared = TABLE[row_index]

    def find_field_differences(evidence: AuditData) -> Iterator[Case]:
        yield from iter_field_differences(evidence, row_index)

    find_field_differences.__doc__ = compared.explanation
    return rule(compared.rule_id, compared.severity, compared.affects)(find_field_differences)


MIXED = tuple(map(make_rule_of_table_row, range(len(TABLE))))
