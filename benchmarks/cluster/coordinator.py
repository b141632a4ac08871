"""Trains over the cluster of TF_CONFIG, or without one, as it is asked to.

    python -m benchmarks.cluster.coordinator

Reads commands, a line of JSON each, and answers each with another:

* `["open", workload, distribution, contestants]`: makes their tables, in place
  of those before;
* `["steps", contestant, count]`: takes steps; answers their milliseconds.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks import workloads
from benchmarks.cluster import contestants

_NUM_BATCHES = 8
_MIN_SHARD_BYTES = 256 << 10


class _Steps:
    """Schedules the steps of a contestant on all workers, or takes them."""

    def __init__(self, step: Callable, ids: np.ndarray, coordinator):
        def batches():
            return tf.data.Dataset.from_tensor_slices(ids).repeat()

        self._coordinator = coordinator
        self._iterator = iter(
            coordinator.create_per_worker_dataset(batches)
            if coordinator
            else batches()
        )
        self._step = tf.function(lambda iterator: step(next(iterator)))

    def run(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            if self._coordinator:
                self._coordinator.schedule(self._step, args=(self._iterator,))
            else:
                self._step(self._iterator)
        if self._coordinator:
            self._coordinator.join()
        return 1e3 * (time.perf_counter() - start)


class _Commands:
    """What a line may ask for."""

    def __init__(self):
        self._strategy = self._coordinator = None
        if "TF_CONFIG" in os.environ:
            jobs = json.loads(os.environ["TF_CONFIG"])["cluster"]
            # One for all contestants; ours would take one of its own.
            self._strategy = tlm.ps.connect(
                partitioner=tf.distribute.experimental.partitioners.MinSizePartitioner(
                    _MIN_SHARD_BYTES, len(jobs["ps"])
                )
            )
            self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
                self._strategy
            )
        self._steps: dict[str, _Steps] = {}

    def open(self, name: str, distribution: str, names: list[str]) -> None:
        workload = contestants.WORKLOADS[name]
        rng = np.random.default_rng(7)
        ids = np.stack(
            [
                [
                    workloads.draw_ids(
                        rng, distribution, workload.num_samples, rows
                    )
                    for rows in workload.num_rows
                ]
                for _ in range(_NUM_BATCHES)
            ]
        )
        self._steps.clear()
        for one in names:
            with (self._strategy or tf.distribute.get_strategy()).scope():
                made = contestants.CONTESTANTS[one](workload)
            self._steps[one] = _Steps(made.step, ids, self._coordinator)

    def steps(self, name: str, count: int) -> float:
        return self._steps[name].run(count)


def main() -> None:
    # What others print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = _Commands()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(
            json.dumps(getattr(commands, verb)(*arguments)),
            file=answers,
            flush=True,
        )
    os._exit(0)  # Coordinators do not end while their workers live.


if __name__ == "__main__":
    main()
