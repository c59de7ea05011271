"""The files and the config of the data sets that test_own.py brings to the workflow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

CODE = """
import numpy as np

def stripes(n, size=16):
    labels = np.arange(n) % 2
    images = np.random.default_rng(0).integers(0, 100, (n, size, size), dtype=np.uint8)
    images[labels == 1, ::2] += 100
    return images, labels, images[: n // 2], labels[: n // 2]
"""
DATASETS = {
    "stripes": {"call": "my_data.stripes", "kwargs": {"n": 64}},
    "pictures": {"images": "pictures", "size": 16, "channels": 1},
    "letters": {"text": "letters.txt", "sequence": 16},
}


def write_files(folder: Path) -> None:
    """Two classes of twelve pictures each, a text, and a function that returns arrays."""
    rng = np.random.default_rng(0)
    for i in range(24):
        image = folder / "pictures" / ("cats", "dogs")[i % 2] / f"{i}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (18, 24, 3), dtype=np.uint8)).save(image)
    (folder / "letters.txt").write_text("to be, or not to be: that is the question. " * 40)
    (folder / "my_data.py").write_text(CODE)


def experiments_of(common: dict) -> dict[str, dict]:
    """An experiment for each data set, of one cell."""
    found = {
        name: {**common, "dataset": name, "global_batch": 8, "models": [model]}
        for name, model in zip(DATASETS, ("vgg-compact", "vgg-compact", "gpt-compact"), strict=True)
    }
    found["pictures"]["data_placement"] = "host"
    return found
