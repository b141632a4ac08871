"""Which prefetch distance and tile suit rows of which size.

    python -m benchmarks.rows.sweep

Lookups and updates by Adagrad of one table, 131,072 uniform ids, by dim and
type of the rows, with all cores: the core's own loops (`cc/benchmarks`), no
TensorFlow. All settings of a table are measured in turn; a figure is the
median time by the best median of the row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import rich.console
import rich.table
from absl import app, flags

from benchmarks import roof, timing

_ROUNDS = flags.DEFINE_integer(
    "sweep_rounds", 15, "How often each setting is timed.", lower_bound=1
)
_DIMS = flags.DEFINE_multi_integer(
    "dims", [8, 16, 32, 64, 128, 256], "Dims of the rows."
)

NUM_SAMPLES, IDS_PER_SAMPLE = 8192, 16
# Far more than caches hold.
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
    """Milliseconds of each round, by operation and setting."""
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
            name: lambda i, one=one: timing.Milliseconds(call(*one))
            for name, one in settings.items()
        }

    found = {
        "lookup": timing.interleave(
            contestants(sweep.lookup, LOOKUPS), _ROUNDS.value
        )
    }
    # Rows of 16 bits are updated in tiles of their own.
    updates = {
        name: one for name, one in UPDATES.items() if not half or one[2] == 256
    }
    found["update"] = timing.interleave(
        contestants(sweep.update, updates), _ROUNDS.value
    )
    return found


def main(argv: list[str]) -> None:
    """Measures all, and prints a line for each operation and kind of row."""
    del argv
    table = rich.table.Table(
        title="Median ms of the best setting, and how "
        "many times as long others take"
    )
    for column in ("rows", "", "best", "of other settings"):
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
