"""Trains the same data with the host engine and with a dense reference."""

import dataclasses

import numpy as np
import tensorflow as tf

from tests import strategies
from tests.reference import dense_reference
from tf_layoutmap.embedding import optimizers, tpu_embedding
from tf_layoutmap.partition import FixedShardsPartitioner

tpu = tf.tpu.experimental.embedding


@dataclasses.dataclass(frozen=True)
class Table:
    num_rows: int = 7
    dim: int = 2
    combiner: str = "sum"
    # An optimizer of DenseTables is ("sgd", rate) or ("adagrad", rate, initial
    # accumulator). Any other optimizer is a tuple of the name of a TPU
    # optimizer, its learning rate, and a dict of its other settings.
    optimizer: tuple = ("sgd", 0.5)

    def starting_rows(self) -> np.ndarray:
        """Returns rows of small integers. All rows are different."""
        size = self.num_rows * self.dim
        return (np.arange(size, dtype=np.float32) % 11 - 5).reshape(
            self.num_rows, self.dim
        )

    def config(self, name: str) -> tpu.TableConfig:
        kind, rate, *rest = self.optimizer
        if kind == "sgd":
            optimizer = tpu.SGD(rate)
        elif kind == "adagrad":
            optimizer = tpu.Adagrad(rate, initial_accumulator_value=rest[0])
        else:
            home = tpu if hasattr(tpu, kind) else optimizers
            optimizer = getattr(home, kind)(rate, **rest[0])
        rows = self.starting_rows()

        def initializer(shape, shard_info=None, dtype=None):
            del shape, dtype
            first = shard_info.offset[0]
            return rows[first : first + shard_info.shape[0]]

        return tpu.TableConfig(
            self.num_rows,
            self.dim,
            initializer=initializer,
            optimizer=optimizer,
            combiner=self.combiner,
            name=name,
        )


