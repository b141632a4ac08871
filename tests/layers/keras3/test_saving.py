"""Tests that files contain a table as one array for any number of shards."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests import forked_process
from tests.covering import but
from tests.layers import models

OPTIMIZERS = (None, "sgd", "adagrad")


def trained(optimizer, num_shards, **kwargs):
    rule = optimizer and models.settings(optimizer)
    model, layer = models.make_model(rule, num_shards, **kwargs)
    model.compile("sgd", models.weighted_sum)
    train(model, 1)
    return model, layer


def train(model, seed):
    ids, y = models.batches(2, seed)
    model.fit(ids, y, batch_size=models.NUM_SAMPLES, shuffle=False, verbose=0)


def state(layer):
    slots = layer.optimizer.slots if layer.optimizer else {}
    return {
        "rows": layer.embeddings.numpy(),
        **{name: slot.numpy() for name, slot in slots.items()},
    }


def assert_same_state(layer, other):
    left, right = state(layer), state(other)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])
    if layer.optimizer:
        assert (
            int(layer.optimizer.iterations)
            == int(other.optimizer.iterations)
            > 0
        )
        assert float(layer.optimizer.learning_rate) == float(
            other.optimizer.learning_rate
        )


def test_saving_and_loading_create_no_optimizers(tmp_path, monkeypatch):
    """Keras creates one for each optimizer, and does not free its memory."""
    model, _ = trained("sgd", 2)
    path = tmp_path / "saved.weights.h5"
    model.save_weights(path)
    created, original = [], keras.optimizers.Optimizer.__init__

    def count(self, *args, **kwargs):
        created.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(keras.optimizers.Optimizer, "__init__", count)
    model.save_weights(path)
    model.load_weights(path)
    assert not created


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_saved_model_resumes_bitwise_equal(optimizer, tmp_path):
    model, layer = trained(optimizer, 3)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    other = loaded.get_layer("words")
    assert_same_state(other, layer)
    for one in (model, loaded):
        train(one, seed=2)
    assert_same_state(other, layer)
    assert np.any(layer.embeddings.numpy() != models.start_rows())


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("num_shards", "more"), [(3, 1), (1, 4), (2, 7)])
def test_weights_load_into_any_number_of_shards(
    optimizer, num_shards, more, tmp_path
):
    path = tmp_path / "model.weights.h5"
    model, layer = trained(optimizer, num_shards)
    model.save_weights(path)
    rule = optimizer and models.settings(optimizer)
    resumed, other = models.make_model(rule, more)
    resumed.load_weights(path)
    assert_same_state(other, layer)
    if optimizer:
        resumed.compile("sgd", models.weighted_sum)
        for one in (model, resumed):
            train(one, seed=2)
        assert_same_state(other, layer)


def test_sharded_weight_files_load(tmp_path):
    path = tmp_path / "model.weights.json"
    model, layer = trained("adagrad", 3)
    model.save_weights(path, max_shard_size=0.001)
    resumed, other = models.make_model(models.settings("adagrad"), 2)
    resumed.load_weights(path)
    assert_same_state(other, layer)


@pytest.mark.parametrize("kind", ["weights", "keras", "checkpoint"])
def test_gradients_accumulated_between_steps_are_saved(kind, tmp_path):
    def make():
        model, layer = models.make_model(models.settings("adagrad"))
        model.compile(
            keras.optimizers.SGD(gradient_accumulation_steps=4),
            models.weighted_sum,
        )
        return model, layer

    model, layer = make()
    # Training stops after two of the four batches of an accumulation.
    train(model, 1)
    resumed, other = make()
    if kind == "weights":
        model.save_weights(tmp_path / "model.weights.h5")
        resumed.load_weights(tmp_path / "model.weights.h5")
        # Weight files do not contain the state of the model's optimizer, so it
        # is set here.
        resumed.optimizer.build(resumed.trainable_variables)
        resumed.optimizer._iterations.assign(2)
    elif kind == "keras":
        model.save(tmp_path / "model.keras")
        resumed = keras.models.load_model(tmp_path / "model.keras")
        other = resumed.get_layer("words")
    else:
        path = tf.train.Checkpoint(model=model).write(str(tmp_path / "c"))
        tf.train.Checkpoint(model=resumed).read(path).expect_partial()
    np.testing.assert_array_equal(other.embeddings.numpy(), models.start_rows())
    for one in (model, resumed):
        train(one, 2)
    assert_same_state(other, layer)
    assert int(layer.optimizer.iterations) == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_restores_into_any_number_of_shards(optimizer, tmp_path):
    model, layer = trained(optimizer, 3)
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    rule = optimizer and models.settings(optimizer)
    resumed, other = models.make_model(rule, 4)
    tf.train.Checkpoint(model=resumed).read(path).expect_partial()
    assert_same_state(other, layer)
    keys = dict(tf.train.list_variables(path))
    assert [shape for key, shape in keys.items() if "_embeddings" in key] == [
        [models.NUM_ROWS, models.DIM]
    ]
    if optimizer:  # The file contains no other arrays except the slot variable.
        tables = 2 if optimizer == "adagrad" else 1
        assert sum(np.prod(shape) for shape in keys.values() if shape) == (
            tables * models.NUM_ROWS * models.DIM
        )


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_checkpoints_convert_from_and_to_an_unsharded_embedding(
    optimizer, tmp_path
):
    ids = keras.Input([models.LENGTH], dtype="int64")
    plain = keras.layers.Embedding(models.NUM_ROWS, models.DIM, name="words")
    plain_model = keras.Model(ids, plain(ids))
    path = tf.train.Checkpoint(model=plain_model).write(str(tmp_path / "plain"))
    model, layer = models.make_model(optimizer)
    tf.train.Checkpoint(model=model).read(path).expect_partial()
    np.testing.assert_array_equal(
        layer.embeddings.numpy(), plain.embeddings.numpy()
    )

    layer.embeddings.assign(models.start_rows())
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "sharded"))
    tf.train.Checkpoint(model=plain_model).read(path).expect_partial()
    np.testing.assert_array_equal(plain.embeddings.numpy(), models.start_rows())


def test_weights_without_an_optimizer_reset_the_tables_optimizer(tmp_path):
    model, layer = models.make_model(None)
    model.save_weights(tmp_path / "model.weights.h5")
    resumed, other = trained("adagrad", 2)
    resumed.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(
        other.embeddings.numpy(), layer.embeddings.numpy()
    )
    assert np.all(other.optimizer.accumulators.numpy() == 0.25)
    assert int(other.optimizer.iterations) == 0


def test_weights_of_another_optimizer_raise(tmp_path):
    model, _ = trained("sgd", 2)
    model.save_weights(tmp_path / "model.weights.h5")
    other, _ = models.make_model(models.settings("adagrad"))
    with pytest.raises(ValueError, match="with the optimizer it was saved"):
        other.load_weights(tmp_path / "model.weights.h5")


def test_a_table_of_another_shape_raises(tmp_path):
    path = tmp_path / "model.weights.h5"
    ids = keras.Input([models.LENGTH], dtype="int64")
    wider = tlm.layers.ShardedEmbedding(11, 2)
    keras.Model(ids, wider(ids)).save_weights(path)
    model, layer = models.make_model("sgd")
    with pytest.raises(ValueError, match=r"shape \(10, 2\).*shape \(11, 2\)"):
        model.load_weights(path)
    np.testing.assert_array_equal(layer.embeddings.numpy(), models.start_rows())


@pytest.mark.parametrize("damaged", ["rows", "accumulators"])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_a_damaged_checkpoint_restores_nothing(damaged, num_shards, tmp_path):
    model, layer = trained("adagrad", 3)
    layer.embeddings.assign(
        np.random.default_rng(0).standard_normal([models.NUM_ROWS, models.DIM])
    )
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "it"))
    [data] = tmp_path.glob("it.data-*")
    content = bytearray(data.read_bytes())
    content[content.index(state(layer)[damaged][-3:].tobytes()) + 3] ^= 1
    data.write_bytes(content)
    other_model, other = trained("adagrad", num_shards)
    before = state(other)
    with pytest.raises(tf.errors.DataLossError):
        tf.train.Checkpoint(model=other_model).read(path)
    for name, value in before.items():
        np.testing.assert_array_equal(state(other)[name], value)


def test_slots_of_another_shape_raise_before_any_are_loaded():
    model, layer = models.make_model(tf.tpu.experimental.embedding.Adam(0.1), 2)
    model.compile("sgd", models.weighted_sum)
    train(model, 1)
    store = {}
    layer.optimizer.save_own_variables(store)
    store = {name: value + 1 for name, value in store.items()}
    last = list(layer.optimizer.slots)[-1]
    store[last] = store[last][1:]
    before = state(layer), int(layer.optimizer.iterations)
    with pytest.raises(ValueError, match="must be loaded from an array"):
        layer.optimizer.load_own_variables(store)
    for name, value in before[0].items():
        np.testing.assert_array_equal(state(layer)[name], value)
    assert int(layer.optimizer.iterations) == before[1]


def test_files_are_written_and_read_shard_by_shard(tmp_path, monkeypatch):
    model, layer = trained("adagrad", 3)
    read_table = type(layer.embeddings).numpy

    def fail(table):
        raise AssertionError(f"{table.name} was joined")

    monkeypatch.setattr(type(layer.embeddings), "numpy", fail)
    model.save_weights(tmp_path / "model.weights.h5")
    resumed, other = models.make_model(models.settings("adagrad"), 2)
    resumed.load_weights(tmp_path / "model.weights.h5")
    monkeypatch.setattr(type(layer.embeddings), "numpy", read_table)
    assert_same_state(other, layer)


SERVER = """
import json, sys
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
ids = tf.constant(json.loads(sys.argv[2]), tf.int64)
print(json.dumps(model.serve(ids).numpy().tolist()))
try:
    model.serve(ids + 10)
