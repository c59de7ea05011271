"""Reads the nodes of a SLURM cluster, and explains why no node is large enough for a cell."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stratbench.cell.coordinates import Cell
from stratbench.cell.settings import Settings
from stratbench.cell.text.words import format_count, format_names
from stratbench.study.resources import JobRequest
from stratbench.study.slurm.commands import read_command_output

#: sinfo's format, a line per node and partition: partition (`*` marks the default one), node, CPUs, memory in
#: MiB, GPUs, time limit.
_FORMAT = "%P|%N|%c|%m|%G|%l"
#: Maximum number of reasons that are printed. Cells with other reasons are only counted.
MAX_PRINTED_REASONS = 5


@dataclass(frozen=True)
class Node:
    """The resources of one SLURM node in one partition.

    Attributes:
        partition: Name of the partition.
        is_default: Whether the partition is SLURM's default one.
        name: Name of the node.
        cpus: Number of CPU cores.
        mem_mib: Memory in MiB.
        gpus: Number of GPUs.
        time_limit_minutes: The partition's time limit in minutes, or None without one.
        gpu_counts_by_type: Number of GPUs of each type that SLURM has a name for.
    """

    partition: str
    is_default: bool
    name: str
    cpus: int
    mem_mib: int
    gpus: int
    time_limit_minutes: int | None
    gpu_counts_by_type: Mapping[str, int] = field(default_factory=dict)

    def count_gpus(self, gpu_type: str | None) -> int:
        """Return the number of the node's GPUs of a type. The type None means all types."""
        return self.gpus if gpu_type is None else self.gpu_counts_by_type.get(gpu_type, 0)

    def list_missing_resources(self, request: JobRequest) -> list[str]:
        """Return the resources of which the node has less than requested: gpus, cpus, memory, time."""
        short = {
            "gpus": self.count_gpus(request.gpu_type) < request.gpus,
            "cpus": self.cpus < request.cpus,
            "memory": self.mem_mib < request.mem_mib,
            "time": self.time_limit_minutes is not None
            and self.time_limit_minutes < request.runtime_min,
        }
        return [what for what, is_short in short.items() if is_short]


def read_cluster_nodes() -> list[Node]:
    """Return the nodes of the cluster, or an empty list if SLURM does not answer."""
    return parse_sinfo(
        read_command_output(["sinfo", "--noheader", "--Node", f"--format={_FORMAT}"]) or ""
    )


def parse_sinfo(sinfo_output: str) -> list[Node]:
    """Return the nodes in sinfo's output. Empty if any node's line cannot be parsed.

    A node that cannot be parsed may be large enough for a cell. Lines without numbers (`n/a`) are left out.
    """
    nodes = []
    for line in sinfo_output.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 6 or fields[2:4] == ["n/a", "n/a"]:
            continue
        if not (fields[2].rstrip("+") + fields[3].rstrip("+")).isdigit():
            return []
        partition, name, cpus, mem_mib, gres, limit = fields
        nodes.append(
            Node(
                partition=partition.rstrip("*"),
                is_default=partition.endswith("*"),
                name=name,
                cpus=int(cpus.rstrip("+")),
                mem_mib=int(mem_mib.rstrip("+")),
                gpus=count_gpus(gres),
                time_limit_minutes=_parse_time_limit_minutes(limit),
                gpu_counts_by_type=count_gpus_by_type(gres),
            )
        )
    return nodes


