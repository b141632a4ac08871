"""Results are bitwise identical for all thread counts and instruction sets."""

import os

import pytest

from tests import forked_process
from tf_layoutmap._core import ops

PROGRAM = """
import hashlib, sys
import numpy as np
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(int(sys.argv[1]))
from tf_layoutmap._core import ops as _ops

digest = hashlib.sha256()
rng = np.random.default_rng(0)
for dim in (1, 3, 16, 67, 130):
    table = rng.uniform(-1, 1, [5001, dim]).astype(np.float32)
    # Products of these fall below the smallest normal number.
    table[::7] *= 1e-38
    shards = [tf.Variable(part) for part in np.array_split(table, 3)]
    slots = [tf.Variable(tf.fill(one.shape, 0.1)) for one in shards]
    sizes = rng.integers(0, 9, 4000)
    sizes[5] = 9000
    row_splits = np.concatenate([[0], np.cumsum(sizes)])
    ids = np.minimum(rng.zipf(1.2, row_splits[-1]), 5001) - 1
    found = _ops.find_unique_rows(
        ids, row_splits, rng.uniform(0, 1, len(ids)).astype(np.float32),
        combiner="sqrtn", num_rows=5001)
    sharding = dict(offsets=[0, 1667, 3334, 5001], placement="div")
    handles = [one.handle for one in shards]
    for _ in range(2):
        activations = _ops.lookup_rows(
            shards=handles, ids=ids, row_splits=row_splits, gains=found.gains,
            dim=dim, **sharding)
        digest.update(activations.numpy().tobytes())
        for optimizer in ("sgd", "adagrad"):
            _ops.apply_row_gradients(
                shards=handles, optimizer=optimizer, row_splits=row_splits,
                slots=([one.handle for one in slots]
                       if optimizer == "adagrad" else []),
                gradients=activations, hyperparameters=[0.01],
                **found._asdict(), **sharding)
    routed = _ops.route_ids(ids, sharding["offsets"], placement="div")
    for one in [*shards, *slots, *routed]:
        digest.update(one.numpy().tobytes())
for dim, num_features in ((16, 27), (13, 5), (70, 9)):
    features = list(rng.uniform(-1, 1, [num_features, 777, dim]).astype("f"))
    products = _ops.dot_interaction(features=features)
    gradients = _ops.dot_interaction_grad(
        features=features, gradients=products)
    for one in [products, *gradients]:
        digest.update(one.numpy().tobytes())
print(_ops.native.cpu_level(), digest.hexdigest())
"""


def run(num_threads: int, level: str) -> list[str]:
    """Returns the instruction set in use and a hash of all results."""
    done = forked_process.run_code(
        PROGRAM,
        str(num_threads),
        env={**os.environ, "TF_LAYOUTMAP_CPU_LEVEL": level},
    )
    return done.stdout.split()


@pytest.mark.slow
def test_results_do_not_depend_on_threads_or_instruction_set():
    levels = ["baseline", "avx2", "avx512"]
    levels = levels[: levels.index(ops.native.cpu_level()) + 1]
    expected = run(1, "baseline")[1]
    for num_threads, level in [
        (8, "baseline"),
        (1, levels[-1]),
        (2, levels[len(levels) // 2]),
        (8, levels[-1]),
    ]:
        assert run(num_threads, level) == [level, expected], num_threads