@dataclasses.dataclass(frozen=True)
class Feature:
    table: str
    max_sequence_length: int = 0
    form: str = "ragged"
    weighted: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Training data; the inputs are `bags[step][replica][feature]`."""

    tables: dict
    features: dict
    bags: list
    num_shards: int = 1
    compiled: bool = True
    enqueue_inside: bool = True

    @property
    def num_replicas(self) -> int:
        return len(self.bags[0])


def random_plan(
    rng: np.random.Generator,
    *,
    tables,
    features,
    num_replicas,
    num_steps=3,
    num_samples=4,
    **options,
) -> Plan:
    """Draws bags of 0 to 4 ids, many of which are repeated."""

    def bag(feature):
        num_rows = tables[feature.table].num_rows
        # All samples of a dense input have the same number of ids.
        sizes = (
            np.full(num_samples, 3)
            if feature.form == "dense"
            else rng.integers(0, 5, num_samples)
        )
        ids = [rng.integers(0, num_rows, size).tolist() for size in sizes]
        weights = (
            [rng.integers(1, 4, size).astype(float).tolist() for size in sizes]
            if feature.weighted
            else None
        )
        return dense_reference.Bag(ids, weights)

    return Plan(
        tables,
        features,
        [
            [
                {name: bag(one) for name, one in features.items()}
                for _ in range(num_replicas)
            ]
            for _ in range(num_steps)
        ],
        **options,
    )


def inputs_of(bag: dense_reference.Bag, feature: Feature):
    """Returns ids and weights (or None) in the input type of the feature."""
    if feature.form == "dense":
        return tf.constant(bag.ids, tf.int32), None
    ids = tf.ragged.constant(bag.ids, dtype=tf.int64)
    weights = (
        None
        if bag.weights is None
        else tf.ragged.constant(bag.weights, dtype=tf.float32)
    )
    if feature.form == "sparse":
        ids = ids.to_sparse()
        weights = None if weights is None else weights.to_sparse()
    return ids, weights


def coefficients(plan: Plan, step: int, replica: int) -> dict:
    """Returns gradients of the activations, which are small integers."""
    rng = np.random.default_rng([step, replica])
    found = {}
    for name, feature in plan.features.items():
        bag = plan.bags[step][replica][name]
        positions = [feature.max_sequence_length] * (
            feature.max_sequence_length > 0
        )
        found[name] = rng.integers(
            -2,
            3,
            [len(bag.ids), *positions, plan.tables[feature.table].dim],
        ).astype(np.float32)
    return found


def matrix_of(plan: Plan, step: int, replica: int, name: str) -> np.ndarray:
    feature, bag = plan.features[name], plan.bags[step][replica][name]
    table = plan.tables[feature.table]
    if feature.max_sequence_length:
        return dense_reference.sequence_matrix(
            bag, table.num_rows, feature.max_sequence_length
        )
    return dense_reference.gain_matrix(bag, table.num_rows, table.combiner)


def train_dense(plan: Plan) -> tuple[dense_reference.DenseTables, list]:
    """Returns the trained tables and the activations by step and replica."""
    dense = dense_reference.DenseTables(
        {name: one.starting_rows() for name, one in plan.tables.items()},
        {name: one.optimizer for name, one in plan.tables.items()},
    )
    activations = []
    for step, by_replica in enumerate(plan.bags):
        terms, found = [], []
        for replica in range(len(by_replica)):
            scale = coefficients(plan, step, replica)
            matrices = {
                name: matrix_of(plan, step, replica, name)
                for name in plan.features
            }
            found.append(
                {
                    name: dense.lookup(
                        plan.features[name].table, matrix
                    ).numpy()
                    for name, matrix in matrices.items()
                }
            )
            terms += [
                (plan.features[name].table, matrix, scale[name])
                for name, matrix in matrices.items()
            ]
        dense.train(terms)
        activations.append(found)
    return dense, activations


def train_on_engine(plan: Plan):
    """Returns the embedding, its table configs and the activations."""
    strategy = strategies.mirrored(plan.num_replicas)
    configs = {name: one.config(name) for name, one in plan.tables.items()}
    with strategy.scope():
        embedding = tpu_embedding.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    configs[one.table],
                    max_sequence_length=one.max_sequence_length,
                )
                for name, one in plan.features.items()
            },
            None,
            partitioner=FixedShardsPartitioner(plan.num_shards),
        )

    def train_step(ids, weights, scale):
        if plan.enqueue_inside:
            embedding.enqueue(ids, weights)
        with tf.GradientTape() as tape:
            activations = embedding.dequeue()
            tape.watch(activations)
            loss = tf.add_n(
                [
                    tf.reduce_sum(activations[name] * scale[name])
                    for name in activations
                ]
            )
        embedding.apply_gradients(tape.gradient(loss, activations))
        return activations

    def step(ids, weights, scale):
        if not plan.enqueue_inside:
            embedding.enqueue(ids, weights)
        return strategy.run(train_step, args=(ids, weights, scale))

    if plan.compiled:
        step = tf.function(step, reduce_retracing=True)
    found = []
    for number, by_replica in enumerate(plan.bags):
        inputs = [
            {
                name: inputs_of(bag, plan.features[name])
                for name, bag in bags.items()
            }
            for bags in by_replica
        ]
        parts = [
            (
                {name: one[0] for name, one in each.items()},
                {name: one[1] for name, one in each.items()},
                {
                    name: tf.constant(one)
                    for name, one in coefficients(plan, number, replica).items()
                },
            )
            for replica, each in enumerate(inputs)
        ]
        args = [
            _distribute(strategy, [part[i] for part in parts]) for i in range(3)
        ]
        activations = step(*args)
        found.append(
            [
                {
                    name: strategy.experimental_local_results(one)[
                        replica
                    ].numpy()
                    for name, one in activations.items()
                }
                for replica in range(plan.num_replicas)
            ]
        )
    return embedding, configs, found


def _distribute(strategy, parts):
    if len(parts) == 1:
        return parts[0]
    return {
        name: None
        if parts[0][name] is None
        else strategy.experimental_distribute_values_from_function(
            lambda context, name=name: parts[context.replica_id_in_sync_group][
                name
            ]
        )
        for name in parts[0]
    }


def check_equal(plan: Plan, *, rtol: float = 0):
    """Compares the engine with the reference after training both."""
    dense, expected = train_dense(plan)
    embedding, configs, found = train_on_engine(plan)
    for wanted, got in zip(expected, found, strict=True):
        for replica, by_name in enumerate(wanted):
            for name, value in by_name.items():
                np.testing.assert_allclose(
                    got[replica][name], value, rtol=rtol, atol=10 * rtol
                )
    for name, config in configs.items():
        np.testing.assert_allclose(
            embedding.embedding_tables[config].numpy(),
            dense.tables[name].numpy(),
            rtol=rtol,
            atol=10 * rtol,
        )
        for slot, variable in embedding.slot_variables[config].items():
            assert slot == "accumulators"
            np.testing.assert_allclose(
                variable.numpy(),
                dense.accumulators[name].numpy(),
                rtol=rtol,
                atol=10 * rtol,
            )
    return embedding
