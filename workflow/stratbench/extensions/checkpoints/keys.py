"""Keys of config.yaml on checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stratbench.cell.settings import Keys, setting


@dataclass(frozen=True, kw_only=True)
class Checkpoints(Keys):
    """Keys of an experiment on checkpoints."""

    extension: ClassVar[str] = "checkpoints"

    # fmt: off
    checkpoint_every: int | None = setting(None, minimum=1,
        help="Number of steps after which each worker saves its training state to disk. If a cell is lost "
        "and started again, it resumes from the last saved state (docs/checkpoints.md). The copy of the "
        "state does not count as training time, but its write may slow the training. null: no state is "
        "saved, and a lost cell starts from its first step.")
    # fmt: on

    @classmethod
    def iter_contradictions(
        cls, block: Mapping[str, Any], study: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield a message on each strategy of an experiment that does not support checkpoints."""
        from stratbench.strategies import get_strategy_class
        from stratbench.study.config.consistency import iter_strategy_options

        every = block["checkpoint_every"]
        for name, base, options in iter_strategy_options(block, study) if every else ():
            if (reason := get_strategy_class(base).restart_reason(options, block)) is not None:
                yield (
                    f".checkpoint_every = {every}: {name}: {reason}; remove {name} from strategies, or "
                    "move it to another experiment"
                )
