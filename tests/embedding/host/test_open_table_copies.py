"""Tests open tables with several replicas, in checkpoints and in exports."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import forked_process, strategies
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap.vocabulary import stock_find

tpu = tf.tpu.experimental.embedding


def contents(embedding) -> dict[str, np.ndarray]:
    return {
        name: cases.rows_of(variable)
        for name, variable in embedding._variables["words"].items()
    }


def same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def settings():
    return tlm.vocabulary.OpenVocabulary(
        100, admission="count", min_count=2, evict="lfu", half_life_steps=2
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
def test_replicas_train_the_tables_of_one_replica(
    num_replicas, inside, pipelined
):
    num_per_replica = 6

    def train(strategy, in_step):
        rng = np.random.default_rng(3)
        with strategy.scope():
            embedding, _ = cases.embedding(
                settings(),
                tpu.Adagrad(0.1),
                features=("ids", "others"),
                num_shards=2,
                pipeline_execution_with_tensor_core=pipelined,
            )
        embedding.build()
        count = strategy.num_replicas_in_sync
        size = num_per_replica * num_replicas // count

        @tf.function
        def step(batches):
            def of_replica(batch):
                if in_step:
                    embedding.enqueue(batch)
                found = embedding.dequeue()
                embedding.apply_gradients(
                    {name: value * 0.5 + 0.125 for name, value in found.items()}
                )

            if not in_step:
                embedding.enqueue(batches)
            strategy.run(of_replica, (batches,))

        for _ in range(12):
            keys = rng.zipf(1.4, [2, num_per_replica * num_replicas]) % 300
            parts = [
                {
                    "ids": tf.constant(keys[0, i : i + size]),
                    "others": tf.constant(keys[1, i : i + size]),
                }
                for i in range(0, keys.shape[1], size)
            ]
            step(
                strategy.experimental_distribute_values_from_function(
                    lambda context, parts=parts: parts[
                        context.replica_id_in_sync_group
                    ]
                )
            )
        embedding.flush()
        return contents(embedding)

    same(
        train(strategies.mirrored(num_replicas), inside),
        train(strategies.mirrored(1), True),
    )


def test_enqueue_for_one_device_raises():
    with strategies.mirrored(2).scope():
        embedding, _ = cases.embedding(settings(), tpu.SGD(0.1))
    with pytest.raises(ValueError, match="`device` must be None if tables"):
        embedding.enqueue({"ids": tf.constant([1])}, device="/device:CPU:1")


def trained(num_shards, **arguments):
    rng = np.random.default_rng(4)
    embedding, config = cases.embedding(
        settings(), tpu.Adagrad(0.1), num_shards=num_shards, **arguments
    )
    train(embedding, rng, 10)
    return embedding, config


def train(embedding, rng, num_steps):
    for _ in range(num_steps):
        embedding.enqueue({"ids": tf.constant(rng.zipf(1.4, 40) % 300)})
        found = embedding.dequeue()["ids"]
        embedding.apply_gradients({"ids": found * 0.5 + 0.125})


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_a_checkpoint_continues_with_any_number_of_shards(tmp_path, num_shards):
    embedding, _ = trained(3)
    path = tf.train.Checkpoint(embedding=embedding).save(tmp_path / "saved")
    restored, _ = cases.embedding(
        settings(), tpu.Adagrad(0.1), num_shards=num_shards
    )
    # Without `build`, the restore is deferred until the variables exist.
    if num_shards != 2:
        restored.build()
    tf.train.Checkpoint(embedding=restored).restore(path)
    for one in (embedding, restored):
        train(one, np.random.default_rng(5), 8)
    same(contents(restored), contents(embedding))
    assert (
        restored.vocabularies["words"].stats()
        == embedding.vocabularies["words"].stats()
    )


def test_checkpoints_that_do_not_match_raise(tmp_path):
    embedding, config = trained(1)
    path = tf.train.Checkpoint(embedding=embedding).save(tmp_path / "open")
    closed = tlm.TPUEmbedding(
        {
            "ids": tpu.FeatureConfig(
                tpu.TableConfig(settings().num_rows, config.dim, name="words")
            )
        },
        tpu.Adagrad(0.1),
    )
    closed.build()
    before = contents(closed)
    with pytest.raises(
        ValueError,
        match=(
            "Table 'words' with ids that are row indices must be restored from "
            "a table with ids that are row indices. Received: a table with an "
        ),
    ):
        tf.train.Checkpoint(embedding=closed).restore(path)
    same(contents(closed), before)
    path = tf.train.Checkpoint(embedding=closed).save(tmp_path / "closed")
    before = contents(embedding)
    with pytest.raises(ValueError, match="Received: a table with ids that are"):
        tf.train.Checkpoint(embedding=embedding).restore(path)
    embedding.enqueue({"ids": tf.constant([1])})
    with pytest.raises(RuntimeError, match="while steps are in flight"):
        tf.train.Checkpoint(embedding=embedding).restore(path)
    embedding.reset()
    other, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(300), tpu.Adagrad(0.1)
    )
    other.build()
    path = tf.train.Checkpoint(embedding=other).save(tmp_path / "other")
    with pytest.raises(
        ValueError,
        match=(
            r"Table 'words' with space for \d+ keys must .* Received: a table "
            r"with space for \d+ keys .*tlm.vocabulary.convert\("
        ),
    ):
        tf.train.Checkpoint(embedding=embedding).restore(path)


def test_a_deferred_restore_raises_the_same_error(
    tmp_path,
):
    saved, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8), tpu.Adagrad(0.1)
    )
    saved.build()
    path = tf.train.Checkpoint(embedding=saved).save(tmp_path / "small")
    larger, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(300), tpu.Adagrad(0.1)
    )
    tf.train.Checkpoint(embedding=larger).restore(path)
    with pytest.raises(
        ValueError,
        match=(
            "Received: a table with space for 8 keys .*tlm.vocabulary.convert"
        ),
    ):
        larger.build()
    same_size, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(8), tpu.Adagrad(0.1)
    )
    status = tf.train.Checkpoint(embedding=same_size).restore(path)
    same_size.build()
    status.assert_consumed()


@pytest.mark.parametrize("capacity", [5, 40, 100, 5000])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_stock_ops_find_the_same_rows_as_the_core(capacity, num_shards):
    rng = np.random.default_rng(capacity)
    embedding, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(capacity),
        tpu.SGD(0.1),
        num_shards=num_shards,
    )
    known = rng.integers(-(2**63) + 1, 2**63 - 1, capacity)
    embedding.enqueue({"ids": tf.constant(known)})
    vocabulary = embedding.vocabularies["words"]
    keys = np.concatenate(
        [known, rng.integers(-(2**63), 2**63 - 1, capacity), [-(2**63), 0, -1]]
    )
    rows = vocabulary.lookup(keys).numpy()
    assert (rows[:capacity] >= 0).mean() > 0.9
    assert (rows[capacity:] < 0).all()
    buckets = vocabulary.settings.num_buckets
    for found in (
        vocabulary.rows_of_keys(tf.constant(keys)),
        tf.function(vocabulary.rows_of_keys)(tf.constant(keys)),
        stock_find.find_rows(
            tf.convert_to_tensor(vocabulary.key_variable),
            buckets,
            tf.constant(keys),
        ),
    ):
        assert (found.numpy() == np.where(rows < 0, 8 * buckets, rows)).all()


class Served(tf.Module):
    """Module with one open table and a lookup signature."""

    def __init__(self, embedding, dtype):
        self.embedding = embedding
        self.serve = tf.function(
            lambda ids: embedding({"ids": ids}),
            input_signature=[tf.TensorSpec([None], dtype)],
        )


PROGRAM = """
import sys
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
found = model.signatures["serving_default"](
    tf.constant(np.load(sys.argv[1] + "/ids.npy", allow_pickle=True).tolist()))
