"""Divides a model's forward into a chain of pieces, from which pipeline stages are made.

A pipeline plan declares the pieces in the order of forward. A piece is the path of a module that forward
calls, in which `*` matches any name. Or it is a function of the model and the previous output, with the paths
of the modules and parameters that the function uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from operator import attrgetter

from torch import Tensor, nn

from stratbench.cell.text.words import format_names
from stratbench.workload.network.sharding import ShardGroups

#: Declared pieces of a forward. Each is a module's path, or a function and the paths of modules that it uses.
PipelinePlan = tuple[str | tuple[Callable[[nn.Module, Tensor], Tensor], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Piece:
    """One step of a forward: its name, its function, and the paths of modules and parameters it uses."""

    name: str
    compute_output: Callable[[nn.Module, Tensor], Tensor]
    used_module_paths: tuple[str, ...]

    def iter_used_parameters(self, model: nn.Module) -> Iterator[nn.Parameter]:
        """Yield the parameters of the model that the piece uses. A parameter used twice comes twice."""
        for path in self.used_module_paths:
            part = attrgetter(path)(model)
            yield from part.parameters() if isinstance(part, nn.Module) else (part,)

    def calls_module(self, model: nn.Module, module: nn.Module) -> bool:
        """Return whether the piece calls a module of the model, itself or within another module."""
        each = (attrgetter(path)(model) for path in self.used_module_paths)
        return any(module in list(m.modules()) for m in each if isinstance(m, nn.Module))


def make_pieces_from_plan(model: nn.Module, plan: PipelinePlan) -> list[Piece]:
    """Return the pieces of a model's forward that a pipeline plan declares, in this order.

    Raises:
        ValueError: If the model has no module with a path of the plan.
    """
    pieces = []
    for entry in plan:
        if isinstance(entry, tuple):
            call, paths = entry
            pieces.append(Piece(call.__name__, call, paths))
            continue
        depth = entry.count(".")
        names = [
            name
            for name, _ in model.named_modules()
            if name.count(".") == depth and fnmatchcase(name, entry)
        ]
        if not names:
            raise ValueError(
                f"its pipeline_modules name {entry!r}, but the model has no module with this path; correct "
                "the path"
            )
        pieces += [Piece(name, _make_function_that_calls_module(name), (name,)) for name in names]
    return pieces


def iter_unused_parameter_messages(model: nn.Module, pieces: list[Piece]) -> Iterator[str]:
    """Yield a message if a model has parameters that no piece of its forward uses."""
    read = {p for piece in pieces for p in piece.iter_used_parameters(model)}
    if left := [name for name, p in model.named_parameters() if p not in read]:
        yield (
            f"its pieces do not use {format_names(left)}; add the modules that do to pipeline_modules, in "
            "the order of forward"
        )


def _make_function_that_calls_module(module_path: str) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: attrgetter(module_path)(model)(x)


def group_pieces_into_indivisible_units(
    model: nn.Module, pieces: list[Piece], shard_groups: ShardGroups
) -> list[list[Piece]]:
    """Return the smallest parts that a pipeline stage may consist of, as lists of pieces.

    Such a unit begins with the first module of a shard group. The pieces after the last group are a unit,
    too, if they have parameters.

    Args:
        model: The model.
        pieces: Pieces of the model.
        shard_groups: Shard groups of the model.
    """
    at = [
        [i for i, p in enumerate(pieces) if any(p.calls_module(model, m) for m in modules)]
        for _, modules in shard_groups
    ]
    starts = {0} | {places[0] for places in at if places}
    after = 1 + max((places[-1] for places in at if places), default=-1)
    if any(True for piece in pieces[after:] for _ in piece.iter_used_parameters(model)):
        starts.add(after)
    ordered = [*sorted(starts), len(pieces)]
    return [pieces[i:j] for i, j in pairwise(ordered)]
