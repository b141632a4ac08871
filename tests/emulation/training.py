"""Trains the same batches on the host engine and on an emulated TPU."""

import dataclasses
import functools
import tempfile

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

CLASSES = {"stock": tpu.TPUEmbedding, "ours": tlm.TPUEmbedding}

NUM_SAMPLES = 8  # Number of samples in a global batch.
LENGTH = 3
# Each value contains the combiner, the number of rows and the dim. `ads` and
# `words` have more rows than a CPU register has elements. No number of rows is
# divisible by the number of hosts.
TABLES = {
    "ads": ("sum", 23, 5),
    "words": ("mean", 17, 4),
    "few": ("sqrtn", 3, 2),
}
# Each value contains the table, the input type, whether the feature has
# weights, and the maximum sequence length.
FEATURES = {
    "clicked": ("ads", "sparse", True, 0),
    "shown": ("ads", "ragged", False, 0),
    "country": ("ads", "dense", False, 0),
    "text": ("words", "ragged", True, 0),
    "title": ("words", "ragged", False, LENGTH),
    "path": ("words", "gappy", False, LENGTH),
    "device": ("few", "ragged", True, 0),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """Inputs of one replica in one step, by feature."""

    ids: dict
    weights: dict
    scale: dict  # Gradient of each activation.


def rows_of(name: str) -> np.ndarray:
    _, num_rows, dim = TABLES[name]
    rng = np.random.default_rng([num_rows, dim])
    return rng.normal(size=(num_rows, dim)).astype(np.float32)


def _initializer_of(name: str):
    def initializer(shape, dtype=None, shard_info=None):
        del dtype
        first = shard_info.offset[0] if shard_info else 0
        size = shard_info.shape[0] if shard_info else shape[0]
        return tf.constant(rows_of(name)[first : first + size])

    return initializer


def feature_config(optimizer):
    """Returns the feature configs; calls `optimizer` once for each table."""
    tables = {}
    for name, (combiner, num_rows, dim) in TABLES.items():
        tables[name] = tpu.TableConfig(
            num_rows,
            dim,
            initializer=_initializer_of(name),
            optimizer=optimizer(),
            combiner=combiner,
            name=name,
        )
    return {
        name: tpu.FeatureConfig(
            tables[table], max_sequence_length=length, name=name
        )
        for name, (table, _, _, length) in FEATURES.items()
    }


def parts_of(seed: int, step: int, num_parts: int) -> list[Part]:
    """Returns the global batch of a step, split over the replicas."""
    rng = np.random.default_rng([seed, step])
    size = NUM_SAMPLES // num_parts
    columns = {name: _column(rng, *one) for name, one in FEATURES.items()}
    return [
        Part(
            *(
                {
                    name: make(*column, slice(part * size, (part + 1) * size))
                    for name, column in columns.items()
                }
                for make in (_ids, _weights, _scale)
            )
        )
        for part in range(num_parts)
    ]


def _column(rng, table, form, weighted, length):
    _, num_rows, dim = TABLES[table]
    sizes = (
        np.ones(NUM_SAMPLES, int)
        if form == "dense"
        else rng.integers(0, 6, NUM_SAMPLES)
    )
    ids = [rng.integers(0, num_rows, size) for size in sizes]
    weights = [rng.uniform(0.5, 2, size) for size in sizes]
    shape = [NUM_SAMPLES, length, dim] if length else [NUM_SAMPLES, dim]
    scale = rng.normal(size=shape).astype(np.float32)
    return form, ids, weights if weighted else None, scale


def _ragged(rows, dtype):
    return tf.RaggedTensor.from_row_lengths(
        tf.constant(np.concatenate(rows), dtype), [len(row) for row in rows]
    )


def _ids(form, ids, weights, scale, part):
    del weights, scale
    if form == "dense":
        return tf.constant(np.concatenate(ids[part]), tf.int64)
    ragged = _ragged(ids[part], tf.int64)
    if form == "gappy":
        # The position of the first id differs between samples, and all ids have
        # gaps between them.
        sparse = _to_sparse(ragged)
        sample, position = tf.unstack(sparse.indices, axis=1)
        return tf.SparseTensor(
            tf.stack([sample, sample % 2 + position * 2], axis=1),
            sparse.values,
            [ragged.nrows(), 12],
        )
    return ragged if form == "ragged" else _to_sparse(ragged)


def _weights(form, ids, weights, scale, part):
    del ids, scale
    if weights is None:
        return None
    ragged = _ragged(weights[part], tf.float32)
    return ragged if form == "ragged" else _to_sparse(ragged)


def _to_sparse(ragged):
    # The inputs of all steps have the same width, which avoids retracing.
    sparse = ragged.to_sparse()
    return tf.SparseTensor(sparse.indices, sparse.values, [ragged.nrows(), 6])


def _scale(form, ids, weights, scale, part):
    del form, ids, weights
    return tf.constant(scale[part])


@functools.lru_cache(maxsize=2)
def _step_of(strategy, embedding, inside):
    """Returns a traced training step; recent steps are cached."""

    def core(ids, weights, scale):
        if inside:
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

    @tf.function(reduce_retracing=True)
    def step(ids, weights, scale):
        if not inside:
            embedding.enqueue(ids, weights)
        return strategy.run(core, args=(ids, weights, scale))

    return step


def train(strategy, embedding, *, seed=0, steps=range(4), inside=False):
    """Runs steps; returns the activations of each step, in global order."""
    step = _step_of(strategy, embedding, inside)
    found = []
    for number in steps:
        parts = parts_of(seed, number, strategy.num_replicas_in_sync)
        activations = step(
            *(
                _distribute(strategy, [getattr(part, name) for part in parts])
                for name in ("ids", "weights", "scale")
            )
        )
        found.append(
            {
                name: np.concatenate(
                    [
                        one.numpy()
                        for one in strategy.experimental_local_results(value)
                    ]
                )
                for name, value in activations.items()
            }
        )
    return found


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


def host_embedding(optimizer, num_replicas=1, **options):
    """Returns a `tlm.TPUEmbedding` that uses the host engine."""
    embedding = tlm.TPUEmbedding(feature_config(optimizer), None, **options)
    embedding.build(NUM_SAMPLES // num_replicas)
    return embedding


def tpu_embedding(kind, strategy, optimizer, *, is_built=True, **options):
    """Restarts the emulated TPU; returns an embedding of a class in CLASSES."""
    tlm.emulation.initialize_tpu_system()
    with strategy.scope():
        embedding = CLASSES[kind](feature_config(optimizer), None, **options)
        if is_built:
            embedding.build(NUM_SAMPLES // strategy.num_replicas_in_sync)
    return embedding


def values_of(embedding) -> dict:
    """Returns tables and slots by name, such as `"ads/accumulators"`."""
    with tempfile.TemporaryDirectory() as directory:
        path = tf.train.Checkpoint(it=embedding).write(directory + "/it")
        return values_in(path)


def values_in(path: str) -> dict:
    """Returns tables and slot variables in a checkpoint of an object `it`."""
    reader = tf.train.load_checkpoint(path)
    end = "/.ATTRIBUTES/VARIABLE_VALUE"
    return {
        _table_and_slot(key[len("it/") : -len(end)]): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith("it/") and key.endswith(end)
    }


def _table_and_slot(key: str) -> str:
    # An embedding has two paths to each variable, and a checkpoint can contain
    # either path: "ads.Smomenta" or "_variables/ads/momenta". A restore accepts
    # both paths.
    return (
        key.replace(".S", "/")
        .removeprefix("_variables/")
        .removesuffix("/parameters")
    )


def assert_same(got: dict, wanted: dict) -> None:
    """Checks that all values are bitwise equal."""
    assert sorted(got) == sorted(wanted)
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def mirrored(num_replicas: int) -> tf.distribute.Strategy:
    """Returns a MirroredStrategy that sums in the order of its replicas."""
    return tf.distribute.MirroredStrategy(
        [f"CPU:{replica}" for replica in range(num_replicas)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
