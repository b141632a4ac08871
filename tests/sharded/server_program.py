"""Tables on two parameter servers; started by test_parameter_servers.py.

    python -m tests.sharded.server_program [CASE ...]

The servers and the worker are threads of this process. The program prints one
line of JSON with the result or the error of each case. By default, it runs
`CASES`.
"""

import functools
import importlib
import json
import os
import sys

# With this setting, the worker waits for servers that start later.
os.environ["GRPC_FAIL_FAST"] = "use_caller"

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests import initial_values
from tf_layoutmap._core import tf_private
from tf_layoutmap.local_cluster import free_ports
from tf_layoutmap.sharded import initial_value

ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)
tpu = tf.tpu.experimental.embedding


def cluster(num_servers=2):
    ports = [f"localhost:{port}" for port in free_ports(num_servers + 2)]
    spec = tf.train.ClusterSpec(
        {"ps": ports[:num_servers], "worker": ports[-2:-1], "chief": ports[-1:]}
    )
    servers = [
        tf.distribute.Server(spec, job_name=job, task_index=index)
        for job, index in [
            *(("ps", number) for number in range(num_servers)),
            ("worker", 0),
        ]
    ]
    return servers, tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, rpc_layer="grpc"
    )


def places(variables):
    return [one.device.split("/")[3] for one in variables]


def table_as_asked(strategy, coordinator):
    with strategy.scope():
        table = tlm.ShardedVariable.create(ROWS, num_shards=3)
    return places(table.variables), table.numpy().tolist()


def table_as_the_strategy_divides(strategy, coordinator):
    with strategy.scope():
        table = tlm.ShardedVariable.create(
            tf.ones_initializer(), [6, 2], tf.float32
        )
        other = tf.Variable(tf.zeros([6, 2]))
    # The strategy must still partition variables that are created afterwards.
    return places(table.variables), places(other.variables)


def first_values(strategy, coordinator):
    """Compares initial values, and records which devices drew them."""
    del coordinator
    devices = []
    of_shard = initial_value.of_shard

    def record_device(*arguments):
        devices.append("ps" in tf_private.current_device())
        return of_shard(*arguments)

    def table_values(initializer):
        tf.random.set_seed(3)
        return tlm.ShardedVariable.create(
            initializer, [6, 2], num_shards=3
        ).numpy()

    def make_with_layer(kind):
        one = tlm.layers if kind == "keras" else tlm.layers.tf_keras
        one = one.ShardedEmbedding(
            6,
            2,
            num_shards=3,
            name="words",
            embeddings_initializer=importlib.import_module(
                kind
            ).initializers.RandomNormal(seed=7),
        )
        one.build(())
        return one.embeddings.numpy()

    found = {}
    initial_value.of_shard = record_device
    for name, make in {
        "normal": lambda: table_values(tf.random_normal_initializer()),
        "seeded": lambda: table_values(tf.random_uniform_initializer(seed=5)),
        "own": lambda: table_values(lambda shape: ROWS[: shape[0]]),
        **{
            kind: functools.partial(make_with_layer, kind)
            for kind in ("keras", "tf_keras")
        },
    }.items():
        expected = make()
        del devices[:]
        with strategy.scope():
            found[name] = [bool((make() == expected).all()), list(devices)]
    initial_value.of_shard = of_shard
    return found


def all_initializers(strategy, coordinator):
    """Returns the combinations whose values on the servers differ."""
    del coordinator
    wrong = {}
    for case in initial_values.cases():
        with strategy.scope():
            # TensorFlow draws four float32 or two float64 numbers at a time.
            found = initial_values.in_shards(
                case, ["2-D"], ["float32", "float64"], [3]
            )
        if found:
            wrong[f"{case.library} {case.name}"] = found
    return wrong


def trained_table(strategy, coordinator):
    with strategy.scope():
        table = tlm.ShardedVariable.create(ROWS, num_shards=2)
    return scheduled_step(strategy, coordinator, table), (
        table.numpy().tolist()
    )


def scheduled_step(strategy, coordinator, table):
    @tf.function
    def step():
        def replica():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [0, 5, 5]))
            table.scatter_sub(tape.gradient(loss, table))
            return loss

        return strategy.run(replica)

    found = coordinator.schedule(step)
    coordinator.join()
    return float(found.fetch())


def layer(module, strategy, optimizer=None):
    with strategy.scope():
        embedding_layer = module.ShardedEmbedding(
            6,
            2,
            num_shards=2,
            optimizer=optimizer,
            name="words",
            embeddings_initializer="ones",
        )
        embedding_layer.build(())
    return embedding_layer


def trained_layer(module, strategy, coordinator):
    embedding_layer = layer(module, strategy)
    return (
        places(embedding_layer.embeddings.variables),
        scheduled_step(strategy, coordinator, embedding_layer.embeddings),
        embedding_layer(tf.constant([0, 1, 5])).numpy().tolist(),
    )


def keras_layer(strategy, coordinator):
    return trained_layer(tlm.layers, strategy, coordinator)


def tf_keras_layer(strategy, coordinator):
    return trained_layer(tlm.layers.tf_keras, strategy, coordinator)


def keras_layer_that_trains_itself(strategy, coordinator):
    return places(layer(tlm.layers, strategy, "adagrad").embeddings.variables)


def tf_keras_layer_that_trains_itself(strategy, coordinator):
    return places(
        layer(tlm.layers.tf_keras, strategy, "adagrad").embeddings.variables
    )


def embedding_from_outside(strategy, coordinator):
    embedding = tlm.TPUEmbedding(
        {"a": tpu.FeatureConfig(tpu.TableConfig(6, 2))}, tpu.SGD(0.1)
    )
    embedding.build()

    @tf.function
    def step():
        embedding.enqueue({"a": tf.constant([1, 2])}, training=False)
        return tf.reduce_sum(embedding.dequeue()["a"])

    coordinator.schedule(step)
    coordinator.join()


CASES = [
    table_as_asked,
    table_as_the_strategy_divides,
    trained_table,
    first_values,
    keras_layer,
    tf_keras_layer,
    keras_layer_that_trains_itself,
    tf_keras_layer_that_trains_itself,
    embedding_from_outside,
]


def main():
    servers, resolver = cluster()
    strategy = tf.distribute.ParameterServerStrategy(
        resolver,
        variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(
            2
        ),
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    found = {}
    for case in [globals()[name] for name in sys.argv[1:]] or CASES:
        try:
            found[case.__name__] = case(strategy, coordinator)
        except Exception as error:
            found[case.__name__] = f"{type(error).__name__}: {error}"
    print("FOUND " + json.dumps(found), flush=True)
    # The servers run in threads that never end, so the process exits here.
    del servers
    os._exit(0)


if __name__ == "__main__":
    main()
