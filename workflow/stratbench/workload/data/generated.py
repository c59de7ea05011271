"""Generated data sets: scikit-learn's digits, noisy images, texts of a Markov chain, tones.

numpy is imported inside functions: the Snakefile imports this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stratbench.workload.data.sources import Source, Split
from stratbench.workload.tasks import IGNORED

if TYPE_CHECKING:
    import numpy as np

    Chunk = tuple[np.ndarray, np.ndarray]

#: Tokens that may follow a token of a Markov text.
MARKOV_SUCCESSORS = 8

#: Of how many tokens of a masked text one is hidden (BERT hides 15 %).
MASKED_EVERY = 7

#: The share of noisy labels that name another class than the sample's own.
LABEL_NOISE = 0.1

#: Seed of the split of the digits into training and test set: part of the data set, never changed.
DIGITS_SPLIT_SEED = 20240
DIGITS_TEST_SAMPLES = 360

CHUNK_SAMPLES = 1024
CHUNK_WAVEFORMS = 64


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
    """Return images [channels, size, size]: a prototype of 4x4 patches for each class, and noise.

    The noise is as strong as the prototypes, so a model has to learn, and can. Sample i has the class i
    modulo `classes`. They are made in chunks, so that a set may be larger than memory.

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        classes: Number of classes.
        channels: Channels of an image.
        size: Pixels of a side.
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


