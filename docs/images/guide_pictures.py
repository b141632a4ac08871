"""Draws the pictures of two guides; `make.py` writes them to files.

`draw_vocabulary` shows steps of a real table with an open vocabulary.
`draw_placements` shows which process holds which rows of a table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from matplotlib import patches, pyplot

# These colors have enough contrast with white for text in the color and for
# white text on the color.
COLORS = ("#1f5fa8", "#b3541e", "#2f7d4f", "#7a3e9d")
EMPTY = "#eef1f5"
EDGE = "#4a5568"

CAPACITY = 8
MIN_COUNT = 2
# The third step fills the table, and does not use "hen". The last step
# therefore evicts this key.
BATCHES = (
    "red fox hen",
    "red fox hen owl",
    "red fox owl elk elk ant ant bee bee cat cat",
    "red yak yak",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A table after a training step.

    Attributes:
      batch: The ids of the step.
      rows: Key of each row, or None for a free row.
      added: Rows that the step has assigned to keys.
      evicted: Keys that the step has evicted.
      counted: Ids of the batch that have no row after the step.
    """

    batch: list[str]
    rows: list[str | None]
    added: list[int]
    evicted: list[str]
    counted: list[str]


def run_vocabulary() -> list[Step]:
    """Trains a small table on `BATCHES` and returns its state after each."""
    import tensorflow as tf

    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    reports = []
    table = tpu.TableConfig(CAPACITY, 2, combiner="sum", name="words")
    embedding = tlm.TPUEmbedding(
        {"word": tpu.FeatureConfig(table)},
        tpu.Adagrad(0.1),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(
                CAPACITY,
                admission="count",
                min_count=MIN_COUNT,
                evict="lru",
                keep_strings=True,
                on_evict=reports.append,
            )
        },
    )
    steps, before = [], [None] * CAPACITY
    for text in BATCHES:
        batch = text.split()
        embedding.enqueue({"word": tf.constant(batch)})
        embedding.dequeue()
        embedding.apply_gradients({"word": tf.ones([len(batch), 2])})
        vocabulary = embedding.vocabularies["words"]
        keys = vocabulary.keys()
        rows: list[str | None] = [None] * CAPACITY
        for key, row in zip(keys.numpy(), vocabulary.lookup(keys).numpy()):
            rows[row] = key.decode()
        evicted = [key.decode() for report in reports for key in report.strings]
        reports.clear()
        steps.append(
            Step(
                batch,
                rows,
                [
                    row
                    for row, key in enumerate(rows)
                    if key is not None and key != before[row]
                ],
                evicted,
                [key for key in dict.fromkeys(batch) if key not in rows],
            )
        )
        before = rows
    return steps


def draw_vocabulary(steps: list[Step]) -> Any:
    """Returns a figure with the table after each step, from left to right."""
    figure, all_axes = pyplot.subplots(1, len(steps), figsize=(9.6, 4.0))
    for number, (axes, step) in enumerate(zip(all_axes, steps), 1):
        half = (len(step.batch) + 1) // 2
        lines = (
            [step.batch]
            if len(step.batch) < 6
            else [step.batch[:half], step.batch[half:]]
        )
        axes.set_title(f"step {number}", fontsize=11, weight="bold", y=1.0)
        axes.text(
            0.5,
            9.95,
            "\n".join(" ".join(line) for line in lines),
            ha="center",
            va="center",
            fontsize=8.5,
            family="monospace",
        )
        axes.annotate(
            "",
            (0.5, 8.15),
            (0.5, 9.2),
            arrowprops={"arrowstyle": "->", "color": EDGE},
        )
        for row, key in enumerate(step.rows):
            if row in step.added:
                fill, ink = COLORS[2], "white"
            elif key is not None:
                fill, ink = COLORS[0], "white"
            else:
                fill, ink = EMPTY, EDGE
            bottom = CAPACITY - 1 - row
            axes.add_patch(
                patches.Rectangle(
                    (0.1, bottom), 0.8, 1, facecolor=fill, edgecolor=EDGE
                )
            )
            axes.text(
                0.5,
                bottom + 0.5,
                f"row {row}: {key or 'free'}",
                ha="center",
                va="center",
                fontsize=8.5,
                color=ink,
            )
        notes = []
        if step.counted:
            notes.append(f"counted: {', '.join(step.counted)}")
        if step.added:
            notes.append(f"{len(step.added)} new, in green")
        if step.evicted:
            notes.append(f"evicted: {', '.join(step.evicted)}")
        axes.text(
            0.5,
            -0.3,
            "\n".join(notes),
            ha="center",
            va="top",
            fontsize=9,
            color=EDGE,
        )
        axes.set(xlim=(0, 1), ylim=(-2.0, 10.7))
        axes.axis("off")
    return figure


def _draw_process(
    axes: Any, left: float, name: str, holders: list[tuple[str, list[int]]]
) -> None:
    """Draws a process with its devices, and the rows that each device holds.

    Args:
      axes: Matplotlib axes to draw on.
      left: Left border of the process; its width is 2.
      name: Name of the process.
      holders: Name of each device, and its rows among four blocks of rows.
    """
    axes.add_patch(
        patches.FancyBboxPatch(
            (left + 0.05, -0.05),
            1.9,
            2.1,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="white",
            edgecolor=EDGE,
        )
    )
    axes.text(
        left + 1, 2.12, name, ha="center", va="bottom", fontsize=9, color=EDGE
    )
    width = 1.7 / len(holders)
    for index, (device, blocks) in enumerate(holders):
        start = left + 0.15 + index * width
        for block in range(4):
            held = block in blocks
            axes.add_patch(
                patches.Rectangle(
                    (start + 0.05, 1.55 - 0.4 * block),
                    width - 0.1,
                    0.4,
                    facecolor=COLORS[block] if held else EMPTY,
                    edgecolor=EDGE,
                    linewidth=0.8,
                )
            )
        axes.text(
            start + width / 2,
            0.02,
            device,
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=EDGE,
        )


PLACEMENTS = {
    "a mesh": [
        ("process 0", [("CPU:0", [0]), ("CPU:1", [1])]),
        ("process 1", [("CPU:0", [2]), ("CPU:1", [3])]),
    ],
    "MultiWorkerMirroredStrategy": [
        ("process 0", [("all rows", [0, 1, 2, 3])]),
        ("process 1", [("all rows", [0, 1, 2, 3])]),
    ],
    'over_processes="sharded"': [
        ("process 0", [("half", [0, 1])]),
        ("process 1", [("half", [2, 3])]),
    ],
    "parameter servers": [
        ("server 0", [("half", [0, 1])]),
        ("server 1", [("half", [2, 3])]),
        ("worker 0", [("no rows", [])]),
        ("worker 1", [("no rows", [])]),
    ],
}


def draw_placements() -> Any:
    """Returns a figure with the rows that each process holds."""
    figure, all_axes = pyplot.subplots(1, len(PLACEMENTS), figsize=(9.6, 3.3))
    for axes, (title, processes) in zip(all_axes, PLACEMENTS.items()):
        axes.set_title(title, fontsize=9.5, weight="bold")
        for index, (name, holders) in enumerate(processes):
            down, right = divmod(index, 2)
            # Each process is drawn at the origin of shifted axes.
            shifted = axes.inset_axes(
                (2 * right, -2.6 * down, 2, 2.5), transform=axes.transData
            )
            shifted.set(xlim=(0, 2), ylim=(-0.1, 2.4))
            shifted.axis("off")
            _draw_process(shifted, 0, name, holders)
        axes.set(xlim=(0, 4), ylim=(-2.7, 2.5))
        axes.axis("off")
    return figure
