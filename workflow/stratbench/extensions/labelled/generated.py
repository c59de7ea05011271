"""Generates data sets: masked texts, labelled texts, and waveforms of noisy tones.

numpy is imported inside functions, since the Snakefile imports this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from stratbench.workload.data.generated import (
    CHUNK_SAMPLES,
    MarkovChain,
    make_generated_source,
)
from stratbench.workload.data.kinds import Generator
from stratbench.workload.data.sources import Source
from stratbench.workload.tasks import IGNORED

if TYPE_CHECKING:
    import numpy as np

    from stratbench.workload.data.sources import InputsAndTargets

#: Distance between masked tokens of a text: one token in seven is masked (in BERT 15 %).
MASKED_EVERY = 7
#: Share of samples whose label is a wrong class, drawn at random.
LABEL_NOISE = 0.1
CHUNK_WAVEFORMS = 64


def generate_masked_markov_text(
    train_samples: int, test_samples: int, vocabulary: int, sequence: int, seed: int
) -> Source:
    """Return texts of a Markov chain in which every seventh token is masked.

    Targets are the masked tokens (`replace_tokens_by_mask`). The mask is the last token of the vocabulary,
    which the chain itself does not generate. A masked token depends on its two neighbours only, so that the
    least possible loss is known.

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        vocabulary: Number of different tokens, including the mask.
        sequence: Tokens of a sample.
        seed: Seed of the random numbers.
    """
    import numpy as np

    hides = vocabulary - 1
    chain = MarkovChain(hides, seed)

    def generate_masked_text_chunks(samples: int, random_stream: int) -> Iterator[InputsAndTargets]:
        for start in range(0, samples, CHUNK_SAMPLES):
            count = min(CHUNK_SAMPLES, samples - start)
            rng = np.random.default_rng([seed, random_stream, start])
            yield replace_tokens_by_mask(chain.draw_texts(rng, count, sequence), hides, rng)

    return make_generated_source(
        (train_samples, test_samples),
        generate_masked_text_chunks,
        compute_token_entropy_given_neighbours(chain),
    )


def replace_tokens_by_mask(
    texts: np.ndarray, mask_token: int, rng: np.random.Generator
) -> InputsAndTargets:
    """Return texts [n, length] in which every seventh token is masked, and the masked tokens.

    A hidden token is `mask_token` in the texts, and the other tokens are IGNORED in the second array. The
    first hidden token is another in each text, and none is the first or the last of its text.
    """
    import numpy as np

    count, length = texts.shape
    position = np.arange(length)
    first = rng.integers(1, min(MASKED_EVERY, length - 2) + 1, (count, 1))
    hidden = (position >= first) & ((position - first) % MASKED_EVERY == 0)
    hidden[:, -1] = False
    return np.where(hidden, mask_token, texts), np.where(hidden, texts, IGNORED)


def compute_token_entropy_given_neighbours(chain: MarkovChain) -> float:
    """Return the entropy in nats of a Markov chain's token whose two neighbours are known.

    By the chain rule, it is the entropy of the next two tokens, minus that of the second one of these.
    """
    import numpy as np

    tokens = len(chain.share)
    row = np.arange(tokens)[:, None, None]
    pairs = (row * tokens + chain.after[chain.after]).ravel()
    odds = (chain.odds[:, :, None] * chain.odds[chain.after]).ravel()
    distinct, where = np.unique(pairs, return_inverse=True)
    summed = np.bincount(where, odds)
    second = -chain.share[distinct // tokens] @ (summed * np.log(np.maximum(summed, 1e-300)))
    return 2 * chain.compute_entropy_rate() - float(second)


def generate_labelled_markov_text(
    train_samples: int, test_samples: int, classes: int, vocabulary: int, sequence: int, seed: int
) -> Source:
    """Return labelled texts: each class has its own Markov chain, which generates its texts.

    Sample i is of class i modulo `classes`, and its label is noisy (`_make_noisy_labels`).

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        classes: Number of classes.
        vocabulary: Number of different tokens.
        sequence: Tokens of a sample.
        seed: Seed of the random numbers.
    """
    import numpy as np

    chains = [MarkovChain(vocabulary, seed, number) for number in range(classes)]

    def generate_labelled_text_chunks(
        samples: int, random_stream: int
    ) -> Iterator[InputsAndTargets]:
        for start in range(0, samples, CHUNK_SAMPLES):
            of = np.arange(start, min(start + CHUNK_SAMPLES, samples)) % classes
            rng = np.random.default_rng([seed, classes + random_stream, start])
            text = np.empty((len(of), sequence), np.int64)
            for number, chain in enumerate(chains):
                text[of == number] = chain.draw_texts(rng, int((of == number).sum()), sequence)
            yield text, _make_noisy_labels(of, classes, rng)

    return make_generated_source(
        (train_samples, test_samples),
        generate_labelled_text_chunks,
        _compute_min_loss_of_noisy_labels(classes),
    )


def generate_tone_waveforms(
    train_samples: int, test_samples: int, classes: int, channels: int, length: int, seed: int
) -> Source:
    """Return labelled waveforms [channels, length]: a tone with the class's pitch, plus noise.

    The noise has about the amplitude of the tone, whose phase is random. Sample i is of class i modulo
    `classes`, and its label is noisy (`_make_noisy_labels`).

    Args:
        train_samples: Number of training samples.
        test_samples: Number of test samples.
        classes: Number of classes.
        channels: Channels of a waveform.
        length: Values of a channel.
        seed: Seed of the random numbers.
    """
    import numpy as np

    # Each tone has a whole number of cycles per waveform. This makes tones of different classes orthogonal.
    step = (length // 2 - 1) // classes
    angle = 2 * np.pi * np.arange(length) / length

    def generate_waveform_chunks(samples: int, random_stream: int) -> Iterator[InputsAndTargets]:
        for start in range(0, samples, CHUNK_WAVEFORMS):
            of = np.arange(start, min(start + CHUNK_WAVEFORMS, samples)) % classes
            rng = np.random.default_rng([seed, random_stream, start])
            phase = rng.uniform(0, 2 * np.pi, (len(of), channels, 1))
            tone = np.sin((of[:, None, None] + 1) * step * angle + phase)
            noise = rng.standard_normal(tone.shape)
            yield (tone + noise).astype(np.float32), _make_noisy_labels(of, classes, rng)

    return make_generated_source(
        (train_samples, test_samples),
        generate_waveform_chunks,
        _compute_min_loss_of_noisy_labels(classes),
    )


def _make_noisy_labels(labels: np.ndarray, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Return class labels, each of which is wrong with the probability LABEL_NOISE."""
    import numpy as np

    other = (labels + rng.integers(1, classes, len(labels))) % classes
    return np.where(rng.random(len(labels)) < LABEL_NOISE, other, labels)


