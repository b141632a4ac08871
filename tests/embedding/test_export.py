"""Exported embeddings can be served with only TensorFlow installed."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import forked_process

tpu = tf.tpu.experimental.embedding

# This program runs in a process that cannot import tf_layoutmap.
SERVE = """
import sys
sys.modules["tf_layoutmap"] = None
import numpy as np
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
found = model.signatures["serving_default"](
    ids=tf.constant([1, 2, 9], tf.int64),
    row_splits=tf.constant([0, 2, 2, 3], tf.int64))
np.save(sys.argv[2], found["activations"].numpy())
"""


class Model(tf.Module):
    """Module with an embedding and a lookup function."""

    def __init__(self, feature, num_shards, optimizer):
        super().__init__()
        self.feature = feature
        self.embedding = tlm.TPUEmbedding(
            {"title": feature},
            optimizer,
            partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        )

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def serve(self, ids, row_splits):
        ragged = tf.RaggedTensor.from_row_splits(ids, row_splits)
        return {
            "activations": tlm.serving.serving_embedding_lookup(
                {"title": ragged},
                None,
                self.embedding.embedding_tables,
                {"title": self.feature},
            )["title"]
        }


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "num_shards"), [(False, 1), (True, 3)])
def test_a_process_without_the_package_serves_equally(
    trained, num_shards, tmp_path
):
    table = tpu.TableConfig(
        10,
        2,
        combiner="mean",
        name="words",
        initializer=tf.random_normal_initializer(seed=1),
    )
    model = Model(
        tpu.FeatureConfig(table),
        num_shards,
        tpu.Adagrad(0.5) if trained else None,
    )
    if trained:
        model.embedding.enqueue({"title": np.array([1, 9])})
        model.embedding.apply_gradients(model.embedding.dequeue())
    ids = [tf.constant(one, tf.int64) for one in ([1, 2, 9], [0, 2, 2, 3])]
    wanted = model.serve(*ids)["activations"].numpy()

    tf.saved_model.save(
        model,
        str(tmp_path / "model"),
        signatures={"serving_default": model.serve},
    )
    forked_process.run_code(
        SERVE, str(tmp_path / "model"), str(tmp_path / "found.npy")
    )
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), wanted)
    # The export must not change the model.
    np.testing.assert_array_equal(
        model.serve(*ids)["activations"].numpy(), wanted
    )


class Trainer(Model):
    @tf.function
    def train(self, ids):
        self.embedding.enqueue({"title": ids})
        self.embedding.apply_gradients(self.embedding.dequeue())


def test_exporting_a_training_function_raises(tmp_path):
    model = Trainer(
        tpu.FeatureConfig(tpu.TableConfig(10, 2, name="words")), 1, tpu.SGD(0.5)
    )
    model.train(tf.constant([1]))
    with pytest.raises(RuntimeError, match="`enqueue` cannot be exported"):
        tf.saved_model.save(model, str(tmp_path / "model"))
    model.train(tf.constant([1]))
    assert model.embedding.stats()["num_updates"] == 2
