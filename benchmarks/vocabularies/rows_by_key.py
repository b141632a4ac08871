"""Measures how fast rows are written, read, exported and imported by key.

The table has 16 float32 columns and an Adagrad accumulator of the same size.
Each operation processes all keys, in blocks. Operations:

* `write`: `Vocabulary.write` of rows for new keys, one call per block.
* `overwrite`: the same call for known keys, with rows and accumulators.
* `blocks`: the iteration over all keys with `Vocabulary.blocks`.
* `export`: `Vocabulary.export` in each format. All formats contain the rows,
  accumulators, counts and last steps.
* `import`: `tlm.vocabulary.import_rows` of these files into an empty table of
  another capacity.

`memory` is the increase of the peak memory of the process during an operation.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import rich.console
import rich.table
import tensorflow as tf
from absl import app

import tf_layoutmap as tlm

DIM = 16
BLOCK_SIZE = 2**18
# The load of the tables is 0.7, so that nearly all keys find a place.
_LOAD = 0.7


def _table(num_keys: int, load: float = _LOAD):
    tpu = tf.tpu.experimental.embedding
    capacity = int(num_keys / load)
    config = tpu.TableConfig(
        capacity,
        DIM,
        combiner="sum",
        name="table",
        initializer=tf.random_uniform_initializer(-0.05, 0.05),
    )
    embedding = tlm.TPUEmbedding(
        {"id": tpu.FeatureConfig(config)},
        tpu.Adagrad(0.1),
        vocabularies={"table": tlm.vocabulary.OpenVocabulary(capacity)},
    )
    embedding.build()
    vocabulary = embedding.vocabularies["table"]
    # The memory of the variables is touched before the measurements.
    vocabulary.write([1])
    vocabulary.evict([1])
    return vocabulary


def _keys(num_keys: int) -> Iterator[np.ndarray]:
    """Yields distinct keys in blocks."""
    for first in range(0, num_keys, BLOCK_SIZE):
        numbers = np.arange(first, min(first + BLOCK_SIZE, num_keys))
        # The factor is odd, so all keys are distinct.
        factor = np.uint64(0x9E3779B97F4A7C15)
        yield (numbers.astype(np.uint64) * factor).view(np.int64)


class _Peak:
    """Measures the increase of the resident memory in a `with` block."""

    def __enter__(self):
        self.before = self.most = _resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.02):
            self.most = max(self.most, _resident_bytes())

    def __exit__(self, *args):
        self._stop.set()
        self._thread.join()

    @property
    def num_bytes(self) -> int:
        return self.most - self.before


def _resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(num_keys: int, folder: str) -> dict[str, tuple[float, int]]:
    """Returns the seconds and the additional bytes of each operation."""
    costs: dict[str, tuple[float, int]] = {}

    def run(name: str, operation: Callable[[], object]):
        with _Peak() as peak:
            start = time.perf_counter()
            operation()
            seconds = time.perf_counter() - start
        costs[name] = (seconds, peak.num_bytes)

    vocabulary = _table(num_keys)
    rows = np.random.default_rng(0).normal(size=[BLOCK_SIZE, DIM])
    rows = rows.astype(np.float32)

    def write(with_slots: bool):
        num_written = 0
        for keys in _keys(num_keys):
            values = rows[: len(keys)]
            num_written += vocabulary.write(
                keys, values, {"accumulators": values} if with_slots else None
            ).num_written
        assert num_written > 0.99 * num_keys

    run("write", lambda: write(False))
    run("overwrite", lambda: write(True))

    def read():
        for block in vocabulary.blocks(BLOCK_SIZE):
            assert block.rows.shape[1] == DIM

    run("blocks", read)
    for format in ("numpy", "parquet"):
        path = os.path.join(folder, format)
        run(
            f"export ({format})",
            lambda path=path, format=format: vocabulary.export(
                path, format=format
            ),
        )
        target = _table(num_keys, 0.6)
        run(
            f"import ({format})",
            lambda path=path, target=target: tlm.vocabulary.import_rows(
                path, target
            ),
        )
        del target
    return costs


def report(num_keys: int = 2_000_000) -> rich.table.Table:
    """Measures all operations and returns a table with the rates.

    Args:
      num_keys: Number of keys in the table.
    """
    table = rich.table.Table(
        title=f"{num_keys:,} keys, {DIM} floats and {DIM} accumulators each"
    )
    for name in ("operation", "seconds", "M rows per minute", "memory (MB)"):
        table.add_column(
            name, justify="right" if name != "operation" else "left"
        )
    with tempfile.TemporaryDirectory() as folder:
        for name, (seconds, num_bytes) in measure(num_keys, folder).items():
            table.add_row(
                name,
                f"{seconds:.2f}",
                f"{num_keys / seconds * 60 / 1e6:.0f}",
                f"{num_bytes / 1e6:.0f}",
            )
    return table


def main(argv: list[str]) -> None:
    num_keys = int(argv[1]) if len(argv) > 1 else 2_000_000
    rich.console.Console(width=100).print(report(num_keys))


if __name__ == "__main__":
    app.run(main)
