"""Which modules belong to an extension, and which imports would forbid deleting one.

The core (config, cells, training, records, tables, figures, report, decision) runs without any extension, so
that each can be deleted. `workflow/stratbench/extensions` declares them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stratbench.cell.extensions import load_extensions

#: Modules of each extension that are not yet below `extensions/NAME`; a package stands for all in it.
MODULES = {
    "plan": ("plan", "extensions.plan.pages.prediction_section", "study.model_question"),
    "projection": (
        "extensions.projection",
        "extensions.projection.shown",
        "extensions.projection.shown.section",
    ),
    "links": ("extensions.links", "extensions.links.collective_cost", "extensions.links.section"),
    "queue": ("extensions.queue", "extensions.queue.section", "extensions.queue.request"),
    "tune": ("tune",),
    "verdict": (
        "extensions.verdict.paired",
        "extensions.verdict.full_runs",
        "extensions.verdict.paired_results",
        "extensions.verdict.reading",
        "extensions.verdict.section",
        "extensions.verdict.block_rules",
        "extensions.verdict.blocks",
        "extensions.verdict.verdict_cost",
        "extensions.verdict.verdict_round",
        "extensions.verdict.block",
    ),
    "audit": ("extensions.audit.audit", "analysis.records.facts", "extensions.audit.section"),
    "elastic": (
        "extensions.elastic.keys",
        "extensions.elastic.servers",
        "extensions.elastic.jobs.worker_job",
    ),
    "checkpoints": ("extensions.checkpoints",),
    "commands": (
        "extensions.commands",
        "extensions.commands.strategy",
        "extensions.commands.audit_rules",
        "extensions.commands.same_work",
    ),
    "sets": ("sets", "extensions.sets.from_set", "extensions.sets.keys"),
    "emit": ("emit",),
    "paper": ("extensions.paper", "extensions.paper.section", "extensions.paper.numbered"),
    "splitting": ("extensions.splitting",),
    "local": ("extensions.local",),
    "libraries": ("extensions.libraries",),
    "labelled": ("extensions.labelled",),
    "servers": ("extensions.servers",),
    "deepspeed": ("extensions.deepspeed.strategy",),
    "explore": ("extensions.explore.explore",),
}


def find_extension(module: str) -> str | None:
    """Return the extension that a module belongs to, or None for a module of the core.

    Args:
        module: A dotted name below `stratbench`, or the file name of rules.
    """
    matches = [
        (len(prefix), name)
        for name, extension in load_extensions().items()
        for prefix in (f"extensions.{name}", *MODULES[name], *extension.rule_files)
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
        allowed = {None, here, *(load_extensions()[here].required_extensions if here else ())}
        lines += [f"{importer} -> {t}" for t in targets if find_extension(t) not in allowed]
    return sorted(lines)
