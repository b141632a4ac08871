"""Tests that tf_keras files store any sharded table as one array."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import forked_process
from tests.layers import models

tf_keras = pytest.importorskip(
    "tf_keras", reason="needs tf_keras: pip install --no-deps tf_keras"
)
from tests.layers.keras3.test_saving import (  # noqa: E402
    OPTIMIZERS,
    assert_same_state,
)
from tests.layers.tf_keras import models as tfk  # noqa: E402


def make(optimizer, num_shards=3, model_optimizer="sgd", **kwargs):
    model, layer = tfk.make_model(
        optimizer and models.settings(optimizer), num_shards, **kwargs
    )
    model.compile(model_optimizer, tfk.weighted_sum)
    return model, layer


def train(model, seed):
    tfk.fit(model, *models.batches(2, seed))


def trained(*args, **kwargs):
    model, layer = make(*args, **kwargs)
    train(model, 1)
    return model, layer


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("num_shards", "more"), [(3, 1), (1, 4), (2, 7)])
def test_weights_load_into_any_number_of_shards(
    optimizer, num_shards, more, tmp_path
):
    path = str(tmp_path / "model.weights.h5")
    model, layer = trained(optimizer, num_shards)
    model.save_weights(path)
    resumed, other = make(optimizer, more)
    resumed.load_weights(path)
    assert_same_state(other, layer)
    for one in (model, resumed):
        train(one, 2)
    assert_same_state(other, layer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_saved_model_resumes_bitwise_equal(optimizer, tmp_path):
    path = str(tmp_path / "model.keras")
    # If the model's Adam trains the table, the slot variables of the table are
    # also saved.
    model, layer = trained(optimizer, model_optimizer="adam")
    model.save(path)
    loaded = tf_keras.models.load_model(path)
    other = loaded.get_layer("words")
    for one in (model, loaded):
        train(one, 2)
    assert_same_state(other, layer)
    assert other.num_shards == 3


def test_a_schedule_is_saved_and_continues(tmp_path):
    rate = tf_keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    model, layer = tfk.make_model(tf.tpu.experimental.embedding.Adagrad(rate))
    model.compile("sgd", tfk.weighted_sum)
    train(model, 1)
    model.save(str(tmp_path / "model.keras"))
    loaded = tf_keras.models.load_model(str(tmp_path / "model.keras"))
    for one in (model, loaded):
        train(one, 2)
    assert_same_state(loaded.get_layer("words"), layer)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("is_built", [False, True])
def test_a_checkpoint_restores_into_any_number_of_shards(
    optimizer, is_built, tmp_path
):
    model, layer = trained(optimizer, 3, "adam")
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))
    resumed, other = make(optimizer, 4, "adam")
    if is_built:
        resumed.optimizer.build(resumed.trainable_variables)
    status = tf.train.Checkpoint(model=resumed).read(path)
    assert_same_state(other, layer)
    keys = dict(tf.train.list_variables(path))
    tables = [key for key, shape in keys.items() if len(shape) == 2]
    # The checkpoint contains one array for the rows and one array for each slot
    # variable. Adam has two slot variables.
    assert len(tables) == {None: 3, "sgd": 1, "adagrad": 2}[optimizer]
    if optimizer is None and not is_built:
        with pytest.raises(RuntimeError, match=r"optimizer\.build\("):
            train(resumed, 2)
        return
    if is_built:
        status.assert_consumed()
    for one in (model, resumed):
        train(one, 2)
    assert_same_state(other, layer)


def test_a_checkpoint_made_before_build_later_includes_slots(tmp_path):
    layer = tfk.make_layer(models.settings("adagrad"))
    checkpoint = tf.train.Checkpoint(layer=layer)
    checkpoint.write(str(tmp_path / "empty"))
    layer.build()
    path = checkpoint.write(str(tmp_path / "built"))
    assert any(
        "optimizer/accumulators" in key
        for key, _ in tf.train.list_variables(path)
    )


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_checkpoints_convert_from_and_to_an_unsharded_embedding(
    optimizer, tmp_path
):
    ids = tf_keras.Input([models.LENGTH], dtype="int64")
    plain = tf_keras.layers.Embedding(models.NUM_ROWS, models.DIM, name="words")
    plain_model = tf_keras.Model(ids, plain(ids))
    path = tf.train.Checkpoint(model=plain_model).write(str(tmp_path / "plain"))
    model, layer = make(optimizer)
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    np.testing.assert_array_equal(
        layer.embeddings.numpy(), plain.embeddings.numpy()
    )
    layer.embeddings.assign(models.start_rows())
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "sharded"))
    tf.train.Checkpoint(model=plain_model).read(path).expect_partial()
    np.testing.assert_array_equal(plain.embeddings.numpy(), models.start_rows())


def test_weights_of_other_optimizers_and_shapes_raise(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    model, _ = trained("sgd")
    model.save_weights(path)
    other, _ = make("adagrad")
    with pytest.raises(ValueError, match="with the optimizer it was saved"):
        other.load_weights(path)
    ids = tf_keras.Input([models.LENGTH], dtype="int64")
    wider = tf_keras.layers.Embedding(models.NUM_ROWS + 1, models.DIM)
    tf_keras.Model(ids, wider(ids)).save_weights(path)
    other, _ = tfk.make_model(None, name="embedding")
    with pytest.raises(ValueError, match="must be one table|shape"):
        other.load_weights(path)


def test_bfloat16_rows_are_restored(tmp_path):
    path = str(tmp_path / "model.weights.h5")
    model, layer = tfk.make_model(None, 3, dtype="bfloat16")
    model.save_weights(path)
    other_model, other = tfk.make_model(
        None, 2, dtype="bfloat16", embeddings_initializer="zeros"
    )
    other_model.load_weights(path)
    np.testing.assert_array_equal(
        other.embeddings.numpy(), layer.embeddings.numpy()
    )


SERVER = """
import json, sys
import tensorflow as tf
signatures = tf.saved_model.load(sys.argv[1]).signatures
serve = signatures[sys.argv[2]]
(name,) = serve.structured_input_signature[1]
ids = tf.constant(json.loads(sys.argv[3]), tf.int64)
print(json.dumps(next(iter(serve(**{name: ids}).values())).numpy().tolist()))
try:
    serve(**{name: ids + 10})
