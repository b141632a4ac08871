"""Tests the `TPUEmbedding` layers' options in both Keras versions."""

import inspect

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore

tpu = tf.tpu.experimental.embedding

# Layers do not have this option, because a step always reads the updates of the
# previous step.
EMBEDDING_ONLY_OPTIONS = {"pipeline_execution_with_tensor_core"}


def options_of(made_by):
    return {
        name: one.default
        for name, one in inspect.signature(made_by).parameters.items()
        if name not in ("self", "feature_config", "optimizer")
    }


def test_a_layer_has_the_options_and_defaults_of_the_embedding():
    layer_options = options_of(TPUEmbeddingCore.__init__)
    embedding_options = options_of(tlm.TPUEmbedding.__init__)
    assert set(embedding_options) - set(layer_options) == EMBEDDING_ONLY_OPTIONS
    for name in set(embedding_options) - EMBEDDING_ONLY_OPTIONS:
        assert layer_options[name] == embedding_options[name], name


@pytest.mark.parametrize(
    "options, words",
    [
        ({"wire_dtype": "bfloat16"}, '`wire_dtype` must be "float32" unless'),
        ({"wire_dtype": "int8"}, "`wire_dtype` must be one of"),
        (
            {"over_processes": "sharded"},
            'must be "replicated" unless under Multi',
        ),
        ({"over_processes": "divided"}, "`over_processes` must be one of"),
        (
            {"gradient_aggregation": "local"},
            '`gradient_aggregation` must be "exact" unless',
        ),
        ({"engine": "gpu"}, "`engine` must be one of"),
    ],
)
@pytest.mark.parametrize("layers", [tlm.layers, tlm.layers.tf_keras])
def test_options_are_validated_by_the_embedding(layers, options, words):
    table = tpu.TableConfig(4, 2, tf.ones, name="words")
    with pytest.raises(ValueError, match=words):
        layers.TPUEmbedding(tpu.FeatureConfig(table), tpu.SGD(1.0), **options)
