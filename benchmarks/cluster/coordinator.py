"""Program that runs the training steps of the cluster benchmark.

    python -m benchmarks.cluster.coordinator

If TF_CONFIG is set, the program is the coordinator of a cluster. If TF_CONFIG
is not set, the program trains in its own process. Each line of the standard
input is a command in JSON, and each line of the standard output is a result in
JSON:

* `["open", workload, distribution, contestants]` creates the tables of the
  contestants, and deletes the tables of the previous `open` command. By
  default, each step is scheduled as a function. The steps of a contestant such
  as `"ours:16:1"` are run by a `tlm.ps.Run` with 16 steps per closure and one
  prefetched step.
* `["steps", contestant, count]` runs `count` steps of a contestant and returns
  their duration in milliseconds.
"""

import json
import os
import sys
import tempfile
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


class _RunWithoutCheckpoints(tlm.ps.Run):
    def save(self):
        pass


class _RunSteps:
    """Runs steps of a contestant in the closures of a `tlm.ps.Run`."""

    def __init__(
        self,
        step: Callable,
        ids: np.ndarray,
        strategy,
        *,
        steps_per_closure: int,
        prefetch_steps: int = 0,
    ):
        # An earlier version of tlm.ps.Run may not have the argument.
        options = {"prefetch_steps": prefetch_steps} if prefetch_steps else {}
        self._run = _RunWithoutCheckpoints(
            strategy,
            step,
            lambda: tf.data.Dataset.from_tensor_slices(ids).repeat(),
            tempfile.mkdtemp(),
            objects={"step": tf.train.Checkpoint()},
            steps_per_closure=steps_per_closure,
            **options,
        )

    def run(self, count: int) -> float:
        start = time.perf_counter()
        self._run.steps(count)
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
        self._steps: dict[str, _Steps | _RunSteps] = {}

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
        for name in names:
            contestant, *options = name.split(":")
            with (self._strategy or tf.distribute.get_strategy()).scope():
                made = contestants.CONTESTANTS[contestant](workload)
            batches = ids
            if hasattr(made, "prepare"):
                batches = np.stack([made.prepare(batch) for batch in ids])
            if not options:
                self._steps[name] = _Steps(
                    made.step, batches, self._coordinator
                )
                continue
            steps_per_closure, prefetch_steps = map(int, options)
            self._steps[name] = _RunSteps(
                made.step,
                batches,
                self._strategy,
                steps_per_closure=steps_per_closure,
                prefetch_steps=prefetch_steps,
            )

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
