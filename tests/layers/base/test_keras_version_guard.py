"""Tests that mixing Keras 3 and tf_keras in one model raises an error."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.layers import models


@pytest.fixture
def tf_keras():
    return pytest.importorskip("tf_keras")


def test_a_keras_3_layer_in_a_tf_keras_model_raises(tf_keras):
    words = models.make_layer("sgd")
    with pytest.raises(
        RuntimeError, match=r"layers\.tf_keras\.ShardedEmbedding.*words"
    ):
        words(tf_keras.Input([3], dtype="int64"))

    class Model(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.words = words

        def call(self, ids):
            return self.words(ids)

    with pytest.raises(RuntimeError, match="inside tf_keras layer 'model"):
        Model()(np.array([[1, 2, 3]]))
    words(np.array([[1, 2, 3]]))  # The layer can be called outside of a model.


def test_a_tf_keras_layer_in_a_keras_3_model_raises(tf_keras):
    from tests.layers.tf_keras import models as tf_keras_models

    words = tf_keras_models.make_layer("sgd")
    with pytest.raises(RuntimeError, match="in a Keras 3 model.*words"):
        words(keras.Input([3], dtype="int64"))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.words = words

        def call(self, ids):
            return self.words(ids)

    with pytest.raises(RuntimeError, match="inside Keras 3 layer 'model"):
        Model()(np.array([[1, 2, 3]]))
    words(np.array([[1, 2, 3]]))


def test_optimizers_and_schedules_of_the_other_version_raise(tf_keras):
    from tests.layers.tf_keras import models as tf_keras_models

    config = tf.tpu.experimental.embedding
    for make, other in (
        (models.make_layer, tf_keras),
        (tf_keras_models.make_layer, keras),
    ):
        rate = other.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        with pytest.raises(ValueError, match="without arguments.*words"):
            make(config.SGD(rate))
        with pytest.raises(TypeError, match="must be None.*words"):
            make(other.optimizers.Adam())
    with pytest.raises(TypeError, match="must be None.*words"):
        models.make_layer(tf_keras_models.make_layer("sgd").optimizer)


def test_both_keras_versions_give_the_same_results(tf_keras):
    from tests.layers.tf_keras import models as tf_keras_models

    ids, y = models.batches(3)
    rows = []
    for make, loss in (
        (models.make_model, models.weighted_sum),
        (tf_keras_models.make_model, tf_keras_models.weighted_sum),
    ):
        model, layer = make(models.settings("adagrad"))
        model.compile("adam", loss)
        model.fit(
            ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0
        )
        rows.append(layer.embeddings.numpy())
    np.testing.assert_array_equal(*rows)


@pytest.mark.slow
def test_tf_keras_is_imported_only_on_request():
    program = (
        "import sys\nimport tf_layoutmap as tlm\n"
        "import numpy\n"
        "tlm.layers.ShardedEmbedding(3, 2)(numpy.array([1]))\n"
        "assert 'tf_keras' not in sys.modules, 'imported'\n"
        "sys.modules['tf_keras'] = None\n"
        "try:\n    tlm.layers.tf_keras\n"
        "except ImportError as error:\n    print(error)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "pip install --no-deps" in printed
    assert "tf_keras" in dir(tlm.layers)
