"""Data sets that are computed here: the digits that scikit-learn carries, noisy images, texts of a chain.

numpy is imported inside functions: the Snakefile imports this.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stratbench.workload.data.sources import Source, Split

if TYPE_CHECKING:
    import numpy as np

#: Tokens that may follow a token of a Markov text.
MARKOV_SUCCESSORS = 8

#: Seed of the split of the digits into training and test set: part of the data set, never changed.
DIGITS_SPLIT_SEED = 20240
DIGITS_TEST_SAMPLES = 360

SYNTHETIC_CHUNK_SAMPLES = 1024


def digits(root: Path | None = None, scratch: Path | None = None) -> Source:
    """scikit-learn's embedded 8x8 digits, 0..16 scaled to 0..255, in a fixed stratified split.

    They come with scikit-learn: neither folder is looked at.
    """
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)[:, None]
    train, test = train_test_split(
        np.arange(len(images)),
        test_size=DIGITS_TEST_SAMPLES,
        random_state=DIGITS_SPLIT_SEED,
        stratify=bunch.target,
    )
    return Source(
        Split(len(train), iter([(images[train], bunch.target[train])])),
        Split(len(test), iter([(images[test], bunch.target[test])])),
        [],
    )


def synthetic(
    train_samples: int,
    test_samples: int,
    classes: int,
    channels: int,
    size: int,
    seed: int,
) -> Source:
    """Images [channels, size, size]: a prototype of 4x4 patches for each class, and noise.

    The noise is as strong as the prototypes, so a model has to learn, and can. Sample i has the
    class i modulo `classes`. Made in chunks: a set larger than memory is no problem.
    """
    import numpy as np

    rng = np.random.default_rng([seed, 0])
    patches = rng.integers(64, 192, (classes, channels, 4, 4), dtype=np.uint8)
    where = np.arange(size) * 4 // size
    prototypes = patches[:, :, where][:, :, :, where]

    def chunks(samples: int, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, samples, SYNTHETIC_CHUNK_SAMPLES):
            labels = np.arange(start, min(start + SYNTHETIC_CHUNK_SAMPLES, samples)) % classes
            # 64 below to 63 above: with prototypes in 64..191 the sum stays within a byte.
            noise = np.random.default_rng([seed, stream, start]).integers(
                0, 128, (len(labels), channels, size, size), dtype=np.uint8
            )
            yield prototypes[labels] + noise - np.uint8(64), labels

    return Source(
        Split(train_samples, chunks(train_samples, 1)),
        Split(test_samples, chunks(test_samples, 2)),
        [],
        generated=True,
    )


def markov_text(
    train_samples: int, test_samples: int, vocabulary: int, sequence: int, seed: int
) -> Source:
    """Texts in which a token's successor depends on the token alone: one of eight, at fixed odds.

    The odds are drawn anew for each token. The least possible loss is the chain's entropy rate: the
    mean, over the stationary distribution, of the entropy of the successor (Shannon, 1948).
    """
    import numpy as np

    rng = np.random.default_rng([seed, 0])
    n = min(MARKOV_SUCCESSORS, vocabulary)
    after = np.stack([rng.choice(vocabulary, n, replace=False) for _ in range(vocabulary)])
    odds = rng.dirichlet(np.ones(n), vocabulary)
    share = np.full(vocabulary, 1 / vocabulary)
    # Averaged with the step before, which keeps the stationary distribution and damps any period.
    for _ in range(1000):
        share = (
            share + np.bincount(after.ravel(), (share[:, None] * odds).ravel(), vocabulary)
        ) / 2
    entropy = -(share @ np.where(odds > 0, odds * np.log(np.maximum(odds, 1e-300)), 0).sum(axis=1))
    up_to = odds.cumsum(axis=1)

    def chunks(samples: int, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, samples, SYNTHETIC_CHUNK_SAMPLES):
            count = min(SYNTHETIC_CHUNK_SAMPLES, samples - start)
            draw = np.random.default_rng([seed, stream, start])
            text = np.empty((count, sequence + 1), np.int64)
            text[:, 0] = draw.choice(vocabulary, count, p=share / share.sum())
            for i in range(sequence):
                now = text[:, i]
                # Rounding may leave the last sum below 1.
                which = (draw.random((count, 1)) >= up_to[now][:, :-1]).sum(axis=1)
                text[:, i + 1] = after[now, which]
            yield text[:, :-1], text[:, 1:]

    return Source(
        Split(train_samples, chunks(train_samples, 1)),
        Split(test_samples, chunks(test_samples, 2)),
        [],
        generated=True,
        least_loss=float(entropy),
    )