np.save(sys.argv[1] + "/found.npy", found["ids"])
assert "tf_layoutmap" not in sys.modules
"""


@pytest.mark.parametrize("kind", ["integers", "strings"])
def test_an_exported_model_serves_without_this_package(tmp_path, kind):
    embedding, _ = cases.embedding(
        tlm.vocabulary.OpenVocabulary(6000), tpu.SGD(0.1), num_shards=2
    )
    ids = np.arange(10_000) * 7919 - 20_000
    if kind == "strings":
        ids = ids.astype(str).astype(object)
    embedding.enqueue({"ids": tf.constant(ids[::2].tolist())})
    embedding.dequeue()
    embedding.apply_gradients({"ids": tf.ones([5000, 3])})
    model = Served(embedding, tf.string if kind == "strings" else tf.int64)
    path = str(tmp_path / "model")
    tf.saved_model.save(model, path, signatures=model.serve)
    np.save(path + "/ids.npy", ids)
    forked_process.run_code(
        PROGRAM.replace("tolist())", "tolist(), tf.int64)")
        if kind == "integers"
        else PROGRAM,
        path,
        cwd=tmp_path,
    )
    found = np.load(path + "/found.npy")
    embedding.enqueue({"ids": tf.constant(ids.tolist())}, training=False)
    assert (found == embedding.dequeue()["ids"].numpy()).all()
    assert (found[1::2] == 0).all() and (found[::2] != 0).any(1).mean() > 0.98
