"""Generates data sets: scikit-learn's digits, noisy images, texts of a Markov chain.

numpy is imported inside functions, since the Snakefile imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stratbench.workload.data.sources import Source, Split

if TYPE_CHECKING:
    import numpy as np

    Chunk = tuple[np.ndarray, np.ndarray]

#: Number of different tokens that may follow a token of a Markov text.
MARKOV_SUCCESSORS = 8

#: Seed of the division of the digits into training and test set. It is part of the data set and never
#: changes.
DIGITS_SPLIT_SEED = 20240
DIGITS_TEST_SAMPLES = 360

CHUNK_SAMPLES = 1024


def load_digits_images(root: Path | None = None, scratch: Path | None = None) -> Source:
    """Return scikit-learn's 8x8 digits, scaled from 0..16 to 0..255, in a fixed stratified split.

    They are part of scikit-learn, so that neither folder is used.
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


def generate_synthetic_images(
    train_samples: int,
    test_samples: int,
    classes: int,
    channels: int,
    size: int,
    seed: int,
) -> Source:
    """Return images [channels, size, size]: sums of the class's prototype, 4x4 patches and noise.

    The noise is as strong as the prototypes, so that a model has to learn, and can. Sample i has the class i
    modulo `classes`. Images are generated in chunks, so that a data set may be larger than memory.

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        classes: Number of classes.
        channels: Channels of an image.
        size: Height and width of an image in pixels.
        seed: Seed of the random numbers.
    """
    import numpy as np

    rng = np.random.default_rng([seed, 0])
    patches = rng.integers(64, 192, (classes, channels, 4, 4), dtype=np.uint8)
    where = np.arange(size) * 4 // size
    prototypes = patches[:, :, where][:, :, :, where]

    def chunks(samples: int, stream: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for start in range(0, samples, CHUNK_SAMPLES):
            labels = np.arange(start, min(start + CHUNK_SAMPLES, samples)) % classes
            # The noise is from -64 to 63: with prototypes in 64..191 the sum fits into a byte.
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


class MarkovChain:
    """A Markov chain in which each token has up to eight successors with random probabilities."""

    def __init__(self, vocabulary: int, seed: int, number: int = 0) -> None:
        """Draw the successors of each token; `number` distinguishes chains of a seed."""
        import numpy as np

        rng = np.random.default_rng([seed, number])
        n = min(MARKOV_SUCCESSORS, vocabulary)
        self.after = np.stack([rng.choice(vocabulary, n, replace=False) for _ in range(vocabulary)])
        self.odds = rng.dirichlet(np.ones(n), vocabulary)
        share = np.full(vocabulary, 1 / vocabulary)
        # Each step is averaged with the preceding one, which keeps the stationary distribution and damps any
        # period.
        for _ in range(1000):
            counts = np.bincount(
                self.after.ravel(), (share[:, None] * self.odds).ravel(), vocabulary
            )
            share = (share + counts) / 2
        self.share = share / share.sum()
        self._up_to = self.odds.cumsum(axis=1)

    def entropy(self) -> float:
        """Return the conditional entropy of a token after the previous token, in nats (Shannon, 1948)."""
        return float(self.share @ _compute_entropies(self.odds))

    def draw(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """Draw texts, int64 [count, length].

        Args:
            rng: Random generator.
            count: Number of texts.
            length: Tokens of a text.
        """
        import numpy as np

        text = np.empty((count, length), np.int64)
        text[:, 0] = rng.choice(len(self.share), count, p=self.share)
        for i in range(length - 1):
            now = text[:, i]
            # The last sum of probabilities is left out, since rounding may make it less than 1.
            which = (rng.random((count, 1)) >= self._up_to[now][:, :-1]).sum(axis=1)
            text[:, i + 1] = self.after[now, which]
        return text


def _compute_entropies(odds: np.ndarray) -> np.ndarray:
    """Return the entropy of each row of probabilities, in nats."""
    import numpy as np

    return -np.where(odds > 0, odds * np.log(np.maximum(odds, 1e-300)), 0).sum(axis=1)


def make_generated_source(
    samples: tuple[int, int], chunks: Callable[[int, int], Iterator[Chunk]], least_loss: float
) -> Source:
    """Return a generated training and test set, each with its own random stream."""
    train, test = (Split(n, chunks(n, stream)) for n, stream in zip(samples, (1, 2), strict=True))
    return Source(train, test, [], generated=True, least_loss=least_loss)


def generate_markov_text(
    train_samples: int, test_samples: int, vocabulary: int, sequence: int, seed: int
) -> Source:
    """Return texts of a Markov chain, with the next tokens as targets.

    The least possible loss is the chain's entropy rate: the mean, over the stationary distribution, of the
    entropy of the successor.

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        vocabulary: Number of different tokens.
        sequence: Tokens of a sample.
        seed: Seed of the random numbers.
    """
    import numpy as np

    chain = MarkovChain(vocabulary, seed)

    def chunks(samples: int, stream: int) -> Iterator[Chunk]:
        for start in range(0, samples, CHUNK_SAMPLES):
            count = min(CHUNK_SAMPLES, samples - start)
            text = chain.draw(np.random.default_rng([seed, stream, start]), count, sequence + 1)
            yield text[:, :-1], text[:, 1:]

    return make_generated_source((train_samples, test_samples), chunks, chain.entropy())
