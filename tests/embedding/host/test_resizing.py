"""Tests resizing vocabularies while a program runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.deltas.cases import save, tensors
from tests.embedding.host import open_table_cases as cases
from tf_layoutmap.embedding.host import engine

tpu = tf.tpu.experimental.embedding


def create(capacity=100, *, evict="lru", optimizer=None, **arguments):
    return cases.embedding(
        tlm.vocabulary.OpenVocabulary(
            capacity, evict=evict, **arguments.pop("settings", {})
        ),
        optimizer or tpu.Adam(0.25),
        **arguments,
    )


def train(one, number):
    rng = np.random.default_rng(number)
    one.enqueue({"ids": tf.constant(rng.integers(0, 30, 12) + number * 6)})
    one.dequeue()
    one.apply_gradients(
        {"ids": tf.constant(rng.integers(-4, 5, [12, 3]), tf.float32)}
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("capacity", [5000, 120, 100, 40])
@pytest.mark.parametrize(
    ("num_shards", "arguments"),
    [
        (1, {}),
        (3, {"table_dtypes": "bfloat16", "evict": "lfu"}),
        (2, {"pipeline_execution_with_tensor_core": True}),
    ],
)
def test_resize_equals_a_converted_checkpoint(
    capacity, num_shards, arguments, tmp_path
):
    one, _ = create(num_shards=num_shards, **arguments)
    for number in range(8):
        train(one, number)
    before = save(one, tmp_path / "before")
    settings = tlm.vocabulary.OpenVocabulary(
        capacity, evict=arguments.get("evict", "lru")
    )
    wanted = tlm.vocabulary.convert(
        before, str(tmp_path / "wanted"), {"words": settings}
    )["words"]
    vocabulary = one.vocabularies["words"]
    found = vocabulary.resize(capacity)
    assert found == wanted
    assert vocabulary.settings.capacity == capacity
    assert vocabulary.stats()["num_keys"] == found.num_kept
    assert (found.num_dropped > 0) == (capacity == 40)
    assert tensors(save(one, tmp_path / "after")) == tensors(
        str(tmp_path / "wanted")
    )
    # Training continues in the same way as after a restore of the converted
    # checkpoint.
    other, _ = create(capacity, num_shards=num_shards, **arguments)
    tf.train.Checkpoint(embedding=other).restore(str(tmp_path / "wanted"))
    for number in range(8, 12):
        for each in (one, other):
            train(each, number)
    assert tensors(save(one, tmp_path / "one")) == tensors(
        save(other, tmp_path / "other")
    )


def test_resize_raises_while_steps_are_in_flight(tmp_path):
    one, _ = create()
    train(one, 0)
    one.enqueue({"ids": tf.constant([5])})
    before = tensors(save(one, tmp_path / "before"))
    vocabulary = one.vocabularies["words"]
    for call in (one.dequeue, lambda: None):
        with pytest.raises(
            RuntimeError,
            match=(r"resized while steps are in flight.*\(table 'words'\)"),
        ):
            vocabulary.resize(200)
        call()
    assert tensors(save(one, tmp_path / "before")) == before
    one.apply_gradients({"ids": tf.ones([1, 3])})
    vocabulary.resize(200)
    assert vocabulary.stats()["num_rows"] == 224
    train(one, 1)


def test_a_failed_resize_changes_nothing(tmp_path, monkeypatch):
    one, config = create()
    train(one, 0)
    before = tensors(save(one, tmp_path / "before"))
    table = one.embedding_tables[config]
    vocabulary = one.vocabularies["words"]
    for capacity, error in ((0, ValueError), (2.5, TypeError)):
        with pytest.raises(error, match="`capacity` must be"):
            vocabulary.resize(capacity)
    with monkeypatch.context() as patched:

        def no_memory(*arguments, **options):
            raise MemoryError("no memory left")

        patched.setattr(engine.HostEngine, "__init__", no_memory)
        with pytest.raises(MemoryError):
            vocabulary.resize(500)
    with pytest.raises(RuntimeError, match="outside tf.function"):
        tf.function(lambda: vocabulary.resize(500).num_kept)()
    assert one.embedding_tables[config] is table
    assert tensors(save(one, tmp_path / "after")) == before
    train(one, 1)


def test_functions_traced_before_the_resize_raise():
    one, config = create(optimizer=tpu.SGD(1.0))
    one.build()
    ids = tf.constant([3, 4])

    def step():
        one.enqueue({"ids": ids})
        one.dequeue()
        one.apply_gradients({"ids": -tf.ones([2, 3])})

    def look_up():
        return one({"ids": ids})["ids"]

    old_step, old_look_up = tf.function(step), tf.function(look_up)
    old_step()
    before = old_look_up().numpy()
    one.vocabularies["words"].resize(300)
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=("table 'words' was resized: functions that were traced before"),
    ):
        old_step()
    with pytest.raises(tf.errors.InvalidArgumentError):
        old_look_up()
    np.testing.assert_array_equal(tf.function(look_up)(), before)
    tf.function(step)()
    np.testing.assert_array_equal(look_up(), before + 1)
    assert one.embedding_tables[config].shape == (
        one.vocabularies["words"].settings.num_rows,
        3,
    )


def test_dropped_keys_are_passed_to_on_evict(tmp_path):
    found = []
    one, config = create(settings={"on_evict": found.append})
    for number in range(6):
        train(one, number)
    vocabulary = one.vocabularies["words"]
    keys = vocabulary.keys().numpy()
    rows = dict(
        zip(
            keys.tolist(),
            cases.rows_of(one.embedding_tables[config])[
                vocabulary.lookup(keys).numpy()
            ].tolist(),
        )
    )
    num_dropped = vocabulary.resize(32).num_dropped
    (evicted,) = found
    assert num_dropped == len(evicted.keys) == len(keys) - 32
    assert dict(zip(evicted.keys.tolist(), evicted.rows.tolist())) == {
        key: rows[key]
        for key in set(keys.tolist()) - set(vocabulary.keys().numpy().tolist())
    }
    assert set(evicted.slots) == {"momenta", "velocities"}
    found.clear()
    train(one, 9)  # Steps after the resize must also call the callback.
    train(one, 20)
    assert found


def test_a_delta_writer_requires_a_new_base(tmp_path):
    one, _ = create()
    one.build()
    base = save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    one.vocabularies["words"].resize(300)
    with pytest.raises(
        RuntimeError, match="tlm.deltas.DeltaWriter must be created"
    ):
        writer.write()
    with pytest.raises(ValueError, match="have other variables or shapes"):
        tlm.deltas.DeltaWriter(one, tmp_path / "deltas", base=base)
    base = save(one, tmp_path / "base")
    writer = tlm.deltas.DeltaWriter(one, tmp_path / "new", base=base)
    train(one, 3)
    writer.write()
    assert tensors(tlm.deltas.apply(base, tmp_path / "new")) == tensors(
        save(one, tmp_path / "wanted")
    )


def test_a_model_trains_after_it_is_compiled_again():
    layer = tlm.layers.TPUEmbedding(
        tpu.FeatureConfig(cases.table(64)),
        tpu.Adagrad(0.25),
        vocabularies={"words": tlm.vocabulary.OpenVocabulary(64)},
    )
    ids = keras.Input([1], dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")
    x, y = np.arange(40).reshape(-1, 1), np.ones([40, 1])
    model.fit(x, y, batch_size=8, verbose=0)
    before = model.predict(x, verbose=0)
    vocabulary = layer.embedding.vocabularies["words"]
    assert vocabulary.resize(500).num_dropped == 0
    with pytest.raises(tf.errors.FailedPreconditionError, match="was resized"):
        model.fit(x, y, batch_size=8, verbose=0)
    model.compile("sgd", "mse")
    np.testing.assert_array_equal(model.predict(x, verbose=0), before)
    model.fit(x + 100, y, batch_size=8, verbose=0)
    assert vocabulary.stats()["num_keys"] == 80


def test_resize_works_under_a_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        one, _ = create()
    one.build()
    one.vocabularies["words"].resize(300)

    @tf.function
    def step(ids):
        def run(ids):
            one.enqueue({"ids": ids})
            one.apply_gradients({"ids": tf.ones_like(one.dequeue()["ids"])})

        strategy.run(run, (ids,))

    step(tf.constant([1, 2]))
    assert one.vocabularies["words"].stats()["num_keys"] == 2
