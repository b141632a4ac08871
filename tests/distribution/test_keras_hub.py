"""Language models of keras-hub under keras.distribution.

The programs follow the pages of keras.io about tensor parallelism, with small
models.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs
from tests.layout.meshes import axes_of
from tf_layoutmap import distribution as ours

keras_hub = pytest.importorskip("keras_hub", exc_type=ImportError)
theirs = keras.distribution
dtensor = tf.experimental.dtensor

pytestmark = pytest.mark.slow

SIZES = {
    "vocabulary_size": 32,
    "num_layers": 1,
    "num_query_heads": 4,
    "num_key_value_heads": 4,
    "hidden_dim": 16,
}
TOKENS = np.random.default_rng(0).integers(1, 32, size=(8, 7))
INPUTS = {
    "token_ids": TOKENS[:, :-1],
    "padding_mask": np.ones((8, 6), np.int32),
}
PROMPTS = {
    "token_ids": TOKENS[:2],
    "padding_mask": np.array([[1, 1, 1, 0, 0, 0, 0]] * 2),
}


@pytest.fixture(autouse=True)
def enabled():
    with ours.enabled():
        yield
    theirs.set_distribution(None)


def gemma():
    return keras_hub.models.GemmaCausalLM(
        backbone=keras_hub.models.GemmaBackbone(
            **SIZES, head_dim=8, intermediate_dim=64
        ),
        preprocessor=None,
    )


def llama():
    return keras_hub.models.LlamaCausalLM(
        backbone=keras_hub.models.LlamaBackbone(**SIZES, intermediate_dim=32),
        preprocessor=None,
    )


def gemma_layouts(mesh):
    layout_map = theirs.LayoutMap(mesh)
    layout_map["token_embedding/embeddings"] = ("model", "batch")
    layout_map["decoder_block.*attention.*(query|key|value).kernel"] = (
        "model",
        "batch",
        None,
    )
    layout_map["decoder_block.*attention_output.kernel"] = (
        "model",
        None,
        "batch",
    )
    layout_map["decoder_block.*ffw_gating.kernel"] = ("batch", "model")
    layout_map["decoder_block.*ffw_gating_2.kernel"] = ("batch", "model")
    layout_map["decoder_block.*ffw_linear.kernel"] = ("model", "batch")
    return layout_map


def train(make, lora):
    keras.utils.set_random_seed(0)
    model = make()
    if lora:
        model.backbone.enable_lora(rank=2)
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.01)
    optimizer.exclude_from_weight_decay(var_names=["bias", "scale"])
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    history = model.fit(
        INPUTS, TOKENS[:, 1:], batch_size=4, shuffle=False, verbose=0
    ).history
    written = model.generate(PROMPTS, stop_token_ids=None)["token_ids"]
    return model, history, np.asarray(written)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    ("make", "layouts", "lora", "sharded"),
    [
        (gemma, gemma_layouts, True, ("model", "batch")),
        (
            gemma,
            keras_hub.models.GemmaBackbone.get_layout_map,
            False,
            ("model", "batch"),
        ),
        (
            llama,
            keras_hub.models.LlamaBackbone.get_layout_map,
            False,
            ("model", "batch"),
        ),
    ],
    ids=["gemma-lora", "gemma", "llama"],
)
def test_a_language_model_matches_a_run_without_a_distribution(
    make, layouts, lora, sharded
):
    plain, expected, expected_tokens = train(make, lora)
    mesh = theirs.DeviceMesh(
        (2, 4), ["batch", "model"], theirs.list_devices("cpu")
    )
    theirs.set_distribution(
        theirs.ModelParallel(layout_map=layouts(mesh), batch_dim_name="batch")
    )
    model, found, tokens = train(make, lora)
    pairs.assert_alike(expected, found)
    pairs.assert_same_weights(plain, model)
    np.testing.assert_array_equal(tokens, expected_tokens)
    table = model.backbone.token_embedding.embeddings
    assert axes_of(table) == sharded
    # The pages print this attribute.
    assert table.value.sharding.spec == sharded
    parts = dtensor.unpack(tf.convert_to_tensor(table.divided_value))
    assert {part.shape.num_elements() for part in parts} == {32 * 16 // 8}
