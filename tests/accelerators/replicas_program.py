"""Trains the tables of one program on four replicas.

    python -m tests.accelerators.replicas_program KIND [LIBRARY]

KIND is "gpus" (a MirroredStrategy of four GPUs in host memory), "host" (an
emulated TPU with tables on the host), or "tpu" (an emulated TPU with its own
tables). The program prints activations and tables as bits. Another embedding
reads a checkpoint and continues the training. Beside a TPU, its tables are in
the other place.
"""

import json
import sys
import tempfile

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.accelerators import fake_gpu

NUM_REPLICAS, BATCH, NUM_ROWS, DIM = 4, 2, 10, 3
config = tf.tpu.experimental.embedding


def strategy_of(kind, library):
    if kind != "gpus":
        return tlm.emulation.enable(num_cores=NUM_REPLICAS)
    fake_gpu.load(library, NUM_REPLICAS)
    return tf.distribute.MirroredStrategy(
        [f"GPU:{number}" for number in range(NUM_REPLICAS)],
        # The default requires NCCL.
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def initializer(shape, dtype=tf.float32):
    return tf.cast(tf.reshape(tf.range(shape[0] * shape[1]), shape), dtype)


# Kind of the tables that continue the training from a checkpoint.
CONTINUED = {"gpus": "gpus", "host": "tpu", "tpu": "host"}


def embedding_of(strategy, kind, is_pipelined):
    if kind != "gpus":
        tlm.emulation.initialize_tpu_system()
    table = config.TableConfig(
        NUM_ROWS, DIM, initializer, combiner="mean", name="words"
    )
    with strategy.scope():
        return tlm.TPUEmbedding(
            {"a": config.FeatureConfig(table)},
            config.Adagrad(0.5),
            is_pipelined,
            engine="tpu" if kind == "tpu" else "host",
        )


def train(strategy, embedding):
    """Returns the activations of four steps."""

    def replica(factor):
        found = embedding.dequeue()["a"]
        embedding.apply_gradients({"a": found * factor - 1.0})
        return found

    @tf.function
    def step(ids, factor):
        embedding.enqueue({"a": ids})
        return strategy.run(replica, (factor,))

    random = np.random.default_rng(0)
    distribute = strategy.experimental_distribute_values_from_function
    results = []
    for _ in range(4):
        ids = random.integers(0, NUM_ROWS, [NUM_REPLICAS, BATCH])
        found = step(
            distribute(
                lambda context: tf.constant(
                    ids[context.replica_id_in_sync_group]
                )
            ),
            tf.constant(0.5),
        )
        results += strategy.experimental_local_results(found)
    return results


def run(strategy, kind, is_pipelined):
    embedding = embedding_of(strategy, kind, is_pipelined)
    found = train(strategy, embedding)
    # A checkpoint contains the rows of all kinds of tables.
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(it=embedding).write(f"{folder}/tables")
        reader = tf.train.load_checkpoint(path)
        tables = [
            reader.get_tensor(name)
            for name in sorted(reader.get_variable_to_shape_map())
            if name.startswith("it/")
        ]
        other = embedding_of(strategy, CONTINUED[kind], is_pipelined)
        other.build(per_replica_batch_size=BATCH)
        tf.train.Checkpoint(it=other).read(path).assert_consumed()
        found += train(strategy, other)
    return [np.asarray(one).tobytes().hex() for one in [*found, *tables]]


def main():
    kind, *library = sys.argv[1:]
    strategy = strategy_of(kind, *library or [None])
    found = {
        str(is_pipelined): run(strategy, kind, is_pipelined)
        for is_pipelined in (False, True)
    }
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
