"""Training on packed and unpacked batches is bitwise identical."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies

tpu = tf.tpu.experimental.embedding
InvalidArgument = tf.errors.InvalidArgumentError


def start(shape, dtype=tf.float32):
    size = int(np.prod(shape))
    return tf.reshape(tf.cast(tf.range(size) % 13 - 6, dtype), shape)


def feature_config(sequence=True):
    words = tpu.TableConfig(20, 4, start, combiner="mean", name="words")
    users = tpu.TableConfig(9, 3, start, combiner="sum", name="users")
    return {
        "title": tpu.FeatureConfig(words),
        "body": tpu.FeatureConfig(
            words, max_sequence_length=2 if sequence else 0
        ),
        "users": (tpu.FeatureConfig(users), tpu.FeatureConfig(users)),
    }


def batch(seed, num_samples=8):
    rng = np.random.default_rng(seed)

    def ragged(num_rows):
        sizes = rng.integers(0, 4, num_samples)
        return tf.RaggedTensor.from_row_lengths(
            rng.integers(0, num_rows, sizes.sum()), sizes
        )

    return {
        "title": ragged(20),
        "body": ragged(20),
        "users": (ragged(9), tf.constant(rng.integers(0, 9, num_samples))),
    }


def weights_of(features):
    rng = np.random.default_rng(3)
    title = features["title"]
    return {
        "title": title.with_values(
            tf.constant(rng.uniform(1, 2, title.values.shape[0]), tf.float32)
        ),
        "body": None,
        "users": (None, None),
    }


def train(embedding, features, weights=None):
    @tf.function
    def step(features, weights):
        embedding.enqueue(features, weights)
        with tf.GradientTape() as tape:
            found = embedding.dequeue()
            flat = tf.nest.flatten(found)
            tape.watch(flat)
            loss = tf.add_n([tf.reduce_sum(one * one) for one in flat])
        embedding.apply_gradients(
            tf.nest.pack_sequence_as(found, tape.gradient(loss, flat))
        )
        return found

    return step(features, weights)


def tables_of(embedding):
    return [np.asarray(one) for one in embedding.embedding_tables.values()]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_packed_batches_train_bitwise_like_unpacked(weighted, num_shards):
    partitioner = tlm.partitioners.FixedShardsPartitioner(num_shards)
    plain, packed = (
        tlm.TPUEmbedding(
            feature_config(), tpu.Adagrad(0.5), partitioner=partitioner
        )
        for _ in range(2)
    )
    for seed in range(3):
        features = batch(seed)
        weights = weights_of(features) if weighted else None
        wanted = train(plain, features, weights)
        found = train(
            packed,
            *(
                tlm.pack(features, weights)
                if weighted
                else (tlm.pack(features),)
            ),
        )
        tf.nest.map_structure(np.testing.assert_array_equal, found, wanted)
    for one, other in zip(tables_of(plain), tables_of(packed)):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("num_samples", [0, 1, 8, 300])
def test_lookups_of_packed_batches_are_bitwise_equal(
    num_samples, sequence, dtype
):
    embedding = tlm.TPUEmbedding(
        feature_config(sequence), tpu.SGD(0.5), table_dtypes=dtype
    )

    def look_up(features):
        embedding.enqueue(features, training=False)
        return embedding.dequeue()

    for seed in range(3):
        features = batch(seed, num_samples)
        for run in (look_up, tf.function(look_up)):
            tf.nest.map_structure(
                np.testing.assert_array_equal,
                run(tlm.pack(features)),
                run(features),
            )
    invalid = batch(1, 300)
    values = invalid["title"].values
    invalid["title"] = invalid["title"].with_values(
        tf.concat([values[:-1], [20]], axis=0)
    )
    with pytest.raises(InvalidArgument, match="'title'.*id 20 is outside"):
        look_up(tlm.pack(invalid))


def test_packed_batches_of_a_distributed_dataset_train_equally():
    dataset = tf.data.Dataset.from_tensor_slices(
        {
            "title": np.arange(24).reshape(12, 2) % 20,
            "body": np.arange(12) % 7,
            "users": (np.arange(12) % 9, np.arange(12) % 5),
        }
    ).batch(4)
    tables = []
    for num_replicas, change in ((1, tlm.pack), (2, tlm.pack), (2, None)):
        strategy = strategies.mirrored(num_replicas)
        with strategy.scope():
            embedding = tlm.TPUEmbedding(feature_config(), tpu.Adagrad(0.5))
            embedding.build()

        @tf.function
        def step(features, strategy=strategy, embedding=embedding):
            strategy.run(
                lambda one: train(embedding, one) and None, args=(features,)
            )

        batches = dataset.map(change) if change else dataset
        for features in strategy.experimental_distribute_dataset(batches):
            step(features)
        tables.append(tables_of(embedding))
    for other in tables[1:]:
        for one, two in zip(tables[0], other):
            np.testing.assert_array_equal(one, two)


def test_processes_gather_each_feature_separately(monkeypatch):
    embedding = tlm.TPUEmbedding(feature_config(), tpu.SGD(0.5))
    embedding.build()
    reader = embedding._state.backend._reader
    features = batch(3)
    weights = weights_of(features)
    wanted = reader.read_features(features, weights)
    monkeypatch.setattr(reader._replicas, "has_processes", True)
    for found, one in zip(
        reader.read_features(*tlm.pack(features, weights)), wanted
    ):
        np.testing.assert_array_equal(found.ids, one.ids)
        assert found.num_samples == one.num_samples
        if one.weights.shape[0]:
            np.testing.assert_array_equal(found.weights, one.weights)
        else:
            assert np.all(found.weights.numpy() == 1)


def test_packed_batches_can_be_enqueued_outside_of_replicas():
    strategy = strategies.mirrored(2)
    with strategy.scope():
        embedding = tlm.TPUEmbedding(feature_config(), tpu.SGD(0.5))
        embedding.build()
    parts = [tlm.pack(batch(seed)) for seed in range(2)]
    embedding.enqueue(
        strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        ),
        training=False,
    )
    assert embedding.stats()["pending"] == [1, 1]


def test_invalid_packed_batches_raise():
    embedding = tlm.TPUEmbedding(feature_config(), tpu.SGD(0.5))
    embedding.build()
    good = batch(1)
    other = {
        "title": good["title"],
        "texts": good["body"],
        "users": good["users"],
    }
    with pytest.raises(InvalidArgument, match="'body', 'title', 'users/0'"):
        embedding.enqueue(tlm.pack(other))
    with pytest.raises(InvalidArgument, match="'body', 'title', 'users/0'"):
        embedding.enqueue(tlm.pack({"title": good["title"]}, num_columns=20))
    with pytest.raises(ValueError, match=r"\[num_samples, 5 or more\]"):
        embedding.enqueue(tf.zeros([8, 2], tf.int64))
    with pytest.raises(ValueError, match=r"\[num_samples, 5 or more\]"):
        embedding.enqueue(tf.zeros([8], tf.int64))
    packed = tlm.pack(good)
    with pytest.raises(TypeError, match="dtype int64"):
        embedding.enqueue(tf.cast(packed, tf.int32))
    with pytest.raises(ValueError, match="that `tlm.pack` returned"):
        embedding.enqueue(packed, weights_of(good))
    with pytest.raises(InvalidArgument, match="packed from a structure"):
        embedding.enqueue(packed + 1)
    wrong = packed.numpy()
    wrong[3, 1] = 99
    with pytest.raises(InvalidArgument, match="sample 3: the numbers of ids"):
        embedding.enqueue(wrong)
    with pytest.raises(InvalidArgument, match="Packed weights must have the"):
        tf.function(
            lambda weights: embedding.enqueue(packed, weights),
            input_signature=[tf.TensorSpec(None, tf.float32)],
        )(tf.ones([2, 2]))
    with pytest.raises(InvalidArgument, match="outside table 'words'"):
        embedding.enqueue(tlm.pack({**good, "title": good["title"] + 20}))
    assert embedding.stats()["pending"] == [0]
    embedding.enqueue(packed)
    assert embedding.stats()["pending"] == [1]


def test_weights_of_a_sequence_raise():
    embedding = tlm.TPUEmbedding(feature_config(), tpu.SGD(0.5))
    embedding.build()
    features = batch(1)
    weights = {
        "title": None,
        "users": (None, None),
        "body": features["body"].with_values(
            tf.fill([features["body"].values.shape[0]], 2.0)
        ),
    }
    with pytest.raises(InvalidArgument, match="'body': a sequence feature"):
        embedding.enqueue(*tlm.pack(features, weights))


def test_packed_batches_must_have_the_built_size():
    embedding = tlm.TPUEmbedding(feature_config(), tpu.SGD(0.5))
    embedding.build(per_replica_batch_size=8)
    with pytest.raises(ValueError, match="must have 8 samples"):
        embedding.enqueue(tlm.pack(batch(1, 6)))
    embedding.enqueue(tlm.pack(batch(1)))


def test_features_with_more_dimensions_raise():
    table = tpu.TableConfig(20, 4, start, name="words")
    embedding = tlm.TPUEmbedding(
        [tpu.FeatureConfig(table, output_shape=[2, 3])], tpu.SGD(0.5)
    )
    embedding.build()
    with pytest.raises(ValueError, match="must have samples of shape"):
        embedding.enqueue(tlm.pack([tf.zeros([6], tf.int64)]))


def test_referenced_activations_do_not_change():
    embedding = tlm.TPUEmbedding(feature_config(), tpu.SGD(0.5))
    held = []
    for seed in range(6):
        found = tf.nest.flatten(train(embedding, tlm.pack(batch(seed))))
        held.append([(one, one.numpy()) for one in found])
        # Meanwhile, activations of the same and of a different size are created
        # and freed.
        train(embedding, batch(seed))
        train(embedding, batch(seed, 3))
    for step in held:
        for one, values in step:
            np.testing.assert_array_equal(one, values)


def test_memory_of_freed_activations_is_reused():
    embedding = tlm.TPUEmbedding(feature_config(), tpu.SGD(0.5))
    embedding.build()

    def look_up(num_samples=8):
        embedding.enqueue(batch(1, num_samples), training=False)
        return [memoryview(one) for one in tf.nest.flatten(embedding.dequeue())]

    def addresses(views):
        return [np.asarray(one).ctypes.data for one in views]

    first = addresses(look_up())
    assert all(address % 64 == 0 for address in first)
    assert addresses(look_up()) == first
    held = look_up()
    assert addresses(held) == first
    assert not set(addresses(look_up())) & set(first)
    del held
    assert addresses(look_up()) in (first, addresses(look_up()))
