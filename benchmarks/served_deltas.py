"""Time of applying a delta to a served model, and latency of its lookups.

The model has two tables of 10 M rows x 16: a closed table, and a table with an
open vocabulary whose rows all belong to keys. The tables are stored as float32
or int8. A delta contains 100,000 rows of each table. In the open table, half of
these rows get new keys.

`python -m benchmarks.served_deltas prepare FOLDER` trains the tables and writes
the exports and the deltas, which takes minutes and requires 12 GB of memory.
`python -m benchmarks.served_deltas measure FOLDER` runs without tf_layoutmap.
One thread looks up 128 ids of each table per call, without a pause, first alone
and then while the main thread applies a delta. The printed JSON contains for
each storage type:

* `apply_seconds`: the time of `apply`, with reading and checking the files.
* `largest_wait_ms`: the longest time that a call waited for `lookups()`.
* `largest_ms_alone`, `p99_ms_alone`: latency of calls without a delta.
* `largest_ms`, `p99_ms`: latency of calls during `apply`.
"""

import json
import pathlib
import sys
import threading
import time
from typing import Any

import numpy as np

NUM_ROWS, DIM, NUM_CHANGED = 10_000_000, 16, 100_000
KINDS = ("float32", "int8")
NUM_DELTAS = 3
BATCH_SIZE = 128
STEP_KEYS = 500_000


def prepare(folder: pathlib.Path, num_rows: int) -> None:
    """Writes a base, an export of each storage type, and deltas."""
    import tensorflow as tf

    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    initializer = tf.random_uniform_initializer(-0.05, 0.05)
    embedding = tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(num_rows, DIM, initializer, name=name)
            )
            for name in ("open", "closed")
        },
        tpu.SGD(0.1),
        vocabularies={"open": tlm.vocabulary.OpenVocabulary(num_rows)},
    )

    def train(keys: np.ndarray, ids: np.ndarray) -> None:
        embedding.enqueue({"open": keys, "closed": ids})
        embedding.dequeue()
        embedding.apply_gradients(
            {
                "open": tf.ones([len(keys), DIM]),
                "closed": tf.ones([len(ids), DIM]),
            }
        )

    for start in range(0, num_rows, STEP_KEYS):
        train(np.arange(start, start + STEP_KEYS), np.arange(8))
    base = tf.train.Checkpoint(embedding=embedding).save(str(folder / "base"))
    writer = tlm.deltas.DeltaWriter(embedding, folder / "deltas", base=base)
    signature = [
        {name: tf.TensorSpec([None], tf.int64) for name in ("open", "closed")}
    ]
    for kind in KINDS:
        tlm.export(
            embedding,
            folder / kind,
            kind,
            input_signature=signature,
            delta_writer=writer,
        )
    random = np.random.default_rng(0)
    half = NUM_CHANGED // 2
    for number in range(NUM_DELTAS):
        known = random.choice(num_rows, half, replace=False)
        new = np.arange(half) + num_rows + number * half
        train(
            np.concatenate([known, new]),
            random.choice(num_rows, NUM_CHANGED, replace=False),
        )
        delta = writer.write()
        assert delta is not None
        print(
            {
                table: meta["num_rows"]
                for table, meta in delta.meta.tables.items()
            }
        )


class _Reader:
    """A thread that looks up random ids until it is stopped."""

    def __init__(self, served: Any, num_rows: int):
        import tensorflow as tf

        random = np.random.default_rng(1)
        self._served = served
        self._batches = [
            {
                name: tf.constant(random.integers(0, num_rows, BATCH_SIZE))
                for name in ("open", "closed")
            }
            for _ in range(64)
        ]
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.calls: list[float] = []
        self.waits: list[float] = []

    def _run(self) -> None:
        number = 0
        while not self._is_done.is_set():
            batch = self._batches[number % len(self._batches)]
            begin = time.perf_counter()
            with self._served.lookups():
                entered = time.perf_counter()
                self._served.model.serve(batch)
            self.calls.append(time.perf_counter() - begin)
            self.waits.append(entered - begin)
            number += 1

    def __enter__(self) -> "_Reader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


def measure(folder: pathlib.Path, num_rows: int) -> dict[str, Any]:
    """Returns the times of each storage type."""
    package = pathlib.Path(__file__).parents[1] / "tf_layoutmap" / "deltas"
    # With this entry, an import of tf_layoutmap fails as if the package were
    # not installed.
    sys.modules["tf_layoutmap"] = None  # pyright: ignore[reportArgumentType]
    sys.path.insert(0, str(package))
    import served as served_deltas  # pyright: ignore[reportMissingImports]

    deltas = [
        folder / "deltas" / f"{number:08d}"
        for number in range(1, NUM_DELTAS + 1)
    ]
    results = {}
    for kind in KINDS:
        served = served_deltas.ServedModel(folder / kind)
        with _Reader(served, num_rows):  # Warms up.
            time.sleep(1)
            served.apply(deltas[:1])
        with _Reader(served, num_rows) as alone:
            time.sleep(2)
        seconds = []
        with _Reader(served, num_rows) as reader:
            while not reader.calls:
                time.sleep(0.001)
            for delta in deltas[1:]:
                begin = time.perf_counter()
                served.apply([delta])
                seconds.append(time.perf_counter() - begin)
        results[kind] = {
            "apply_seconds": [round(value, 3) for value in seconds],
            "largest_wait_ms": _ms(max(reader.waits)),
            "largest_ms_alone": _ms(max(alone.calls)),
            "p99_ms_alone": _ms(float(np.percentile(alone.calls, 99))),
            "largest_ms": _ms(max(reader.calls)),
            "p99_ms": _ms(float(np.percentile(reader.calls, 99))),
            "calls": len(reader.calls),
        }
        del served
    return results


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[2])
    size = int(sys.argv[3]) if len(sys.argv) > 3 else NUM_ROWS
    if sys.argv[1] == "prepare":
        prepare(path, size)
    else:
        print(json.dumps(measure(path, size), indent=1))
