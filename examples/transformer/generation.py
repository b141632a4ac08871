"""Generates text, one character at a time."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np

from transformer.text import OTHER, Characters


def generate(
    model: keras.Model,
    characters: Characters,
    prompts: Sequence[str],
    *,
    length: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Returns each prompt with generated text appended.

    Args:
      model: Model from `[batch, context]` rows to scores of the next row.
      characters: Vocabulary.
      prompts: Non-empty prompts.
      length: Number of characters to generate for each prompt.
      temperature: Divisor of the scores; values below 1 favor likely
        characters.
      seed: Seed of the sampling.
    """
    draw = np.random.default_rng(seed)
    context = model.input_shape[1]
    texts = [list(characters.rows(prompt)) for prompt in prompts]
    for _ in range(length):
        # The padding is at the end and has no effect, because attention is
        # causal.
        window = np.zeros([len(texts), context], np.int32)
        ends = []
        for row, text in zip(window, texts, strict=True):
            seen = text[-context:]
            row[: len(seen)] = seen
            ends.append(len(seen) - 1)
        scores = model.predict_on_batch(window)[np.arange(len(ends)), ends]
        # `OTHER` does not represent a single character.
        scores[:, OTHER] = -np.inf
        # The argmax of scores with Gumbel noise is a sample of their softmax.
        noise = draw.gumbel(size=scores.shape)
        for text, row in zip(
            texts, np.argmax(scores / temperature + noise, axis=1), strict=True
        ):
            text.append(int(row))
    return [characters.text(text) for text in texts]
