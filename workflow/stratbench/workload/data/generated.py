"""Generates data sets: noisy images, and texts of a Markov chain. Also loads scikit-learn's digits.

numpy is imported inside functions, since the Snakefile imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stratbench.workload.data.sources import Source, Split

if TYPE_CHECKING:
    import numpy as np

    from stratbench.workload.data.sources import InputsAndTargets


#: Number of different tokens that may follow a given token in a text of a Markov chain.
MARKOV_SUCCESSORS = 8

#: Seed by which the digits are divided into training and test set. Another seed would give another data set.
DIGITS_SPLIT_SEED = 20240
DIGITS_TEST_SAMPLES = 360

CHUNK_SAMPLES = 1024


def load_digits_images(root: Path | None = None, download_folder: Path | None = None) -> Source:
    """Return scikit-learn's images of 8x8 digits, divided into training and test set.

    Values are scaled from 0..16 to 0..255. The division is stratified and fixed. The digits are part of
    scikit-learn, so that neither folder is used.
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
    """Return labelled images [channels, size, size]: a prototype of the class, plus noise.

    A prototype has 4x4 patches of random values. The noise is as strong as the prototypes, so that a model
    needs to learn, and can. Sample i has the class i
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

    def generate_image_chunks(samples: int, random_stream: int) -> Iterator[InputsAndTargets]:
        for start in range(0, samples, CHUNK_SAMPLES):
            labels = np.arange(start, min(start + CHUNK_SAMPLES, samples)) % classes
            # Sums fit into a byte: prototypes are 64 to 191, and the noise is -64 to 63 (64 is subtracted
            # below).
            noise = np.random.default_rng([seed, random_stream, start]).integers(
                0, 128, (len(labels), channels, size, size), dtype=np.uint8
            )
            yield prototypes[labels] + noise - np.uint8(64), labels

    return Source(
        Split(train_samples, generate_image_chunks(train_samples, 1)),
        Split(test_samples, generate_image_chunks(test_samples, 2)),
        [],
        generated=True,
    )


class MarkovChain:
    """A Markov chain in which each token has up to eight successors with random probabilities."""

    def __init__(self, vocabulary: int, seed: int, chain_number: int = 0) -> None:
        """Draw the successors of each token; `chain_number` distinguishes chains of a seed."""
        import numpy as np

        rng = np.random.default_rng([seed, chain_number])
        n = min(MARKOV_SUCCESSORS, vocabulary)
        self.after = np.stack([rng.choice(vocabulary, n, replace=False) for _ in range(vocabulary)])
        self.odds = rng.dirichlet(np.ones(n), vocabulary)
        share = np.full(vocabulary, 1 / vocabulary)
        # This power iteration finds the stationary distribution. Averaging two steps makes it converge even
        # if the chain is periodic.
        for _ in range(1000):
            counts = np.bincount(
                self.after.ravel(), (share[:, None] * self.odds).ravel(), vocabulary
            )
            share = (share + counts) / 2
        self.share = share / share.sum()
        self._up_to = self.odds.cumsum(axis=1)

    def compute_entropy_rate(self) -> float:
        """Return the entropy of a token given the previous token. The unit is nats (Shannon, 1948)."""
        return float(self.share @ _compute_row_entropies(self.odds))

    def draw_texts(self, rng: np.random.Generator, num_texts: int, length: int) -> np.ndarray:
        """Return random texts of the chain, int64 [num_texts, length].

        Args:
            rng: Random generator.
            num_texts: Number of texts.
            length: Tokens of a text.
        """
        import numpy as np

        text = np.empty((num_texts, length), np.int64)
        text[:, 0] = rng.choice(len(self.share), num_texts, p=self.share)
        for i in range(length - 1):
            now = text[:, i]
            # The last cumulative probability is left out, because rounding may make it less than 1.
            which = (rng.random((num_texts, 1)) >= self._up_to[now][:, :-1]).sum(axis=1)
            text[:, i + 1] = self.after[now, which]
        return text


def _compute_row_entropies(probabilities: np.ndarray) -> np.ndarray:
    """Return the entropy in nats of each row of a matrix. Each row is a probability distribution."""
    import numpy as np

    return -np.where(
        probabilities > 0, probabilities * np.log(np.maximum(probabilities, 1e-300)), 0
    ).sum(axis=1)


def make_generated_source(
    split_sizes: tuple[int, int],
    generate_chunks: Callable[[int, int], Iterator[InputsAndTargets]],
    min_loss: float,
) -> Source:
    """Return a generated training set and test set. Each has its own stream of random numbers."""
    train, test = (
        Split(n, generate_chunks(n, stream)) for n, stream in zip(split_sizes, (1, 2), strict=True)
    )
    return Source(train, test, [], generated=True, least_loss=min_loss)


def generate_markov_text(
    train_samples: int, test_samples: int, vocabulary: int, sequence: int, seed: int
) -> Source:
    """Return texts of a Markov chain; the target of a token is the next token.

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

    def generate_text_chunks(samples: int, random_stream: int) -> Iterator[InputsAndTargets]:
        for start in range(0, samples, CHUNK_SAMPLES):
            count = min(CHUNK_SAMPLES, samples - start)
            text = chain.draw_texts(
                np.random.default_rng([seed, random_stream, start]), count, sequence + 1
            )
            yield text[:, :-1], text[:, 1:]

    return make_generated_source(
        (train_samples, test_samples), generate_text_chunks, chain.compute_entropy_rate()
    )
