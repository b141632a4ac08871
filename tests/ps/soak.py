"""Trains for long over servers while workers die; no part of `make test`.

    python -m tests.ps.soak --minutes=30 --kill_every=60

Two servers, two workers, and a Keras model that learns planted clicks by `fit`.
A worker is killed and started again every so often. Prints the memory of each
process over time; then the held-out figures, beside those of a quiet run of as
many steps.
"""

import collections
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from absl import app, flags

from tests.ps.cluster import Cluster

_MINUTES = flags.DEFINE_float("minutes", 30.0, "How long workers die.")
_KILL_EVERY = flags.DEFINE_float(
    "kill_every", 60.0, "Seconds between two deaths.")
_REST = flags.DEFINE_float(
    "rest", 0.0, "Seconds of rest after each epoch while workers die, so that "
    "the quiet run of as many steps takes less time.")
_FEATURES, _ROWS, _DIM, _BATCH = 8, 50_000, 16, 256
_STEPS_AN_EPOCH = 200
_START_SECONDS = 180
_SAMPLE_SECONDS = 10


def batch_of(seed):
    """Skewed ids, and clicks that depend on each of them."""
    import tensorflow as tf

    draws = tf.random.stateless_uniform([_BATCH, _FEATURES + 1], seed)
    ids = tf.cast(draws[:, 1:] ** 3 * _ROWS, tf.int64)
    merit = tf.reduce_sum(tf.sin(12.9898 * tf.cast(ids % 9973, tf.float32)),
                          axis=1, keepdims=True)
    clicked = draws[:, :1] < tf.sigmoid(1.5 * merit)
    return ({f"f{one}": ids[:, one:one + 1] for one in range(_FEATURES)},
            tf.cast(clicked, tf.float32))


def training(context):
    import tensorflow as tf

    # A worker that comes back takes other batches than before.
    began = tf.cast(tf.timestamp() * 1000, tf.int64)
    return tf.data.Dataset.counter(dtype=tf.int64).map(lambda number: batch_of(
        tf.stack([began * 2 + context.input_pipeline_id, number])))


def held_out(context):
    import tensorflow as tf

    return tf.data.Dataset.range(100).shard(
        context.num_input_pipelines, context.input_pipeline_id).map(
            lambda number: batch_of(tf.stack([tf.constant(-1, tf.int64),
                                              number])))


def train(folder: pathlib.Path, num_steps: int, rest_seconds: float):
    """The coordinator: so many steps, or until there is FOLDER/stop."""
    import keras
    import tensorflow as tf

    import tf_layoutmap as tlm

    tpu = tf.tpu.experimental.embedding
    strategy = tlm.ps.connect(timeout_seconds=_START_SECONDS)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inputs = {f"f{one}": keras.Input([1], dtype="int64", name=f"f{one}")
                  for one in range(_FEATURES)}
        found = tlm.layers.TPUEmbedding(
            {name: tpu.FeatureConfig(tpu.TableConfig(
                _ROWS, _DIM, tf.initializers.RandomUniform(-0.05, 0.05),
                combiner="sum", name=name)) for name in inputs},
            tpu.Adagrad(0.5))(inputs)
        hidden = keras.layers.Dense(32, "relu")(
            keras.layers.Concatenate()([found[name] for name in inputs]))
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.BinaryCrossentropy(from_logits=True),
            metrics=[keras.metrics.AUC(from_logits=True, name="auc")])

    class Told(keras.callbacks.Callback):
        done = 0

        def on_epoch_end(self, epoch, logs=None):
            self.done += _STEPS_AN_EPOCH
            print(f"DONE {self.done} {logs['examples/s']:.0f}", flush=True)
            self.model.stop_training = (folder / "stop").exists()
            time.sleep(rest_seconds)

    told = Told()
    model.fit(tlm.ps.Datasets(training), steps_per_epoch=_STEPS_AN_EPOCH,
              epochs=(num_steps // _STEPS_AN_EPOCH) or 1 << 30, verbose=0,
              callbacks=[told])
    figures = model.evaluate(tlm.ps.Datasets(held_out), verbose=0,
                             return_dict=True)
    print("FOUND " + json.dumps({"num_steps": told.done, **figures}),
          flush=True)
    os._exit(0)  # Coordinators do not end while their workers live.


class Memory:
    """The resident memory of each process over time, in MB."""

    def __init__(self):
        self.samples = collections.defaultdict(list)
        self.began = time.monotonic()

    def take(self, cluster: Cluster):
        row = []
        for name, process in cluster.processes.items():
            try:
                lines = pathlib.Path(
                    f"/proc/{process.pid}/status").read_text().splitlines()
            except FileNotFoundError:
                continue
            rss = [int(line.split()[1]) / 1024 for line in lines
                   if line.startswith("VmRSS:")]
            if rss:
                self.samples[name].append(rss[0])
                row.append(f"{name[0]} {name[1]}: {rss[0]:.0f}")
        print(f"{time.monotonic() - self.began:6.0f} s  MB of "
              + ", ".join(row), flush=True)

    def report(self):
        for (job, index), taken in self.samples.items():
            quarter = max(1, len(taken) // 4)
            early = statistics.median(taken[quarter:2 * quarter] or taken)
            late = statistics.median(taken[-quarter:])
            print(f"{job} {index}: {early:.0f} MB in the second quarter, "
                  f"{late:.0f} in the last ({late / early - 1:+.1%})")


def run(num_steps: int | None) -> dict:
    """One training; workers die if there is no number of steps."""
    with tempfile.TemporaryDirectory() as folder, (
            Cluster(pathlib.Path(folder))) as cluster:
        rest = 0.0 if num_steps else _REST.value
        cluster.train(str(num_steps or 0), str(rest), module="tests.ps.soak")
        cluster.wait_for("DONE", _START_SECONDS)
        memory, deaths = Memory(), 0
        end = memory.began + _MINUTES.value * 60
        next_death = memory.began + _KILL_EVERY.value
        while True:
            time.sleep(_SAMPLE_SECONDS)
            memory.take(cluster)
            text = cluster.log("chief").read_text(errors="replace")
            if "FOUND " in text:
                break
            assert cluster.processes["chief", 0].poll() is None, text[-3000:]
            if num_steps is None and time.monotonic() > end:
                break
            if num_steps is None and time.monotonic() > next_death:
                cluster.restart("worker", deaths % 2, _START_SECONDS)
                deaths += 1
                next_death += _KILL_EVERY.value
        found = {**cluster.finish(_START_SECONDS), "deaths": deaths}
        memory.report()
        return found


def main(argv: list[str]):
    del argv
    killed = run(None)
    print("with deaths:", json.dumps(killed), flush=True)
    quiet = run(killed["num_steps"])
    print("quiet:", json.dumps(quiet), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2].isdecimal():
        train(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    else:
        app.run(main)