except tf.errors.InvalidArgumentError as error:
    assert "words" in str(error), error
else:
    raise AssertionError("id 10 and more were taken")
assert "tf_layoutmap" not in {
    name.partition(".")[0] for name in sys.modules}
"""


@pytest.mark.covering(1, 1)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["export", "saved_model", "save"])
def test_an_exported_model_serves_without_this_package(
    optimizer, kind, tmp_path
):
    model, layer = trained(optimizer)
    ids, _ = models.batches(1)
    path = str(tmp_path / "served")
    if kind == "export":
        model.export(path)
    elif kind == "saved_model":
        tf.saved_model.save(model, path)
    else:
        model.save(path)
    graph = (tmp_path / "served" / "saved_model.pb").read_bytes()
    assert b"LayoutMap>" not in graph
    served = forked_process.run_code(
        SERVER,
        path,
        "serve" if kind == "export" else "serving_default",
        json.dumps(ids.tolist()),
        cwd=tmp_path,
    ).stdout
    assert json.loads(served) == layer.embeddings.numpy()[ids].tolist()
    # The export must not change the model, which can continue to train.
    np.testing.assert_array_equal(
        model.predict(ids, verbose=0), layer.embeddings.numpy()[ids]
    )
    train(model, 2)


def test_the_legacy_h5_format_holds_the_rows_of_a_self_trained_table(tmp_path):
    """As for other weights, the format has no state of the optimizer."""
    model, layer = trained("adagrad")
    path = str(tmp_path / "model.h5")
    model.save_weights(path)
    other, new_layer = tfk.make_model("adagrad", num_shards=1)
    other.load_weights(path)
    np.testing.assert_array_equal(
        new_layer.embeddings.numpy(), layer.embeddings.numpy()
    )
    assert len(np.unique(new_layer.optimizer.accumulators.numpy())) == 1
