"""Text that the model makes up, a character at a time."""

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
    """Continues each prompt.

    Args:
      model: From `[batch, context]` rows to scores of the next.
      characters: The vocabulary.
      prompts: What stands before, each at least one character.
      length: Characters to add to each.
      temperature: Below 1, likely characters become likelier.
      seed: Of what is drawn.

    Returns:
      The prompts with what was added.
    """
    draw = np.random.default_rng(seed)
    context = model.input_shape[1]
    texts = [list(characters.rows(prompt)) for prompt in prompts]
    for _ in range(length):
        # The end is filled up: the model does not look ahead.
        window = np.zeros([len(texts), context], np.int32)
        ends = []
        for row, text in zip(window, texts, strict=True):
            seen = text[-context:]
            row[: len(seen)] = seen
            ends.append(len(seen) - 1)
        scores = model.predict_on_batch(window)[np.arange(len(ends)), ends]
        scores[:, OTHER] = -np.inf  # It has no character to show.
        # The highest of the scores with Gumbel noise is a draw from their
        # softmax.
        noise = draw.gumbel(size=scores.shape)
        for text, row in zip(
            texts, np.argmax(scores / temperature + noise, axis=1), strict=True
        ):
            text.append(int(row))
    return [characters.text(text) for text in texts]