except tf.errors.InvalidArgumentError as error:
    assert "words" in str(error), error
else:
    raise AssertionError("id 10 and more were taken")
assert "tf_layoutmap" not in {
    name.partition(".")[0] for name in sys.modules}
"""


# Without an optimizer, stock ops find the shard of each row.
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", but(OPTIMIZERS, "sgd", "adagrad"))
def test_an_exported_model_serves_without_this_package(optimizer, tmp_path):
    model, layer = trained(optimizer, 3)
    ids, _ = models.batches(1)
    model.export(str(tmp_path / "served"), verbose=False)
    graph = (tmp_path / "served" / "saved_model.pb").read_bytes()
    assert b"LayoutMap>" not in graph
    served = forked_process.run_code(
        SERVER,
        str(tmp_path / "served"),
        json.dumps(ids.tolist()),
        cwd=tmp_path,
    ).stdout
    assert json.loads(served) == layer.embeddings.numpy()[ids].tolist()
    # The export must not change the model, which can continue to train.
    np.testing.assert_array_equal(
        model.predict(ids, verbose=0), layer.embeddings.numpy()[ids]
    )
    train(model, seed=2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_saved_model_save_keeps_the_results_of_predict(optimizer, tmp_path):
    model, layer = trained(optimizer, 3)
    ids, _ = models.batches(1)
    tf.saved_model.save(model, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    answer = loaded.signatures["serving_default"](inputs=tf.constant(ids))
    np.testing.assert_array_equal(
        next(iter(answer.values())), layer.embeddings.numpy()[ids]
    )
