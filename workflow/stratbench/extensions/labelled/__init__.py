"""The extension `labelled`: data sets of masked texts, labelled texts and waveforms."""

from __future__ import annotations

from stratbench.cell.extensions import Extension

EXTENSION = Extension(
    summary="data sets of masked texts, labelled texts and waveforms",
    generators={
        "masked-markov-text": "stratbench.extensions.labelled.generated:MASKED",
        "labelled-markov-text": "stratbench.extensions.labelled.generated:LABELLED",
        "tones": "stratbench.extensions.labelled.generated:TONES",
    },
    file_kinds={
        "masked_text": "stratbench.extensions.labelled.texts:MASKED",
        "labelled_texts": "stratbench.extensions.labelled.texts:LABELLED",
        "waveforms": "stratbench.extensions.labelled.waveforms:KIND",
    },
)
