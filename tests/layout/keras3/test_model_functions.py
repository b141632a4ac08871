"""`tf.function` of a method of a model: run for the mesh of the model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.layout import pairs


class Writer(keras.Sequential):
    """Writes tokens one after the other, as generative models do."""

    def write(self, tokens):
        for i in range(1, 6):
            best = tf.argmax(self(tokens)[:, i - 1], -1, tokens.dtype)
            tokens = tf.concat(
                [tokens[:, :i], best[:, None], tokens[:, i + 1:]], axis=1)
        return {"tokens": tokens, "last": tokens[:, ::-1]}

    def largest(self, tokens, count):
        if tf.reduce_sum(tokens) > 0:
            logits = self(tokens)
        else:
            logits = -self(tokens)
        return tf.math.top_k(tf.cumsum(logits, axis=-1), count)[0]


def make():
    return Writer([
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(16, 8, name="d1"),
        keras.layers.Dense(16, name="d2")])


AXES = {"d1.embeddings": ("model", None), "d2.kernel": (None, "model")}


@pytest.mark.parametrize("method, arguments", [
    ("write", ()), ("largest", (3,))])
@pytest.mark.filterwarnings("ignore:To ")
def test_it_gives_what_the_model_without_a_mesh_gives(method, arguments):
    tokens = pairs.TOKENS[:8].astype(np.int32)
    results = [
        tf.function(getattr(model, method))(tokens, *arguments)
        for model in (pairs.plain(make), pairs.on_mesh(make, AXES))]
    # They can be read like any tensor.
    pairs.assert_alike(*keras.tree.map_structure(np.asarray, results))


def test_a_model_without_a_mesh_is_called_as_before():
    model = pairs.plain(make)
    pairs.on_mesh(make, AXES)
    function = tf.function(model.write)
    function(pairs.TOKENS[:8].astype(np.int32))
    assert function.experimental_get_tracing_count() == 1


def test_it_is_traced_once_for_the_same_shapes():
    traces = []

    class Counting(Writer):
        def write(self, tokens):
            traces.append(tokens.shape)
            return super().write(tokens)

    model = pairs.on_mesh(lambda: Counting([
        keras.Input((6,), dtype="int32"),
        keras.layers.Embedding(16, 16, name="d1")]),
        {"d1.embeddings": (None, "model")})
    function = tf.function(model.write)
    for _ in range(3):
        function(pairs.TOKENS[:8].astype(np.int32))
    assert len(traces) == 1
