"""Generates ARCHITECTURE.md from the packages' docstrings and their real imports.

    PYTHONPATH=workflow python docs/architecture.py > ARCHITECTURE.md

A test keeps the page current, and fails when an import points up, a wing imports another, or modules
import each other in a circle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "workflow" / "stratbench"
#: The floors from top to bottom, each with its parts. A part imports from the floors below its own. The
#: wings, on the top floor, never import each other; on the ground floor a part imports those before it.
FLOORS = [
    ("the wings, one for each thing a user does", ["plan", "train", "analysis"]),
    ("a config becomes cells", ["study"]),
    ("ways to train with many workers", ["strategies"]),
    ("the parameter server", ["ps"]),
    ("what everything rests on", ["cell", "workload", "telemetry"]),
]
#: What no part may import, at the top of a file or inside a function.
NO_TORCH = ("analysis", "study", "cell")


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below `stratbench`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


def imports(path: Path, known: Iterable[str], package: str = "stratbench.") -> set[str]:
    """Of the modules of a package those that a file imports, wherever in it.

    Imports for type checkers alone do not count.
    """
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module or ""]
        else:
            names = []
        for name in names:
            if name.startswith(package) and name.removeprefix(package) in known:
                found.add(name.removeprefix(package))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    # `from stratbench.ps import server` names the package as well; the module is what is meant.
    return {f for f in found if not any(other.startswith(f"{f}.") for other in found)}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(path, known) - {name} for name, path in known.items()}


def part_of(module: str) -> str:
    return module.split(".")[0]


def floor_of(part: str) -> int:
    """The floor of a part, 0 at the top."""
    for number, (_, parts) in enumerate(FLOORS):
        if part in parts:
            return number
    raise SystemExit(f"docs/architecture.py: {part} stands on no floor; add it to FLOORS")


def faults() -> list[str]:
    """Imports that break the rules, in words."""
    found = []
    edges = graph()
    for module, targets in edges.items():
        here = part_of(module)
        parts = FLOORS[floor_of(here)][1]
        for target in sorted(targets):
            there = part_of(target)
            if floor_of(there) < floor_of(here):
                found.append(f"{module} imports {target}, which lies above it")
            elif there in parts and there != here:
                if floor_of(here) == 0:
                    found.append(f"{module} imports {target}: wings do not import each other")
                elif parts.index(there) > parts.index(here):
                    found.append(f"{module} imports {target}, which comes after it on its floor")
    for module, path in modules().items():
        if part_of(module) in NO_TORCH and imports_torch(path):
            found.append(f"{module} imports torch, which {part_of(module)} does without")
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as e:
        found.append(f"modules import each other in a circle: {' -> '.join(e.args[1])}")
    return found


def imports_torch(path: Path) -> bool:
    """Whether a file imports torch anywhere but for type checkers."""
    return bool(imports(path, {"torch", "torchvision"}, package=""))


def docstring(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    """The text of ARCHITECTURE.md."""
    known, edges = modules(), graph()
    lines = [
        "# Architecture",
        "",
        "<!-- made by docs/architecture.py (make docs) -->",
        "",
        "Five floors. Imports only ever point down; on the ground floor a part imports those before it. The",
        "wings never import each other: what passes between them is files, described by `workflow/schemas/`.",
        f"{', '.join(f'`{part}`' for part in NO_TORCH)} never import torch. `Snakefile` and",
        "`workflow/rules/` expand the matrix and call the package's modules as commands.",
        "",
        "```",
        *(f"{len(FLOORS) - n}  {'  '.join(parts)}" for n, (_, parts) in enumerate(FLOORS)),
        "```",
        "",
    ]
    for title, parts in FLOORS:
        lines += [
            f"## {title[0].upper()}{title[1:]}",
            "",
            "| part | what it is | imports |",
            "|---|---|---|",
        ]
        for part in parts:
            if part not in known:
                continue
            targets = {part_of(t) for m, ts in edges.items() if part_of(m) == part for t in ts} - {
                part
            }
            lines.append(
                f"| `{part}` | {docstring(known[part])} | "
                f"{', '.join(f'`{t}`' for t in sorted(targets)) or '-'} |"
            )
        lines.append("")
        for part in parts:
            inner = {m: p for m, p in known.items() if m.startswith(f"{part}.")}
            if inner:
                lines += [f"`{part}`:", ""]
                lines += [f"- `{m.split('.', 1)[1]}`: {docstring(p)}" for m, p in inner.items()]
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
