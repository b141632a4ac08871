"""Writes a small file of the Criteo format, with something to learn in it.

Values are skewed as real ones are (Zipf). Each value has an effect of its own
on the chance of a click, and values of several categories act on each other:
what only a model that multiplies rows can see. Labels are drawn from these
chances, so the best score any model could reach is known.
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
    """Writes `path`, and next to it the chances the labels were drawn from.

    What is there from the same arguments is left as it is.
    """
    facts = {"lines": num_lines, "seed": seed}
    note = path.with_suffix(".json")
    if (
        path.exists()
        and note.exists()
        and json.loads(note.read_text()) == facts
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
    chances = _chances(draw, categories, numbers)
    labels = draw.random(num_lines) < chances
    columns = [["1" if label else "0" for label in labels]]
    columns += [
        ["" if value == _BLANK else str(value) for value in column]
        for column in (one.tolist() for one in numbers)
    ]
    for number, column in enumerate(categories):
        # The last name is that of index -1.
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
    np.save(path.with_suffix(".npy"), chances.astype(np.float32))
    note.write_text(json.dumps(facts))


def planted_chances(path: Path) -> np.ndarray:
    """Returns the chance of a click in each line that `generate` wrote."""
    return np.load(path.with_suffix(".npy"))


def _num_values(category: int) -> int:
    """From 4 to 20,000, as some categories are small and some are not."""
    return int(4 * 5000 ** (category / (len(CATEGORIES) - 1)))


def _draw_values(draw, category, num_lines):
    ranks = np.arange(1, _num_values(category) + 1)
    chance = ranks**-_ZIPF
    values = draw.choice(len(ranks), num_lines, p=chance / chance.sum())
    # Every third category is blank now and then.
    return np.where(
        draw.random(num_lines) < 0.1 * (category % 3 == 2), _BLANK, values
    )


def _draw_numbers(draw, column, num_lines):
    values = draw.lognormal(1 + column / 6, 1.2, num_lines).astype(np.int64)
    return np.where(draw.random(num_lines) < 0.04 * column, _BLANK, values)


def _chances(draw, categories, numbers):
    logits = np.full(len(numbers[0]), -1.4)
    for column in numbers:
        present = np.maximum(column, 0)
        logits += draw.normal(0, 0.1) * (np.log1p(present) - 1.5)
    total = squares = 0.0
    # Spread out, so that small and large categories act on each other.
    interacting = np.linspace(0, len(categories) - 1, _NUM_INTERACTING).astype(
        int
    )
    for number, column in enumerate(categories):
        num_rows = _num_values(number) + 1  # the last is for blanks
        logits += draw.normal(0, 0.2, num_rows)[column]
        if number in interacting:
            vectors = draw.normal(0, 0.38, (num_rows, _LATENT))[column]
            total, squares = total + vectors, squares + vectors**2
    # Of each pair the dot product: half of what the square of the sum has
    # next to the squares.
    logits += 0.5 * np.sum(total**2 - squares, axis=1)
    return 1 / (1 + np.exp(-logits))
