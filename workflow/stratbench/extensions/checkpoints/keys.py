"""Keys of a study for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Keys):
    """The keys of an experiment."""

    extension: ClassVar[str] = "checkpoints"

    # fmt: off
    checkpoint_every: int | None = setting(None, minimum=1,
        help="Steps after which each worker keeps its state on the disk, so that a cell whose node is lost, "
        "or whose job is ended, goes on from there when it is tried again (docs/checkpoints.md). Keeping it "
        "is in no training time, but what is written during the training may disturb it. null: such a cell "
        "begins anew.")
    # fmt: on

    @classmethod
    def faults(cls, block: Mapping[str, Any], study: Mapping[str, Any]) -> Iterator[str]:
        """Yield why strategies of an experiment support no checkpoints."""
        from stratbench.strategies import strategy_class
        from stratbench.study.config.consistency import strategies_of

        every = block["checkpoint_every"]
        for name, base, options in strategies_of(block, study) if every else ():
            if (reason := strategy_class(base).restart_reason(options, block)) is not None:
                yield (
                    f".checkpoint_every = {every}: {name}: {reason}; remove {name} from strategies, or give "
                    "it "
                    "an experiment of its own"
                )
