"""Measures training steps of layers with open vocabularies.

Each table has 100,000 keys and 16 columns. Each step trains 1,024 known keys
with `apply_gradients` of tf_keras. Contestants:

* `tlm`: `tlm.layers.tf_keras.ShardedEmbedding` with an open vocabulary.
* `dynamic`: `tf_keras.layers.experimental.DynamicEmbedding`, which compares
  each key with the full vocabulary.
* `hashing`: `tf_keras.layers.Hashing` and `Embedding`, so that several keys can
  share a row.
* `torchrec`: TorchRec's managed collision and a sparse `torch.nn.Embedding`, in
  a separate process, if `--torchrec_python` is set.

The contestants `dynamic` and `hashing` use the Adagrad optimizer of tf_keras,
and `torchrec` uses the Adagrad optimizer of PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import rich.table
import tensorflow as tf
from absl import flags

import tf_layoutmap as tlm
from benchmarks import timing, workloads
from benchmarks.peers.process import Peer

_TORCHREC = flags.DEFINE_string(
    "torchrec_python",
    None,
    "Python interpreter with torch and torchrec, to compare open vocabularies. "
    "By default, TorchRec is not measured.",
)

NUM_KEYS = 100_000
DIM = 16
NUM_IDS = 1024
LEARNING_RATE = 0.05


def _layers() -> dict[str, tuple]:
    """Returns the layers, which look up the rows of keys, by contestant."""
    import tf_keras

    hashed = tf_keras.Sequential(
        [
            tf_keras.layers.Hashing(NUM_KEYS),
            tf_keras.layers.Embedding(NUM_KEYS, DIM),
        ]
    )
    return {
        "tlm": tlm.layers.tf_keras.ShardedEmbedding(
            # The capacity is 4/3 of the number of keys, so that the load of the
            # vocabulary is 3/4.
            tlm.vocabulary.OpenVocabulary(int(NUM_KEYS / 0.75)),
            DIM,
            optimizer=tf.tpu.experimental.embedding.Adagrad(LEARNING_RATE),
        ),
        "dynamic": tf_keras.layers.experimental.DynamicEmbedding(
            NUM_KEYS, DIM, initial_vocabulary=tf.range(NUM_KEYS, dtype=tf.int64)
        ),
        "hashing": hashed,
    }


def _step_of(layer) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    import tf_keras

    optimizer = tf_keras.optimizers.Adagrad(LEARNING_RATE)

    @tf.function(reduce_retracing=True)
    def step(keys: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys) * factors)
        weights = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    return step


def measure(distribution: str, rounds: int) -> dict[str, np.ndarray]:
    """Returns the milliseconds of steps, by contestant."""
    rng = np.random.default_rng(5)
    factors = tf.constant(rng.standard_normal([NUM_IDS, DIM]), tf.float32)
    batches = [
        tf.constant(
            workloads.draw_ids(rng, distribution, NUM_IDS, NUM_KEYS).astype(
                np.int64
            )
        )
        for _ in range(4)
    ]
    layers = _layers()
    layers["tlm"].build(None)
    with tf.GradientTape():
        layers["tlm"](tf.range(NUM_KEYS, dtype=tf.int64))
    layers["tlm"].embedding.reset()
    steps = {name: _step_of(layer) for name, layer in layers.items()}
    contestants = {
        name: lambda i, step=step: step(
            batches[i % len(batches)], factors
        ).numpy()
        for name, step in steps.items()
    }
    if _TORCHREC.value is None:
        return timing.interleave(contestants, rounds)
    peer = Peer(_TORCHREC.value, "benchmarks.peers.torchrec_keys")
    try:
        peer.ask("open", distribution, [NUM_KEYS, DIM, NUM_IDS, len(batches)])
        contestants["torchrec"] = lambda i: peer.call("train", i % len(batches))
        return timing.interleave(contestants, rounds)
    finally:
        peer.close()


def report(distribution: str, rounds: int) -> tuple[rich.table.Table, dict]:
    """Runs the benchmark and returns a table of medians and ratios."""
    median = {
        name: float(np.median(values))
        for name, values in measure(distribution, rounds).items()
    }
    table = rich.table.Table(
        title=f"A step with {NUM_IDS:,} known keys, {distribution}, of "
        f"{NUM_KEYS:,} x {DIM}, Adagrad, tf_keras"
    )
    for column in ("", "step", "/ tlm"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in (
        ("tlm", "ShardedEmbedding, open vocabulary"),
        ("dynamic", "DynamicEmbedding"),
        ("hashing", "Hashing + Embedding"),
        ("torchrec", "TorchRec, managed collision"),
    ):
        if name in median:
            table.add_row(
                label,
                f"{median[name]:.1f} ms",
                f"{median[name] / median['tlm']:.1f}",
            )
    return table, median
