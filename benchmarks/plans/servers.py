"""Compares predicted and measured step times of tables on parameter servers.

    python -m tf_layoutmap.local_cluster --ps 2 --workers 1 -- \
        python -m benchmarks.plans.servers

All processes run on this machine. With TF_NUM_INTRAOP_THREADS=1, an operation
uses one processor, so that two servers on two processors work like separate
machines.
"""

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from benchmarks.plans import report

tpu = tf.tpu.experimental.embedding

# Rows, columns and ids per batch of each table. No table causes most of the
# work, so that plans differ by the work of the slowest server. Messages have
# 16-bit values and Adam has two slot variables. Otherwise, the worker, whose
# time does not depend on the plan, takes most of the step.
TABLES = (
    (20_000, 128, 6_144),
    (10_000, 128, 4_096),
    (20_000, 64, 8_192),
    (20_000, 64, 4_096),
    (30_000, 32, 8_192),
    (30_000, 32, 4_096),
    (50_000, 16, 8_192),
    (20_000, 16, 8_192),
    (5_000, 128, 2_048),
    (10_000, 64, 4_096),
    (8_000, 96, 3_072),
    (15_000, 48, 4_096),
    (5_000, 32, 4_096),
    (1_000, 64, 2_048),
    (200, 64, 1_024),
    (50, 16, 1_024),
)
WIRE_DTYPE = "bfloat16"


def feature_config():
    return [
        tpu.FeatureConfig(
            tpu.TableConfig(
                rows,
                dim,
                tf.zeros_initializer(),
                combiner="sum",
                name=f"table_{index}",
            )
        )
        for index, (rows, dim, _) in enumerate(TABLES)
    ]


def batches(count):
    rng = np.random.default_rng(0)
    return [
        [
            tf.constant(rng.integers(0, rows, [ids, 1]), tf.int64)
            for rows, _, ids in TABLES
        ]
        for _ in range(count)
    ]


def main():
    options = report.parse_arguments(__doc__)
    strategy = tlm.ps.connect()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    num_servers = sum(
        "/job:ps/" in device.name
        for device in tf.config.list_logical_devices("CPU")
    )
    inputs = batches(8)
    plan = tlm.plan(
        feature_config(),
        num_servers=num_servers,
        memory="8GiB",
        optimizer=tpu.Adam(0.01),
        id_report=tlm.inspect_ids(inputs[:4], feature_config()),
        wire_dtype=WIRE_DTYPE,
    )

    def build(plan):
        with strategy.scope():
            embedding = tlm.TPUEmbedding(
                feature_config(),
                tpu.Adam(0.01),
                partitioner=plan,
                wire_dtype=WIRE_DTYPE,
            )

        @tf.function
        def step(ids):
            embedding.enqueue(ids)
            activations = embedding.dequeue()
            embedding.apply_gradients([value + 1.0 for value in activations])

        number = 0

        def run(count):
            nonlocal number
            for _ in range(count):
                coordinator.schedule(step, args=(inputs[number % len(inputs)],))
                number += 1
            coordinator.join()

        return run

    report.compare(
        f"tables on {num_servers} servers",
        plan,
        report.random_plans(plan, options.plans),
        build,
        options,
    )


if __name__ == "__main__":
    main()