class _Chain:
    """A Markov chain: a token is followed by one of eight, with probabilities drawn per token."""

    def __init__(self, vocabulary: int, seed: int, number: int = 0) -> None:
        import numpy as np

        rng = np.random.default_rng([seed, number])
        n = min(MARKOV_SUCCESSORS, vocabulary)
        self.after = np.stack([rng.choice(vocabulary, n, replace=False) for _ in range(vocabulary)])
        self.odds = rng.dirichlet(np.ones(n), vocabulary)
        share = np.full(vocabulary, 1 / vocabulary)
        # Averaged with the step before, which keeps the stationary distribution and damps any period.
        for _ in range(1000):
            counts = np.bincount(
                self.after.ravel(), (share[:, None] * self.odds).ravel(), vocabulary
            )
            share = (share + counts) / 2
        self.share = share / share.sum()
        self._up_to = self.odds.cumsum(axis=1)

    def entropy(self) -> float:
        """Return the entropy of a token given the previous one, in nats (Shannon, 1948)."""
        return float(self.share @ _entropies(self.odds))

    def entropy_between(self) -> float:
        """Return the entropy of a token, in nats, where its two neighbours are known.

        By the chain rule: that of two tokens after a known one, less that of the second of them alone.
        """
        import numpy as np

        tokens = len(self.share)
        row = np.arange(tokens)[:, None, None]
        pairs = (row * tokens + self.after[self.after]).ravel()
        odds = (self.odds[:, :, None] * self.odds[self.after]).ravel()
        distinct, where = np.unique(pairs, return_inverse=True)
        summed = np.bincount(where, odds)
        second = -self.share[distinct // tokens] @ (summed * np.log(np.maximum(summed, 1e-300)))
        return 2 * self.entropy() - float(second)

    def draw(self, rng: np.random.Generator, count: int, length: int) -> np.ndarray:
        """Return texts: int64 [count, length].

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
            # Rounding may leave the last sum below 1.
            which = (rng.random((count, 1)) >= self._up_to[now][:, :-1]).sum(axis=1)
            text[:, i + 1] = self.after[now, which]
        return text


def _entropies(odds: np.ndarray) -> np.ndarray:
    """Return the entropy of each row, in nats."""
    import numpy as np

    return -np.where(odds > 0, odds * np.log(np.maximum(odds, 1e-300)), 0).sum(axis=1)


def _generated(
    samples: tuple[int, int], chunks: Callable[[int, int], Iterator[Chunk]], least_loss: float
) -> Source:
    """Return a training and a test split, each from its own stream of random numbers."""
    train, test = (Split(n, chunks(n, stream)) for n, stream in zip(samples, (1, 2), strict=True))
    return Source(train, test, [], generated=True, least_loss=least_loss)


def markov_text(
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

    chain = _Chain(vocabulary, seed)

    def chunks(samples: int, stream: int) -> Iterator[Chunk]:
        for start in range(0, samples, CHUNK_SAMPLES):
            count = min(CHUNK_SAMPLES, samples - start)
            text = chain.draw(np.random.default_rng([seed, stream, start]), count, sequence + 1)
            yield text[:, :-1], text[:, 1:]

    return _generated((train_samples, test_samples), chunks, chain.entropy())


def masked_markov_text(
    train_samples: int, test_samples: int, vocabulary: int, sequence: int, seed: int
) -> Source:
    """Return texts of a Markov chain with every seventh token hidden, and the hidden tokens (`hide_tokens`).

    The last token of the vocabulary hides others, and is none of the chain's. A hidden one depends on its
    two neighbours alone, which gives the least possible loss.

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        vocabulary: Number of different tokens, with the one that hides others.
        sequence: Tokens of a sample.
        seed: Seed of the random numbers.
    """
    import numpy as np

    hides = vocabulary - 1
    chain = _Chain(hides, seed)

    def chunks(samples: int, stream: int) -> Iterator[Chunk]:
        for start in range(0, samples, CHUNK_SAMPLES):
            count = min(CHUNK_SAMPLES, samples - start)
            rng = np.random.default_rng([seed, stream, start])
            yield hide_tokens(chain.draw(rng, count, sequence), hides, rng)

    return _generated((train_samples, test_samples), chunks, chain.entropy_between())


def hide_tokens(text: np.ndarray, hides: int, rng: np.random.Generator) -> Chunk:
    """Return texts [n, length] whose every seventh token is `hides`, and the hidden ones, others IGNORED.

    The first hidden token is another in each text, and none is the first or the last of its text.
    """
    import numpy as np

    count, length = text.shape
    position = np.arange(length)
    first = rng.integers(1, min(MASKED_EVERY, length - 2) + 1, (count, 1))
    hidden = (position >= first) & ((position - first) % MASKED_EVERY == 0)
    hidden[:, -1] = False
    return np.where(hidden, hides, text), np.where(hidden, text, IGNORED)


def labelled_markov_text(
    train_samples: int, test_samples: int, classes: int, vocabulary: int, sequence: int, seed: int
) -> Source:
    """Return texts of one Markov chain per class, and the label of each text's chain.

    Sample i is of class i modulo `classes`, and its label is noisy (`_noisy`).

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        classes: Number of classes.
        vocabulary: Number of different tokens.
        sequence: Tokens of a sample.
        seed: Seed of the random numbers.
    """
    import numpy as np

    chains = [_Chain(vocabulary, seed, number) for number in range(classes)]

    def chunks(samples: int, stream: int) -> Iterator[Chunk]:
        for start in range(0, samples, CHUNK_SAMPLES):
            of = np.arange(start, min(start + CHUNK_SAMPLES, samples)) % classes
            rng = np.random.default_rng([seed, classes + stream, start])
            text = np.empty((len(of), sequence), np.int64)
            for number, chain in enumerate(chains):
                text[of == number] = chain.draw(rng, int((of == number).sum()), sequence)
            yield text, _noisy(of, classes, rng)

    return _generated((train_samples, test_samples), chunks, _least_loss(classes))


def tones(
    train_samples: int, test_samples: int, classes: int, channels: int, length: int, seed: int
) -> Source:
    """Return waveforms [channels, length]: a tone of the class's pitch, and noise of equal amplitude.

    Its phase is random. Sample i is of class i modulo `classes`, and its label is noisy (`_noisy`).

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        classes: Number of classes.
        channels: Channels of a waveform.
        length: Values of a channel.
        seed: Seed of the random numbers.
    """
    import numpy as np

    # Pitches are whole cycles of a waveform, so that the tones are orthogonal.
    step = (length // 2 - 1) // classes
    angle = 2 * np.pi * np.arange(length) / length

    def chunks(samples: int, stream: int) -> Iterator[Chunk]:
        for start in range(0, samples, CHUNK_WAVEFORMS):
            of = np.arange(start, min(start + CHUNK_WAVEFORMS, samples)) % classes
            rng = np.random.default_rng([seed, stream, start])
            phase = rng.uniform(0, 2 * np.pi, (len(of), channels, 1))
            tone = np.sin((of[:, None, None] + 1) * step * angle + phase)
            noise = rng.standard_normal(tone.shape)
            yield (tone + noise).astype(np.float32), _noisy(of, classes, rng)

    return _generated((train_samples, test_samples), chunks, _least_loss(classes))


def _noisy(of: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return labels for samples of these classes, which are wrong with probability LABEL_NOISE."""
    import numpy as np

    other = (of + rng.integers(1, classes, len(of))) % classes
    return np.where(rng.random(len(of)) < LABEL_NOISE, other, of)


def _least_loss(classes: int) -> float:
    """Return the entropy of a noisy label given the class, in nats: the minimum mean loss.

    No model's expected accuracy is higher than 1 - LABEL_NOISE.
    """
    each = LABEL_NOISE / (classes - 1)
    return -(1 - LABEL_NOISE) * math.log(1 - LABEL_NOISE) - LABEL_NOISE * math.log(each)
