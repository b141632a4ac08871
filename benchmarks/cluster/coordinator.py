"""Program that runs the training steps of the cluster benchmark.

    python -m benchmarks.cluster.coordinator

If TF_CONFIG is set, the program is the coordinator of a cluster. If TF_CONFIG
is not set, the program trains in its own process. Each line of the standard
input is a command in JSON, and each line of the standard output is a result in
JSON:

* `["open", workload, distribution, contestants]` creates the tables of the
  contestants, and deletes the tables of the previous `open` command.
* `["steps", contestant, count]` runs `count` steps of a contestant and returns
  their duration in milliseconds.
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
    """Runs steps of a contestant, on all workers if there is a cluster."""

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
    """Runs commands; each public method implements the command of its name."""

    def __init__(self):
        self._strategy = self._coordinator = None
        if "TF_CONFIG" in os.environ:
            jobs = json.loads(os.environ["TF_CONFIG"])["cluster"]
            # All contestants use the same partitioner.
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
            batches = ids
            if hasattr(made, "prepare"):
                batches = np.stack([made.prepare(batch) for batch in ids])
            self._steps[one] = _Steps(made.step, batches, self._coordinator)

    def steps(self, name: str, count: int) -> float:
        return self._steps[name].run(count)


def main() -> None:
    # The original standard output is reserved for results. All other output of
    # this process goes to standard error.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = _Commands()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(
            json.dumps(getattr(commands, verb)(*arguments)),
            file=results,
            flush=True,
        )
    # A normal exit of a coordinator would wait for its workers.
    os._exit(0)


if __name__ == "__main__":
    main()
