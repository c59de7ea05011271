"""Which modules are extensions of the core, what an extension needs, and what is not yet cut.

The core (config, cells, training, records, tables, figures, report, decision) shall run without any
extension, so that each can be deleted. `known_dependencies.txt` lists the imports that still forbid it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

KNOWN_PATH = Path(__file__).with_name("known_dependencies.txt")


@dataclass(frozen=True)
class Extension:
    """One extension: what it is for, its modules, and the extensions that it may import."""

    summary: str
    #: Dotted names below `stratbench`; a package stands for all modules in it.
    modules: tuple[str, ...]
    rules: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


EXTENSIONS = {
    "plan": Extension(
        "what a cell will hold, send, take and cost",
        ("plan",),
        rules=("plan.smk",),
    ),
    "projection": Extension(
        "step times on counts of workers that nobody has measured",
        ("plan.projection", "analysis.projection", "analysis.report.projection"),
        needs=("plan", "links"),
    ),
    "links": Extension(
        "how fast links between workers are, measured",
        ("train.links", "telemetry.collective_cost", "analysis.report.links"),
    ),
    "queue": Extension(
        "time to a result with the cluster's queue in it",
        ("plan.queue", "study.config.queue_request"),
    ),
    "tune": Extension(
        "the combinations of strategies and settings that are worth measuring",
        ("tune",),
        rules=("tune.smk",),
        needs=("plan",),
    ),
    "verdict": Extension(
        "which strategy is fastest, by paired blocks",
        (
            "analysis.race",
            "analysis.audit.across_cells.full_runs",
            "analysis.decision.raced",
            "analysis.report.verdict_section",
            "cell.block_rules",
            "cell.blocks",
            "cell.seal",
            "plan.verdict_cost",
            "study.verdict_round",
            "train.block",
        ),
        rules=("verdict.smk",),
        needs=("audit", "plan"),
    ),
    "audit": Extension(
        "which figures not to believe",
        ("analysis.audit", "analysis.report.audit_section"),
    ),
    "elastic": Extension(
        "workers that come and go",
        ("train.elastic", "ps.elastic", "study.slurm.worker_job"),
        needs=("checkpoints",),
    ),
    "checkpoints": Extension("cells that resume after a kill", ("train.restarts",)),
    "commands": Extension(
        "a trainer of the user's own as a strategy",
        (
            "train.commands",
            "strategies.command",
            "analysis.audit.commands",
            "analysis.records.same_work",
        ),
        needs=("audit",),
    ),
    "sets": Extension(
        "result sets: one file per study, compared and exported",
        ("sets", "command.from_set", "study.config.result_sets"),
        rules=("sets.smk",),
        needs=("audit", "explore", "paper"),
    ),
    "emit": Extension(
        "a cell as a file for a trainer of the user's own", ("emit",), needs=("deepspeed",)
    ),
    "paper": Extension(
        "the published tables and claims beside a study's own",
        ("analysis.paper", "analysis.tables.numbered"),
        needs=("audit",),
    ),
    "splitting": Extension("tensor and pipeline parallelism", ("strategies.splitting",)),
    "local": Extension("local SGD, DiLoCo and gossip", ("strategies.local",)),
    "deepspeed": Extension("DeepSpeed as an engine", ("strategies.deepspeed",)),
    "compression": Extension("gradients sent in fewer bytes", ("strategies.compression",)),
    "explore": Extension("a page to browse cells", ("analysis.report.explore",)),
}


def find_extension(module: str) -> str | None:
    """Return the extension that a module belongs to, or None for a module of the core.

    Args:
        module: A dotted name below `stratbench`, or the file name of rules.
    """
    matches = [
        (len(prefix), name)
        for name, extension in EXTENSIONS.items()
        for prefix in (*extension.modules, *extension.rules)
        if module == prefix or module.startswith(f"{prefix}.")
    ]
    return max(matches)[1] if matches else None


def find_forbidden(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the imports that forbid deleting an extension, as lines `importer -> imported`.

    An extension may import itself, the core, and the extensions that it needs. The core imports none.

    Args:
        imports: Module or rules file -> the modules that it imports or starts.
    """
    lines = []
    for importer, targets in imports.items():
        here = find_extension(importer)
        allowed = {None, here, *(EXTENSIONS[here].needs if here else ())}
        lines += [f"{importer} -> {t}" for t in targets if find_extension(t) not in allowed]
    return sorted(lines)


def read_known() -> list[str]:
    """Return the forbidden imports that are known and not yet cut."""
    lines = KNOWN_PATH.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]
