"""What a config of workers that train alone is refused for."""

from __future__ import annotations

import test_config


def test_scaled_losses_are_refused_where_workers_train_alone():
    test_config.check_mistake(
        {"precision": "fp16", "strategies": ["ddp", "diloco"]},
        ["precision = 'fp16': a worker whose gradients overflow", "use bf16", "remove diloco"],
    )