def _compute_min_loss_of_noisy_labels(classes: int) -> float:
    """Return the least possible mean loss in nats of a model that predicts noisy labels.

    The minimum is the entropy of the label conditional on its class. No model's expected accuracy is higher
    than 1 - LABEL_NOISE.
    """
    each = LABEL_NOISE / (classes - 1)
    return -(1 - LABEL_NOISE) * math.log(1 - LABEL_NOISE) - LABEL_NOISE * math.log(each)


_SIZES = {"train_samples": 4096, "test_samples": 512}
MASKED = Generator(
    generate_masked_markov_text,
    _SIZES | {"vocabulary": 64, "sequence": 64, "seed": 0},
    shape_keys=("sequence",),
    class_count_key="vocabulary",
    task="masked-token",
    list_min_values=lambda values: {"vocabulary": 3, "sequence": 3},
)
LABELLED = Generator(
    generate_labelled_markov_text,
    _SIZES | {"classes": 4, "vocabulary": 64, "sequence": 64, "seed": 0},
    shape_keys=("sequence",),
    vocabulary_key="vocabulary",
    task="text-classification",
    list_min_values=lambda values: {"classes": 2},
)
TONES = Generator(
    generate_tone_waveforms,
    {"train_samples": 2048, "test_samples": 512}
    | {"classes": 8, "channels": 1, "length": 1600, "seed": 0},
    shape_keys=("channels", "length"),
    has_float_samples=True,
    list_min_values=lambda values: {"classes": 2, "length": 2 * values["classes"] + 2},
)
