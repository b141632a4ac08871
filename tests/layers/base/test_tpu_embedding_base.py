"""What both Keras' `TPUEmbedding` layers take, beside `tlm.TPUEmbedding`."""

import inspect

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore

tpu = tf.tpu.experimental.embedding

# What is not for a layer: the strategy chooses the engine, a step of a model
# sees what the one before has written, and there are no SparseCores.
NOT_OF_A_LAYER = {
    "engine",
    "pipeline_execution_with_tensor_core",
    "sparse_core_embedding_config",
}


def options_of(made_by):
    return {
        name: one.default
        for name, one in inspect.signature(made_by).parameters.items()
        if name not in ("self", "feature_config", "optimizer")
    }


def test_a_layer_has_each_option_of_the_embedding_with_its_default():
    ours = options_of(TPUEmbeddingCore.__init__)
    theirs = options_of(tlm.TPUEmbedding.__init__)
    assert set(theirs) - set(ours) == NOT_OF_A_LAYER
    for name in set(theirs) - NOT_OF_A_LAYER:
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize(
    "options, words",
    [
        ({"wire_dtype": "bfloat16"}, '`wire_dtype` must be "float32" unless'),
        ({"wire_dtype": "int8"}, "`wire_dtype` must be one of"),
        ({"over_processes": "divided"}, 'must be "copied" unless under Multi'),
        ({"order": "folded"}, '`order` must be "exact" unless'),
    ],
)
@pytest.mark.parametrize("layers", [tlm.layers, tlm.layers.tf_keras])
def test_what_goes_to_the_embedding_is_checked_there(layers, options, words):
    table = tpu.TableConfig(4, 2, tf.ones, name="words")
    with pytest.raises(ValueError, match=words):
        layers.TPUEmbedding(tpu.FeatureConfig(table), tpu.SGD(1.0), **options)
