"""What a config of cells with checkpoints is refused for."""

from __future__ import annotations

import test_config


def test_a_strategy_that_cannot_resume_is_refused_with_checkpoints():
    test_config.check_mistake(
        {"checkpoint_every": 5, "strategies": ["ddp", "ps-async"]},
        ["checkpoint_every = 5: ps-async: it does not say", "remove ps-async"],
    )
