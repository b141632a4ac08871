"""Trains one program on the host, on an emulated TPU and on a Cloud TPU.

    python examples/one_program_three_runtimes.py
    python examples/one_program_three_runtimes.py --steps=500 --cores=4

The program is the function `train`, which trains a matrix factorization with
two embedding tables in a `tlm.TPUEmbedding`. Each runtime runs the program in a
separate process. The processes run at the same time and use the same batches.
Only `_connect` differs: the host needs no strategy, the emulation returns a
strategy that behaves like a `TPUStrategy`, and a Cloud TPU uses a
`TPUStrategy`. Afterwards, losses, tables and slot variables are compared bit by
bit. The Cloud TPU is skipped if the machine has no TPU. The emulation is
skipped if TensorFlow has TPU kernels, which the emulation would replace.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from absl import app, flags, logging

# TensorFlow reads this variable when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from completion.report import Report

RUNTIMES = {
    "host": "host engine",
    "emulation": "emulated TPU",
    "tpu": "Cloud TPU",
}
_STEPS = flags.DEFINE_integer("steps", 300, "Training steps.", lower_bound=2)
_CORES = flags.DEFINE_integer(
    "cores", 2, "Cores of the emulated TPU.", lower_bound=1, upper_bound=16
)
_RUNTIME = flags.DEFINE_enum(
    "runtime",
    None,
    list(RUNTIMES),
    "Train on this runtime only and write the results to --output. The program "
    "starts itself with this flag once for each runtime.",
)
_OUTPUT = flags.DEFINE_string(
    "output", None, "File for the results of --runtime."
)

NUM_USERS, NUM_ITEMS, DIM = 200, 100, 8
# The number of cores must divide the batch size: 1, 2, 4, 8 or 16 cores work.
BATCH_SIZE = 64
# Exit code of a process whose runtime this machine does not have.
_UNAVAILABLE = 3


def batches(steps: int):
    """Returns a dataset of users, items and ratings, equal in every call."""
    import tensorflow as tf

    draw = np.random.default_rng(1)
    users = draw.integers(0, NUM_USERS, (steps, BATCH_SIZE))
    items = draw.integers(0, NUM_ITEMS, (steps, BATCH_SIZE))
    tastes = draw.normal(size=(NUM_USERS, 2))
    styles = draw.normal(size=(NUM_ITEMS, 2))
    ratings = np.sum(tastes[users] * styles[items], axis=2)
    # In TensorFlow 2.21, deleting an iterator that autotunes can take a minute.
    options = tf.data.Options()
    options.autotune.enabled = False
    return (
        tf.data.Dataset.from_tensor_slices(
            (
                {"user": users.ravel(), "item": items.ravel()},
                ratings.ravel().astype(np.float32),
            )
        )
        .batch(BATCH_SIZE, drop_remainder=True)
        .with_options(options)
    )


def train(strategy, steps: int) -> dict[str, np.ndarray]:
    """Trains the same tables on any runtime.

    Args:
      strategy: Strategy of the runtime; the default strategy for the host.
      steps: Number of training steps.

    Returns:
      `"losses"`, `[steps]`, and every array of the checkpoint, by name.
    """
    import tensorflow as tf

    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    tpu.TableConfig(
                        num_rows,
                        DIM,
                        initializer=_Initializer(num_rows),
                        combiner="sum",
                        name=f"{name}s",
                    ),
                    name=name,
                )
                for name, num_rows in (("user", NUM_USERS), ("item", NUM_ITEMS))
            },
            tpu.Adagrad(0.3),
        )
    iterator = iter(
        strategy.experimental_distribute_dataset(
            batches(steps),
            options=tf.distribute.InputOptions(
                experimental_fetch_to_device=False
            ),
        )
    )

    def core(ratings):
        with tf.GradientTape() as tape:
            rows = embedding.dequeue()
            tape.watch(rows)
            # The loss of a sample does not depend on other samples, so results
            # do not depend on the number of cores that share a batch.
            predicted = tf.reduce_sum(rows["user"] * rows["item"], axis=1)
            losses = tf.square(predicted - ratings)
        embedding.apply_gradients(tape.gradient(losses, rows))
        return losses

    @tf.function
    def step(iterator):
        ids, ratings = next(iterator)
        embedding.enqueue(ids, training=True)
        return strategy.run(core, args=(ratings,))

    losses = [
        np.concatenate(
            [
                replica.numpy()
                for replica in strategy.experimental_local_results(
                    step(iterator)
                )
            ]
        ).mean()
        for _ in range(steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(embedding=embedding).write(
            f"{folder}/trained"
        )
        reader = tf.train.load_checkpoint(path)
        arrays = {
            name: reader.get_tensor(name)
            for name, dtype in reader.get_variable_to_dtype_map().items()
            if dtype == tf.float32
        }
    return {"losses": np.array(losses), **arrays}


class _Initializer:
    """Returns the same initial values on every runtime."""

    def __init__(self, num_rows: int):
        draw = np.random.default_rng(num_rows)
        self._rows = draw.normal(0, 0.3, (num_rows, DIM)).astype(np.float32)

    def __call__(self, shape, dtype=None, shard_info=None):
        del dtype
        # On a TPU, each host calls the initializer for its own shard of the
        # rows.
        start = shard_info.offset[0] if shard_info else 0
        size = shard_info.shape[0] if shard_info else shape[0]
        return self._rows[start : start + size]


def _connect(runtime: str, cores: int):
    """Returns the strategy of a runtime, or exits if the runtime is missing."""
    import tensorflow as tf

    import tf_layoutmap as tlm

    if runtime == "host":
        return tf.distribute.get_strategy()
    if runtime == "emulation":
        try:
            return tlm.emulation.enable(num_cores=cores)
        except RuntimeError as error:
            _exit_unavailable(str(error))
    if not tf.config.list_physical_devices("TPU"):
        _exit_unavailable("This machine has no TPU.")
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def _exit_unavailable(reason: str):
    print(reason.splitlines()[0], file=sys.stderr)
    sys.exit(_UNAVAILABLE)


def _run_here(runtime: str, cores: int, steps: int, output: str) -> None:
    """Trains in this process and writes the results."""
    strategy = _connect(runtime, cores)
    start = time.monotonic()
    arrays = train(strategy, steps)
    np.savez(
        output,
        seconds=time.monotonic() - start,
        replicas=strategy.num_replicas_in_sync,
        **{name.replace("/", "|"): value for name, value in arrays.items()},
    )


def _run_all(
    cores: int, steps: int
) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, str]]:
    """Runs every runtime in a separate process.

    Returns:
      The results of each available runtime, and for each missing runtime the
      reason.

    Raises:
      RuntimeError: A process failed.
    """
    results, missing = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        processes = {
            runtime: subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    f"--runtime={runtime}",
                    f"--output={folder}/{runtime}.npz",
                    f"--steps={steps}",
                    f"--cores={cores}",
                ],
                stderr=subprocess.PIPE,
                text=True,
            )
            for runtime in RUNTIMES
        }
        for runtime, process in processes.items():
            _, errors = process.communicate()
            if process.returncode == _UNAVAILABLE:
                missing[runtime] = errors.strip().splitlines()[-1]
                continue
            if process.returncode:
                raise RuntimeError(
                    f"Training on runtime {runtime!r} failed:\n{errors[-2000:]}"
                )
            with np.load(Path(folder, f"{runtime}.npz")) as arrays:
                results[runtime] = dict(arrays)
    return results, missing


def largest_difference(
    first: dict[str, np.ndarray], second: dict[str, np.ndarray]
) -> float:
    """Returns the largest difference between the values of two results.

    Raises:
      ValueError: The results do not have arrays of the same names.
    """
    names = {*first, *second} - {"seconds", "replicas"}
    if not names <= first.keys() & second.keys():
        raise ValueError(
            "Both results must have the same arrays. Received: "
            f"{sorted(first)} and {sorted(second)}."
        )
    return max(
        float(np.max(np.abs(first[name] - second[name]))) for name in names
    )


def is_bitwise_equal(
    first: dict[str, np.ndarray], second: dict[str, np.ndarray]
) -> bool:
    """Checks whether two results are bitwise identical."""
    names = {*first, *second} - {"seconds", "replicas"}
    return all(
        name in first
        and name in second
        and first[name].tobytes() == second[name].tobytes()
        for name in names
    )


def run(report: Report, *, cores: int, steps: int) -> bool:
    """Trains on all runtimes and prints a comparison.

    Returns:
      Whether the results of the host and the emulated TPU are bitwise
      identical. True if the emulation was skipped.
    """
    results, missing = _run_all(cores, steps)
    host = results["host"]
    rows = []
    for runtime, label in RUNTIMES.items():
        if runtime in missing:
            rows.append([label, "", "", "", "", missing[runtime]])
            continue
        found = results[runtime]
        rows.append(
            [
                label,
                int(found["replicas"]),
                f"{float(found['seconds']):.1f}",
                f"{found['losses'][0]:.6f}",
                f"{found['losses'][-1]:.6f}",
                "reference"
                if runtime == "host"
                else "bitwise identical"
                if is_bitwise_equal(host, found)
                else f"differ by at most {largest_difference(host, found):.1e}",
            ]
        )
    report.table(
        f"{steps} steps of matrix factorization on each runtime",
        ["runtime", "cores", "seconds", "first loss", "last loss", "numbers"],
        rows,
        numbers=["cores", "seconds", "first loss", "last loss"],
    )
    num_values = sum(
        value.size
        for name, value in host.items()
        if name not in ("seconds", "replicas")
    )
    equal = is_bitwise_equal(host, results.get("emulation", host))
    if "emulation" in results:
        report.say(
            f"The host engine and the emulated TPU agree in all {num_values:,} "
            "numbers: losses, tables and slot variables."
            if equal
            else "The host engine and the emulated TPU differ. This is a bug."
        )
    report.print_summary()
    return equal


def main(argv: list[str]) -> None:
    """Starts a process per runtime, or runs the runtime of --runtime."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    logging.set_verbosity(logging.ERROR)
    if _RUNTIME.value:
        _run_here(_RUNTIME.value, _CORES.value, _STEPS.value, _OUTPUT.value)
    elif not run(Report(), cores=_CORES.value, steps=_STEPS.value):
        sys.exit(1)


flags.register_validator(
    "cores",
    lambda cores: BATCH_SIZE % cores == 0,
    f"--cores must divide the batch size, {BATCH_SIZE}.",
)
flags.register_multi_flags_validator(
    ["runtime", "output"],
    lambda given: (given["runtime"] is None) == (given["output"] is None),
    "--runtime and --output must be passed together.",
)


if __name__ == "__main__":
    app.run(main)