def count_gpus(gres: str) -> int:
    """Return the number of GPUs in a SLURM GRES text, such as `gpu:a100:2,gpu:v100:2`."""
    return sum(int(n) for n in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", gres))


def count_gpus_by_type(gres: str) -> dict[str, int]:
    """Return the number of GPUs by type in a text of SLURM's generic resources.

    An example of such a text is `gpu:a100:2`.
    """
    counts: Counter[str] = Counter()
    for name, n in re.findall(r"\bgpu:([^:,()]+):(\d+)", gres):
        counts[name] += int(n)
    return dict(counts)


def describe_mixed_gpu_types(nodes: Iterable[Node], requests: Iterable[JobRequest]) -> str | None:
    """Return a warning if a request names no GPU type although the nodes have several.

    Otherwise, the result is None.
    """
    if all(r.gpu_type is not None or not r.gpus for r in requests):
        return None
    nodes_of: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        for name in node.gpu_counts_by_type:
            nodes_of[name].add(node.name)
    if len(nodes_of) < 2:
        return None
    types = format_names(
        [f"{t} ({format_count(len(n), 'node')})" for t, n in sorted(nodes_of.items())], 5
    )
    return (
        f"The nodes have GPUs of several types, {types}: SLURM may give a cell any type, or even a mixture "
        "of types. Set cluster.gpu_type to one of them."
    )


def _parse_time_limit_minutes(time_limit: str) -> int | None:
    """Return the minutes of sinfo's time limit, such as `2-00:00:00` or `30:00`.

    The result is None for no limit.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", time_limit)
    if match is None:
        return None
    days, hours, minutes, _ = (int(part or 0) for part in match.groups())
    return (24 * days + hours) * 60 + minutes


def select_partition_nodes(nodes: Iterable[Node], partition: str | int | None) -> list[Node]:
    """Return the nodes of the named partitions. Without names, the default partition counts.

    Args:
        nodes: Nodes of the cluster.
        partition: Names of partitions, such as `a,b`; a name that YAML has read as a number; `*` for all
            partitions; or None for the default one, or all if there is no default.
    """
    nodes = list(nodes)
    if partition == "*":
        return nodes
    if partition:
        return [node for node in nodes if node.partition in str(partition).split(",")]
    return [node for node in nodes if node.is_default] or nodes


def count_fitting_nodes(request: JobRequest, nodes: Iterable[Node]) -> int:
    """Return the largest number of nodes in any partition that satisfy the request."""
    able = Counter(node.partition for node in nodes if not node.list_missing_resources(request))
    return max(able.values(), default=0)


def explain_oversized_job(
    cell: Cell,
    settings: Settings,
    request: JobRequest,
    nodes: Sequence[Node],
    is_from_profile: bool = False,
) -> str | None:
    """Return a sentence if no partition has nodes that are large enough for a cell.

    Otherwise, the result is None.

    The sentence has the cell's request, the largest node, and the key of config.yaml to change.

    Args:
        cell: The cell.
        settings: Settings of the cell.
        request: Request of the cell.
        nodes: Nodes of the cluster; without any, the function returns None.
        is_from_profile: Whether the request comes from the profile, not from the config.
    """
    by_partition: dict[str, list[Node]] = {}
    for node in nodes:
        by_partition.setdefault(node.partition, []).append(node)
    for here in by_partition.values():
        if sum(not node.list_missing_resources(request) for node in here) >= request.nodes:
            return None
    if not nodes:
        return None

    def rank_node(node: Node) -> tuple[int, ...]:
        """Return a sort key. It is smallest for the node that comes closest to the request."""
        gpus = node.count_gpus(request.gpu_type)
        return (
            len(node.list_missing_resources(request)),
            -gpus,
            -node.gpus,
            -node.cpus,
            -node.mem_mib,
        )

    largest = min(nodes, key=rank_node)
    lacks = largest.list_missing_resources(request)
    able = {
        n.name for n in by_partition[largest.partition] if not n.list_missing_resources(request)
    }
    gpus = largest.count_gpus(request.gpu_type)
    has = _format_resources(
        gpus, largest.cpus, largest.mem_mib, largest.time_limit_minutes, request
    )
    if lacks:
        has = f"the largest node of partition {largest.partition} has {has}"
    else:
        has = f"partition {largest.partition} has {len(able)} such nodes"
        lacks = ["nodes"]
    if is_from_profile:
        remedy = "lower it in the profile (set-resources, default-resources)"
    else:
        remedy = "; ".join(_iter_remedies(lacks, cell, settings, request, largest))
    return f"{describe_request(cell, request)}, but {has}: {remedy}"


def describe_request(cell: Cell, request: JobRequest) -> str:
    """Return a sentence on what a cell requests from SLURM."""
    count = "a node" if request.nodes == 1 else f"{request.nodes} nodes, each"
    quantities = _format_resources(
        request.gpus, request.cpus, request.mem_mib, request.runtime_min, request
    )
    return f"{cell} asks for {count} with {quantities}"


def _format_resources(
    gpus: int, cpus: int, mem_mib: int, minutes: int | None, request: JobRequest
) -> str:
    of_type = f" of type {request.gpu_type}" if request.gpu_type else ""
    parts = [format_count(gpus, "GPU") + of_type] if request.gpus else []
    parts += [format_count(cpus, "CPU core"), f"{mem_mib:,} MiB"]
    time = "no time limit" if minutes is None else f"{minutes:,} minutes"
    return f"{', '.join(parts)} and {time}"


def _iter_remedies(
    missing_resources: Iterable[str],
    cell: Cell,
    settings: Settings,
    request: JobRequest,
    largest_node: Node,
) -> Iterator[str]:
    """Yield, for each resource that nodes lack, the key of config.yaml to change."""
    block = f"studies.{cell.study}.experiments.{cell.experiment}"
    served = "servers" in settings.options
    spread = "lower cluster.gpus_per_node, so that the cell spans more nodes"
    for what in missing_resources:
        if what == "gpus" and (of_type := largest_node.count_gpus(request.gpu_type)):
            yield f"set cluster.gpus_per_node to {of_type}"
        elif what == "gpus" and largest_node.gpus:
            types = ", ".join(sorted(largest_node.gpu_counts_by_type)) or "null: SLURM names none"
            yield f"set cluster.gpu_type to a type of this node ({types})"
        elif what == "gpus":
            yield f"set cluster.request_gpus to false, or {block}.device to cpu"
        elif what == "cpus" and request.gpus:
            yield "lower cluster.cpus_per_gpu" + (" or cluster.server_cpus" if served else "")
        elif what == "cpus":
            yield f"lower {block}.threads" if (settings.threads or 1) > 1 else spread
        elif what == "memory" and request.is_memory_planned:
            yield f"the plan predicts that the cell needs this much memory: {spread}"
        elif what == "memory" and request.gpus:
            yield "lower cluster.mem_mib_per_gpu" + (" or cluster.server_mem_mib" if served else "")
        elif what == "memory":
            yield "lower cluster.mem_mib_per_cpu_worker"
        elif what == "time":
            yield f"lower {block}.time_limit_s or cluster.startup_allowance_s"
        elif what == "nodes":
            yield f"raise cluster.gpus_per_node, or remove {cell.gpus} from {block}.gpus"


def format_refusals(refusals: Mapping[Cell, str]) -> list[str]:
    """Return a line per reason for which cells are too large for every node.

    A line has the first cell, and the number of other cells.
    """
    by_reason: dict[str, list[Cell]] = {}
    for cell, sentence in refusals.items():
        by_reason.setdefault(sentence.removeprefix(str(cell)), []).append(cell)
    lines = [
        f"{cells[0]}{reason}"
        + (f" (and {format_count(len(cells) - 1, 'more cell')})" if len(cells) > 1 else "")
        for reason, cells in list(by_reason.items())[:MAX_PRINTED_REASONS]
    ]
    rest = sum(len(cells) for cells in list(by_reason.values())[MAX_PRINTED_REASONS:])
    return lines + (
        [f"{format_count(rest, 'more cell')} are too large for every node, for other reasons"]
        if rest
        else []
    )
