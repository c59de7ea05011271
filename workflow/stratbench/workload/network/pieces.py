"""A model's forward as a chain of pieces, so that it can be cut into stages.

A plan of pieces is a tuple of their names in the order of the forward. A name is the path of a called module
(`*`: all of its number or name, in order). It may also be a function of the model and the previous output,
with the paths of the modules and parameters that it reads. Importing this file imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from operator import attrgetter

from torch import Tensor, nn

from stratbench.cell.text.words import names_text

#: A plan's pieces: the path of a module, or a function with the paths that it reads.
Plan = tuple[str | tuple[Callable[[nn.Module, Tensor], Tensor], tuple[str, ...]], ...]


@dataclass(frozen=True)
class Piece:
    """One step of a forward: its name, its function, and the modules and parameters that it reads."""

    name: str
    call: Callable[[nn.Module, Tensor], Tensor]
    paths: tuple[str, ...]

    def parameters(self, model: nn.Module) -> Iterator[nn.Parameter]:
        """Yield its parameters in `model`, each as often as it is read."""
        for path in self.paths:
            part = attrgetter(path)(model)
            yield from part.parameters() if isinstance(part, nn.Module) else (part,)

    def holds(self, model: nn.Module, module: nn.Module) -> bool:
        """Return whether `module` is one of those that it calls, or in one of them."""
        each = (attrgetter(path)(model) for path in self.paths)
        return any(module in list(m.modules()) for m in each if isinstance(m, nn.Module))


def pieces_of(model: nn.Module, plan: Plan) -> list[Piece]:
    """Return the pieces of `model` by a plan, in the order of the forward.

    Raises:
        ValueError: If it has no module of a path.
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
                f"its pieces name {entry!r}, and the network has no module of that path"
            )
        pieces += [Piece(name, _calling(name), (name,)) for name in names]
    return pieces


def faults_of(model: nn.Module, pieces: list[Piece]) -> Iterator[str]:
    """Yield the parameters that none of a user's pieces reads."""
    read = {p for piece in pieces for p in piece.parameters(model)}
    if left := [name for name, p in model.named_parameters() if p not in read]:
        yield (
            f"its pieces read no {names_text(left)}; name the modules that do, in the order of "
            "forward"
        )


def _calling(path: str) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda model, x: attrgetter(path)(model)(x)


def units_of(
    model: nn.Module, pieces: list[Piece], groups: list[tuple[str, list[nn.Module]]]
) -> list[list[Piece]]:
    """Return the pieces between possible cuts of the model, which are at its shard groups.

    A unit begins with a group's first module; so does the part after the last group, if it has parameters.

    Args:
        model: The model.
        pieces: Its pieces.
        groups: Its shard groups.
    """
    at = [
        [i for i, p in enumerate(pieces) if any(p.holds(model, m) for m in modules)]
        for _, modules in groups
    ]
    starts = {0} | {places[0] for places in at if places}
    after = 1 + max((places[-1] for places in at if places), default=-1)
    if any(True for piece in pieces[after:] for _ in piece.parameters(model)):
        starts.add(after)
    ordered = [*sorted(starts), len(pieces)]
    return [pieces[i:j] for i, j in pairwise(ordered)]
