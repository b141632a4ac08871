"""Programs with distribution strategies and configurations of the TPU API."""

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from tests.stock.of_keras import Y, dense, numbers
from tests.stock.outcome import attempts, exhaustive_program, program

tpu = tf.tpu.experimental.embedding


def mirrored():
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


@program
def steps():
    strategy = mirrored()
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
        total = tf.Variable(
            0.0,
            aggregation=tf.VariableAggregation.SUM,
            synchronization=tf.VariableSynchronization.ON_READ,
        )

    @tf.function
    def step(x):
        def replica(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * x)
            gradient = tf.distribute.get_replica_context().all_reduce(
                tf.distribute.ReduceOp.SUM, tape.gradient(loss, variable)
            )
            variable.assign_sub(0.125 * gradient)
            total.assign_add(loss)
            return loss

        return strategy.reduce(
            tf.distribute.ReduceOp.MEAN, strategy.run(replica, (x,)), axis=None
        )

    def of_dataset():
        dataset = strategy.experimental_distribute_dataset(
            tf.data.Dataset.from_tensor_slices(numbers(6, 2)).batch(4)
        )
        return [step(x) for x in dataset]

    return attempts(
        run=lambda: step(tf.constant([1.0, 2.0])),
        data=of_dataset,
        variable=lambda: strategy.experimental_local_results(variable),
        total=lambda: total.read_value(),
        assigned=lambda: variable.assign([0.0, 0.0]).values[1],
        other=lambda: keras.optimizers.SGD().build([variable]),
    )


@exhaustive_program
def models():
    def run(package):
        with mirrored().scope():
            model = dense(package)
            model.compile("adam", "mse")
        history = model.fit(numbers(8, 4), Y, batch_size=4, verbose=0).history
        return [
            float(history["loss"][0]),
            model.predict(numbers(2, 4), verbose=0),
        ]

    def outside(package):
        model = dense(package)
        with mirrored().scope():
            model.compile("adam", "mse")
        return model.fit(numbers(8, 4), Y, verbose=0).history["loss"]

    return {
        package.__name__: attempts(
            inside=lambda package=package: run(package),
            outside=lambda package=package: outside(package),
        )
        for package in (keras, tf_keras)
    }


@program
def other_strategies():
    return attempts(
        one=lambda: tf.distribute.OneDeviceStrategy("CPU:0").run(
            lambda: tf.ones([2])
        ),
        default=lambda: tf.distribute.get_strategy().num_replicas_in_sync,
        devices=lambda: tf.distribute.MirroredStrategy(["CPU:99"]),
        tpu=lambda: tf.distribute.cluster_resolver.TPUClusterResolver(tpu=""),
        servers=lambda: tf.distribute.ParameterServerStrategy(
            tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": ["localhost:1"]})
            )
        ),
        clones=lambda: mirrored().extended.variable_created_in_scope(
            tf.Variable(1.0)
        ),
    )


OPTIMIZERS = ("SGD", "Adagrad", "Adam", "FTRL", "AdagradMomentum")


def config(optimizer=None):
    return tpu.FeatureConfig(
        tpu.TableConfig(8, 4, tf.ones_initializer(), optimizer, name="words"),
        name="word",
    )


@program
def tpu_configuration():
    return attempts(
        **{
            name: lambda name=name: repr(getattr(tpu, name)(0.1))
            for name in OPTIMIZERS
        },
        table=lambda: repr(config().table),
        dim=lambda: tpu.TableConfig(8, -1),
        combiner=lambda: tpu.TableConfig(8, 4, combiner="most"),
        initializer=lambda: tpu.TableConfig(8, 4, initializer=3),
        feature=lambda: repr(config().name),
        rate=lambda: tpu.Adam(learning_rate="a"),
        decay=lambda: tpu.SGD(0.1, weight_decay_factor=-1.0),
        slots=lambda: repr(tpu.Adam(0.1)._slot_names()),
    )


@program
def tpu_embeddings():
    def make_embedding():
        return tpu.TPUEmbedding(config(), tpu.SGD(0.1))

    def served():
        embedding = tpu.TPUEmbeddingForServing(config(), tpu.SGD(0.1))
        embedding.build([2])
        return [
            embedding.embedding_tables[config().table].shape
            if config().table in embedding.embedding_tables
            else len(embedding.embedding_tables)
        ]

    def looked_up():
        feature = config()
        table = tf.Variable(tf.reshape(tf.range(32.0), [8, 4]))
        return tpu.serving_embedding_lookup(
            tf.constant([1, 2]), None, feature, {feature.table: table}
        )

    def under(strategy):
        with strategy.scope():
            embedding = make_embedding()
            embedding.build(tf.TensorShape([2]))
            return embedding.enqueue(np.array([1, 2], np.int32))

    return attempts(
        default=make_embedding,
        served=served,
        looked_up=looked_up,
        mirrored=lambda: under(mirrored()),
        no_optimizer=lambda: tpu.TPUEmbedding(config(), None),
        wrong=lambda: tpu.TPUEmbedding(3, tpu.SGD(0.1)),
    )
