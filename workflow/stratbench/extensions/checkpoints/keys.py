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
        help="Number of steps after which each worker saves its state to disk. A cell whose node or job is "
        "lost then resumes from there when it is started again (docs/checkpoints.md). Copying the state does "
        "not count as training time, but writing it may slow the training. null: such a cell starts anew.")
    # fmt: on

    @classmethod
    def iter_contradictions(
        cls, block: Mapping[str, Any], study: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield messages on strategies of an experiment that do not support checkpoints."""
        from stratbench.strategies import get_strategy_class
        from stratbench.study.config.consistency import iter_strategy_options

        every = block["checkpoint_every"]
        for name, base, options in iter_strategy_options(block, study) if every else ():
            if (reason := get_strategy_class(base).restart_reason(options, block)) is not None:
                yield (
                    f".checkpoint_every = {every}: {name}: {reason}; remove {name} from strategies, or "
                    "move it to another experiment"
                )
