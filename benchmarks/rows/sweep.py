"""Measures prefetch distances and tile sizes for rows of several sizes.

    python -m benchmarks.rows.sweep

For each number of columns and dtype of the rows, the program measures lookups
and Adagrad updates of 131,072 uniform ids in one table, on all cores. The
program calls the loops of the C++ core (`cc/benchmarks`) without TensorFlow.
All settings are measured in interleaved rounds. Each line of the output
contains the median of the fastest setting, and the medians of all settings
relative to the fastest setting.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import rich.console
import rich.table
from absl import app, flags

from benchmarks import roof, timing

_ROUNDS = flags.DEFINE_integer(
    "sweep_rounds", 15, "Number of timed calls of each setting.", lower_bound=1
)
_DIMS = flags.DEFINE_multi_integer(
    "dims", [8, 16, 32, 64, 128, 256], "Numbers of columns of the rows."
)

NUM_SAMPLES, IDS_PER_SAMPLE = 8192, 16
# The table must be much larger than the processor caches.
TABLE_BYTES = 256 << 20
LOOKUPS = {
    f"{ahead}/{tile}": (ahead, tile)
    for ahead in (4, 8, 16, 32, 64)
    for tile in (128, 512, 2048)
}
UPDATES = {
    f"{ahead}/{later}/{tile}": (ahead, later, tile)
    for ahead in (4, 8, 16, 32)
    for later in (8, 32)
    for tile in (64, 256)
}


def measure(dim: int, half: bool) -> dict[str, dict[str, np.ndarray]]:
    """Returns `[rounds]` milliseconds for each operation and setting."""
    sweep = roof.load("_row_sweep").Sweep(
        TABLE_BYTES // (4 * dim),
        dim,
        half,
        NUM_SAMPLES,
        IDS_PER_SAMPLE,
        roof.num_threads(),
    )

    def contestants(
        call: Callable[..., float], settings: dict[str, tuple[int, ...]]
    ):
        return {
            name: lambda i, arguments=arguments: timing.Milliseconds(
                call(*arguments)
            )
            for name, arguments in settings.items()
        }

    times = {
        "lookup": timing.interleave(
            contestants(sweep.lookup, LOOKUPS), _ROUNDS.value
        )
    }
    # In updates of 16-bit rows, the tile size cannot be changed.
    updates = {
        name: arguments
        for name, arguments in UPDATES.items()
        if not half or arguments[2] == 256
    }
    times["update"] = timing.interleave(
        contestants(sweep.update, updates), _ROUNDS.value
    )
    return times


def main(argv: list[str]) -> None:
    """Prints the results of all operations and types of rows as a table."""
    del argv
    table = rich.table.Table(
        title="Median ms of the best setting, and ratios of the other settings"
    )
    for column in ("rows", "", "best", "ratios"):
        table.add_column(column)
    for dim in _DIMS.value:
        for half in (False, True):
            for verb, times in measure(dim, half).items():
                medians = {
                    name: float(np.median(values))
                    for name, values in times.items()
                }
                ranked = sorted(medians, key=medians.__getitem__)
                best = medians[ranked[0]]
                table.add_row(
                    f"{dim} x {16 if half else 32} bits",
                    verb,
                    f"{ranked[0]}: {best:.2f} ms",
                    ", ".join(
                        f"{name} {value / best:.2f}"
                        for name, value in medians.items()
                    ),
                )
    rich.console.Console(width=150).print(table)


if __name__ == "__main__":
    app.run(main)
