"""Contains one regression test for each bug of an earlier implementation."""

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm

tpu = tf.tpu.experimental.embedding

ROWS = np.arange(20, dtype=np.float32).reshape(10, 2)


def embedding_of(combiner="sum", *, table=None, num_shards=1):
    table = table or tpu.TableConfig(
        10,
        2,
        lambda shape: tf.constant(ROWS[: shape[0]]),
        combiner=combiner,
        name="words",
    )
    return tlm.TPUEmbedding(
        {"x": tpu.FeatureConfig(table)},
        tpu.SGD(0.5),
        partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
    )


def served(value, combiner="sum", weights=None):
    embedding = embedding_of(combiner)
    return embedding({"x": value}, weights and {"x": weights})["x"]


def test_sqrtn_of_ragged_ids_divides_when_serving():
    found = served(tf.ragged.constant([[1, 2, 3, 4]]), "sqrtn")
    assert tf.is_tensor(found)
    np.testing.assert_allclose(found, [[20 / 2, 24 / 2]], rtol=1e-6)


def test_mean_of_an_empty_ragged_sample_is_zero():
    found = served(tf.ragged.constant([[1], []]), "mean")
    assert found.numpy().tolist() == [[2, 3], [0, 0]]


PRINT_ORDER = """
import tensorflow as tf
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding import inputs
tpu = tf.tpu.experimental.embedding
tables = [tpu.TableConfig(4, 2, name=f"t{i}") for i in range(12)]
spec, _ = config.read_feature_config(inputs.flatten_with_paths(
    [tpu.FeatureConfig(one) for one in tables]), tpu.SGD(0.1))
print([one.name for one in spec.tables])
"""


@pytest.mark.exhaustive
@pytest.mark.slow
def test_tables_have_the_same_order_in_every_process():
    orders = {
        subprocess.run(
            [sys.executable, "-c", PRINT_ORDER],
            text=True,
            check=True,
            capture_output=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert orders == {str([f"t{i}" for i in range(12)]) + "\n"}


def test_ids_beyond_32_bits_raise_instead_of_wrapping():
    for call in (lambda ids: embedding_of().enqueue({"x": ids}), served):
        with pytest.raises(tf.errors.InvalidArgumentError, match="'x'"):
            call(np.array([2**33 + 5]))


def test_an_export_contains_the_rows_of_every_shard(tmp_path):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.embedding = embedding_of(
                num_shards=3,
                table=tpu.TableConfig(
                    10,
                    2,
                    tf.random_normal_initializer(seed=1),
                    combiner="sum",
                    name="words",
                ),
            )

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def serve(self, ids):
            return self.embedding({"x": ids})["x"]

    model = Model()
    ids = tf.range(10, dtype=tf.int64)
    wanted = model.serve(ids).numpy()
    assert len(np.unique(wanted)) == 20
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded.serve(ids), wanted)


def test_configs_are_not_modified():
    table = tpu.TableConfig(10, 2, combiner="sum")
    feature = tpu.FeatureConfig(table)
    first = tlm.TPUEmbedding(feature, tpu.SGD(0.5))
    second = tlm.TPUEmbedding(feature, tpu.Adam(0.5))
    assert (table.name, table.optimizer) == (None, None)
    assert set(first.slot_variables[table]) == set()
    assert set(second.slot_variables[table]) == {"momenta", "velocities"}


def test_serving_a_dense_column_matches_training():
    embedding = embedding_of()
    ids = {"x": tf.constant([[1], [2]])}
    embedding.enqueue(ids, training=False)
    trained = embedding.dequeue()["x"]
    assert trained.shape == embedding(ids)["x"].shape == [2, 2]


def test_names_that_tensorflow_moved_are_not_imported():
    # Importing tf_private asserts that each private name exists.
    from tf_layoutmap._core import tf_private

    source = inspect.getsource(tf_private)
    for removed in (
        "distribution_strategy_context",
        "saveable_hook",
        "training.tracking",
        'tpu.tpu", "outside_compilation',
    ):
        assert removed not in source


def test_docstrings_name_existing_arguments():
    for method in (
        tlm.TPUEmbedding,
        tlm.TPUEmbedding.build,
        tlm.TPUEmbedding.enqueue,
        tlm.TPUEmbedding.dequeue,
        tlm.TPUEmbedding.apply_gradients,
    ):
        doc = inspect.getdoc(
            method.__init__ if inspect.isclass(method) else method
        )
        for name in inspect.signature(method).parameters:
            assert name == "self" or f"{name}:" in doc, (method, name)
    assert "initialize_tpu_embedding" not in tlm.TPUEmbedding.__doc__
    with pytest.raises(ValueError, match="per-replica"):
        embedding_of().build(per_replica_batch_size=0)


@pytest.mark.parametrize("bad", [-1, 10])
def test_bad_ids_raise_the_same_error_for_every_input_type(bad):
    ragged = tf.ragged.constant([[1, bad]], dtype=tf.int64)
    for value in (ragged, ragged.to_sparse(), ragged.to_tensor()):
        with pytest.raises(tf.errors.InvalidArgumentError, match="'x'"):
            served(value)
        with pytest.raises(tf.errors.InvalidArgumentError, match="'x'"):
            embedding_of().enqueue({"x": value})


def test_serving_can_skip_checks_of_ids():
    table = tpu.TableConfig(10, 2, combiner="sum", name="words")

    def ops_of(validate):
        feature = tpu.FeatureConfig(
            table, validate_weights_and_indices=validate
        )
        function = tf.function(
            lambda ids: tlm.serving.serving_embedding_lookup(
                ids, None, {table: tf.constant(ROWS)}, feature
            )
        )
        ids = tf.constant([1, 2])
        assert function(ids).numpy().tolist() == [[2, 3], [4, 5]]
        return {
            op.type
            for op in function.get_concrete_function(ids).graph.get_operations()
        }

    # Checks in a graph are `If` ops whose branch contains an `Assert` op.
    checks = {"If", "StatelessIf", "Assert"}
    assert ops_of(True) & checks
    assert not ops_of(False) & checks
