"""Generates a small synthetic file of the Criteo format.

Categorical values follow Zipf's law, as in real data. Each value changes the
log-odds of a click. For eight of the categories, each pair of values also
changes the log-odds. Only a model that multiplies embedding rows can learn the
effect of the pairs. Labels are drawn from the resulting probabilities, so the
best possible score is known.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

from clicks.criteo import CATEGORIES, NUM_NUMBERS

_ZIPF = 1.2
_NUM_INTERACTING = 8
_LATENT = 3
_BLANK = -1


def generate(path: Path, num_lines: int, seed: int) -> None:
    """Writes `path`, and a second file with the true click probabilities.

    Files that were generated from the same arguments are not written again.
    """
    arguments = {"lines": num_lines, "seed": seed}
    note = path.with_suffix(".json")
    if (
        path.exists()
        and note.exists()
        and json.loads(note.read_text()) == arguments
    ):
        return
    draw = np.random.default_rng(seed)
    categories = [
        _draw_values(draw, number, num_lines)
        for number in range(len(CATEGORIES))
    ]
    numbers = [
        _draw_numbers(draw, number, num_lines) for number in range(NUM_NUMBERS)
    ]
    probabilities = _probabilities(draw, categories, numbers)
    labels = draw.random(num_lines) < probabilities
    columns = [["1" if label else "0" for label in labels]]
    columns += [
        ["" if value == _BLANK else str(value) for value in column]
        for column in (one.tolist() for one in numbers)
    ]
    for number, column in enumerate(categories):
        # The index of a blank is -1, which selects the last name, the empty
        # string.
        names = [
            *(
                f"{zlib.crc32(b'%d %d' % (number, value)):08x}"
                for value in range(_num_values(number))
            ),
            "",
        ]
        columns.append([names[value] for value in column.tolist()])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join("\t".join(line) + "\n" for line in zip(*columns, strict=True))
    )
    np.save(path.with_suffix(".npy"), probabilities.astype(np.float32))
    note.write_text(json.dumps(arguments))


def true_probabilities(path: Path) -> np.ndarray:
    """Returns the click probability of each line that `generate` wrote."""
    return np.load(path.with_suffix(".npy"))


def _num_values(category: int) -> int:
    """Returns the number of values of a category, from 4 to 20,000."""
    return int(4 * 5000 ** (category / (len(CATEGORIES) - 1)))


def _draw_values(draw, category, num_lines):
    ranks = np.arange(1, _num_values(category) + 1)
    shares = ranks**-_ZIPF
    values = draw.choice(len(ranks), num_lines, p=shares / shares.sum())
    # One in ten values of every third category is blank.
    return np.where(
        draw.random(num_lines) < 0.1 * (category % 3 == 2), _BLANK, values
    )


def _draw_numbers(draw, column, num_lines):
    values = draw.lognormal(1 + column / 6, 1.2, num_lines).astype(np.int64)
    return np.where(draw.random(num_lines) < 0.04 * column, _BLANK, values)


def _probabilities(draw, categories, numbers):
    logits = np.full(len(numbers[0]), -1.4)
    for column in numbers:
        present = np.maximum(column, 0)
        logits += draw.normal(0, 0.1) * (np.log1p(present) - 1.5)
    total = squares = 0.0
    # The interacting categories are evenly spaced, so that small and large
    # categories interact.
    interacting = np.linspace(0, len(categories) - 1, _NUM_INTERACTING).astype(
        int
    )
    for number, column in enumerate(categories):
        num_rows = _num_values(number) + 1  # Blanks use the last row.
        logits += draw.normal(0, 0.2, num_rows)[column]
        if number in interacting:
            vectors = draw.normal(0, 0.38, (num_rows, _LATENT))[column]
            total, squares = total + vectors, squares + vectors**2
    # The sum of the dot products of all pairs is half of the difference between
    # the square of the sum and the sum of the squares.
    logits += 0.5 * np.sum(total**2 - squares, axis=1)
    return 1 / (1 + np.exp(-logits))
