"""Tests `tlm.export` of tf_keras models."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tf_layoutmap as tlm
from tests.serving import served as helpers
from tests.serving import test_export_models as models


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("optimizer", ["adagrad", None])
def test_an_exported_model_matches_the_predictions(optimizer, kind, tmp_path):
    model = models.sharded(
        tf_keras, tlm.layers.tf_keras, optimizer, num_shards=3
    )
    report, served = helpers.export(model, tmp_path, kind)
    largest = sum(table.largest_error for table in report.tables)
    slack = 12 * largest * np.abs(model.get_layer("d1").kernel).max()
    np.testing.assert_allclose(
        served.serve(models.IDS),
        model(models.IDS),
        rtol=1e-5,
        atol=1e-6 + slack,
    )
    assert sum(np.prod(v.shape) for v in served.variables_of_model) == 26


def test_a_tpu_embedding_in_a_model_accepts_ragged_inputs(tmp_path):
    model = models.features(tf_keras, tlm.layers.tf_keras)
    inputs = {
        "a": tf.constant(models.IDS),
        "b": tf.ragged.constant(
            [[1, 2], [], [3]] * 2 + [[0], [15]], dtype=tf.int64
        ),
    }
    _, served = helpers.export(model, tmp_path)
    np.testing.assert_allclose(
        served.serve(inputs), model(inputs), rtol=1e-5, atol=1e-6
    )
