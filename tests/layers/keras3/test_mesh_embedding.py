"""Compares `ShardedEmbedding` on a mesh with the same layer on the host."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.util import object_identity

import tf_layoutmap as tlm
from tests.covering import but
from tests.layers import models
from tests.layers.models import weighted_sum
from tests.layout.meshes import axes_of, layout_of, mesh_of

# `make test` runs each test with one mesh.
pytestmark = pytest.mark.covering(1, 1)

dtensor = tf.experimental.dtensor
rules = tf.tpu.experimental.embedding

NUM_ROWS, DIM, LENGTH, BATCH = 24, 4, 3, 8
NUM_SAMPLES = 20 * BATCH
RULES = {
    "sgd": lambda: rules.SGD(0.5),
    "adagrad": lambda: rules.Adagrad(0.5),
    "adam": lambda: rules.Adam(0.05),
    "dense adam": lambda: rules.Adam(0.05, lazy_adam=False),
    "ftrl": lambda: rules.FTRL(0.05),
    "clipped": lambda: rules.Adagrad(0.5, clipvalue=(-0.25, 0.25)),
}
MESHES = {"2x2": dict(batch=2, model=2), "1x4": dict(batch=1, model=4)}
ROWS = ("model", None)


@pytest.fixture(params=MESHES, scope="module")
def mesh(request):
    return mesh_of(**MESHES[request.param])


def batches():
    """Returns ids that repeat in samples and batches, and integer labels."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, NUM_ROWS, (NUM_SAMPLES, LENGTH))
    ids[:, 1] = ids[:, 0]
    y = rng.integers(-4, 5, (NUM_SAMPLES, LENGTH, DIM)).astype(np.float32)
    return ids, y


IDS, Y = batches()


def model_of(optimizer, calls=1, **options):
    keras.utils.set_random_seed(5)
    ids = keras.Input([LENGTH], dtype="int64")
    layer = tlm.layers.ShardedEmbedding(
        NUM_ROWS, DIM, optimizer=optimizer, name="words", **options
    )
    rows = [layer(ids) for _ in range(calls)]
    return keras.Model(ids, rows[0] if calls == 1 else keras.layers.add(rows))


def scope(mesh, axes=ROWS):
    layout_map = tlm.LayoutMap(mesh)
    if axes is not None:
        layout_map["words.embeddings"] = layout_of(mesh, *axes)
    return tlm.layout_map_scope(layout_map)


def on_mesh(mesh, optimizer, axes=ROWS, **options):
    with scope(mesh, axes):
        return model_of(optimizer, **options)


def table_of(model):
    return model.get_layer("words")


def fit(model, num_steps=20, **options):
    model.compile(keras.optimizers.SGD(0.1), loss=weighted_sum, **options)
    last = num_steps * BATCH
    return model.fit(
        IDS[:last], Y[:last], batch_size=BATCH, shuffle=False, verbose=0
    ).history["loss"]


def assert_same_tables(first, second):
    models.assert_same_tables(table_of(first), table_of(second))


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("rule", RULES)
def test_fit_is_bitwise_equal_to_a_table_on_the_host(mesh, rule):
    host, meshed = model_of(RULES[rule]()), on_mesh(mesh, RULES[rule]())
    assert_same_tables(host, meshed)
    # The mean of a batch is summed in a different order.
    np.testing.assert_allclose(fit(meshed), fit(host), rtol=1e-5, atol=1e-5)
    assert int(table_of(host).optimizer.iterations) == 20
    assert_same_tables(host, meshed)
    for variable in (
        table_of(meshed).embeddings,
        *table_of(meshed).optimizer.slots.values(),
    ):
        assert axes_of(variable) == ROWS


o = keras.optimizers
FOLLOWED = {
    "adagrad": lambda: o.Adagrad(0.5),
    "adam": lambda: o.Adam(0.05),
    "momentum": lambda: o.SGD(0.1, momentum=0.9),
    "rmsprop": lambda: o.RMSprop(0.05),
    "adamw, clipnorm": lambda: o.AdamW(0.05, weight_decay=0.5, clipnorm=1.0),
    "global_clipnorm": lambda: o.Adam(0.05, global_clipnorm=1.0),
    "clipvalue, accumulation": lambda: o.Adam(
        0.05, clipvalue=0.25, gradient_accumulation_steps=2
    ),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize(
    "optimizer",
    but(FOLLOWED, "adagrad", "adam", "momentum", "rmsprop", "adamw, clipnorm"),
)
def test_a_table_that_follows_the_optimizer_trains_as_on_the_host(
    mesh, optimizer
):
    # A mesh sums the gradients of equal ids before it squares them, so that a
    # batch contains each id once.
    rng = np.random.default_rng(4)
    ids = np.concatenate(
        [rng.permutation(NUM_ROWS).reshape(BATCH, LENGTH) for _ in range(4)]
    )
    models_of_both = model_of("model"), on_mesh(mesh, "model")
    for model in models_of_both:
        model.compile(FOLLOWED[optimizer](), loss=weighted_sum)
        model.fit(
            ids, Y[: len(ids)], batch_size=BATCH, shuffle=False, verbose=0
        )
    host, meshed = map(table_of, models_of_both)
    assert axes_of(meshed.embeddings) == ROWS
    np.testing.assert_allclose(
        meshed.embeddings.numpy(), host.embeddings.numpy(), atol=1e-6
    )
    for name, slot in host.optimizer.slots.items():
        found = meshed.optimizer.slots[name]
        assert axes_of(found) == ROWS
        np.testing.assert_allclose(found.numpy(), slot.numpy(), atol=1e-5)


@pytest.mark.exhaustive
def test_a_dense_layer_after_the_table_trains_as_without_a_mesh(mesh):
    def make():
        keras.utils.set_random_seed(2)
        return keras.Sequential(
            [
                keras.Input([LENGTH], dtype="int64"),
                tlm.layers.ShardedEmbedding(
                    NUM_ROWS, DIM, optimizer=rules.Adam(0.05), name="words"
                ),
                keras.layers.Flatten(),
                keras.layers.Dense(DIM, name="head"),
            ]
        )

    losses = []
    host = make()
    with scope(mesh):
        meshed = make()
    for model in (host, meshed):
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        losses.append(
            model.fit(
                IDS,
                Y[:, 0],
                batch_size=BATCH,
                shuffle=False,
                verbose=0,
                validation_data=(IDS[:16], Y[:16, 0]),
            ).history
        )
    # Sums over devices are computed in a different order.
    for name in losses[0]:
        np.testing.assert_allclose(losses[0][name], losses[1][name], rtol=1e-5)
    np.testing.assert_allclose(
        host.predict(IDS[:5], verbose=0),
        meshed.predict(IDS[:5], verbose=0),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_layer_called_twice_takes_one_step(mesh):
    host = model_of(RULES["adagrad"](), calls=2)
    meshed = on_mesh(mesh, RULES["adagrad"](), calls=2)
    for model in (host, meshed):
        fit(model, 2)
    assert_same_tables(host, meshed)
    assert int(table_of(meshed).optimizer.iterations) == 2


def test_train_on_batch_accepts_a_batch_size_not_divisible_by_the_mesh(mesh):
    host, meshed = model_of(RULES["adam"]()), on_mesh(mesh, RULES["adam"]())
    for model in (host, meshed):
        model.compile("sgd", loss=weighted_sum)
        model.train_on_batch(IDS[:8], Y[:8])
        model.train_on_batch(IDS[:4], Y[:4])
        # With one sample, the mean is exact, so the tables stay equal.
        model.train_on_batch(IDS[:1], Y[:1])
    assert_same_tables(host, meshed)


def test_only_rows_of_the_batch_change(mesh):
    meshed = on_mesh(mesh, RULES["adagrad"]())
    before = table_of(meshed).embeddings.numpy()
    meshed.compile("sgd", loss=weighted_sum)
    meshed.train_on_batch(
        np.full([4, LENGTH], NUM_ROWS - 1),
        np.ones([4, LENGTH, DIM], np.float32),
    )
    changed = np.any(table_of(meshed).embeddings.numpy() != before, axis=1)
    assert np.flatnonzero(changed).tolist() == [NUM_ROWS - 1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_a_function", [True, False])
def test_a_custom_loop_trains_the_table(mesh, in_a_function):
    host, meshed = model_of(RULES["adam"]()), on_mesh(mesh, RULES["adam"]())
    for model in (host, meshed):
        is_meshed = model is meshed
        optimizer = keras.optimizers.SGD(0.1)

        def step(ids, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(weighted_sum(y, model(ids)))
            gradients = tape.gradient(loss, model.trainable_variables)
            assert isinstance(gradients[0], tf.IndexedSlices)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        def put(value, is_meshed=is_meshed):
            return (
                tf.constant(value)
                if not is_meshed
                else tlm.layout.to_mesh(
                    value,
                    dtensor.Layout.batch_sharded(mesh, "batch", value.ndim),
                )
            )

        run = tf.function(step) if in_a_function else step
        with (
            dtensor.default_mesh(mesh)
            if is_meshed and not in_a_function
            else contextlib.nullcontext()
        ):
            for start in range(0, 3 * BATCH, BATCH):
                batch = slice(start, start + BATCH)
                run(put(IDS[batch]), put(Y[batch]))
    assert_same_tables(host, meshed)


def test_gradients_that_are_not_applied_change_nothing(mesh):
    meshed = on_mesh(mesh, RULES["sgd"]())
    before = table_of(meshed).embeddings.numpy()
    meshed.compile("sgd", loss=weighted_sum)
    meshed.evaluate(IDS[:8], Y[:8], verbose=0)
    meshed.predict(IDS[:8], verbose=0)
    np.testing.assert_array_equal(table_of(meshed).embeddings.numpy(), before)
    assert int(table_of(meshed).optimizer.iterations) == 0


def test_learning_rate_schedules_and_loss_scale_are_applied(mesh):
    def optimizer():
        return rules.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
        )

    host, meshed = model_of(optimizer()), on_mesh(mesh, optimizer())
    for model in (host, meshed):
        model.compile(
            keras.optimizers.SGD(0.1, loss_scale_factor=4.0), loss=weighted_sum
        )
        model.fit(IDS[:24], Y[:24], batch_size=BATCH, shuffle=False, verbose=0)
    assert_same_tables(host, meshed)


def test_an_optimizer_made_outside_the_scope_moves_to_the_mesh(mesh):
    host = model_of(RULES["adagrad"]())
    layer = tlm.layers.ShardedEmbedding(
        NUM_ROWS, DIM, optimizer=RULES["adagrad"]()
    )
    meshed = on_mesh(mesh, layer.optimizer)
    for model in (host, meshed):
        fit(model, 2)
    assert_same_tables(host, meshed)


def test_each_device_holds_only_its_rows(mesh):
    meshed = on_mesh(mesh, RULES["adam"]())
    fit(meshed, 1)
    num_parts = mesh.dim_size("model")
    layer = table_of(meshed)
    for variable in (layer.embeddings, *layer.optimizer.slots.values()):
        parts = dtensor.unpack(variable.value.read_value())
        assert len(parts) == 4
        for part in parts:
            assert part.shape == (NUM_ROWS // num_parts, DIM)


@pytest.mark.covering(1, 2)
@pytest.mark.parametrize("verb", ["fit", "predict", "call"])
@pytest.mark.parametrize("bad", [NUM_ROWS, -1])
def test_an_out_of_range_id_raises(mesh, verb, bad):
    meshed = on_mesh(mesh, RULES["sgd"]())
    before = table_of(meshed).embeddings.numpy()
    ids = IDS[:8].copy()
    ids[2, 1] = bad
    meshed.compile("sgd", loss=weighted_sum)
    # The device with the invalid id raises an error. Another device may first
    # raise the error that its peer has stopped.
    with pytest.raises(
        (tf.errors.InvalidArgumentError, tf.errors.CancelledError)
    ):
        if verb == "fit":
            meshed.fit(ids, Y[:8], verbose=0)
        elif verb == "predict":
            meshed.predict(ids, verbose=0)
        else:
            np.asarray(meshed(ids))
        # The error of a function may be raised by the next read.
        table_of(meshed).embeddings.numpy()
    with contextlib.suppress(tf.errors.OpError):
        table_of(meshed).embeddings.numpy()
    np.testing.assert_array_equal(table_of(meshed).embeddings.numpy(), before)


def save_weights(model, path):
    model.save_weights(path / "model.weights.h5")


def load_weights(model, path):
    model.load_weights(path / "model.weights.h5")


def save_checkpoint(model, path):
    tf.train.Checkpoint(model=model).write(str(path / "checkpoint"))


def load_checkpoint(model, path):
    tf.train.Checkpoint(model=model).read(
        str(path / "checkpoint")
    ).assert_existing_objects_matched()


by_files = pytest.mark.parametrize(
    "save, load",
    [(save_weights, load_weights), (save_checkpoint, load_checkpoint)],
)


@pytest.mark.covering(1, 1)
@by_files
@pytest.mark.parametrize(
    "start, end", [("mesh", "host"), ("host", "mesh"), ("mesh", "other mesh")]
)
def test_files_are_loaded_with_and_without_a_mesh(
    save, load, start, end, tmp_path
):
    def make(where):
        if where == "host":
            return model_of(RULES["adam"](), num_shards=3)
        sizes = MESHES["2x2" if where == "mesh" else "1x4"]
        return on_mesh(mesh_of(**sizes), RULES["adam"]())

    first, second = make(start), make(end)
    fit(first, 3)
    save(first, tmp_path)
    load(second, tmp_path)
    assert_same_tables(first, second)
    fit(first, 2)
    fit(second, 2)
    assert_same_tables(first, second)


def test_a_full_model_is_loaded_under_another_layout(mesh, tmp_path):
    host = model_of(RULES["adagrad"](), num_shards=3)
    fit(host, 2)
    host.save(tmp_path / "host.keras")
    with scope(mesh):
        meshed = keras.models.load_model(tmp_path / "host.keras")
    assert_same_tables(host, meshed)
    assert axes_of(table_of(meshed).embeddings) == ROWS
    meshed.save(tmp_path / "mesh.keras")
    again = keras.models.load_model(tmp_path / "mesh.keras")
    assert_same_tables(host, again)


def test_weights_without_an_optimizer_reset_the_tables_optimizer(
    mesh, tmp_path
):
    plain = model_of(None)
    plain.save_weights(tmp_path / "plain.weights.h5")
    meshed = on_mesh(mesh, RULES["adagrad"]())
    fit(meshed, 2)
    meshed.load_weights(tmp_path / "plain.weights.h5")
    layer = table_of(meshed)
    assert int(layer.optimizer.iterations) == 0
    np.testing.assert_array_equal(
        layer.embeddings.numpy(), table_of(plain).embeddings.numpy()
    )
    np.testing.assert_array_equal(
        layer.optimizer.accumulators.numpy(),
        np.full([NUM_ROWS, DIM], 0.1, np.float32),
    )


def test_an_exported_model_serves_without_a_mesh(mesh, tmp_path):
    meshed = on_mesh(mesh, RULES["adagrad"]())
    fit(meshed, 1)
    meshed.export(str(tmp_path), verbose=False)
    served = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(
        served.serve(IDS[:4]), table_of(meshed).embeddings.numpy()[IDS[:4]]
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        served.serve(np.full([1, LENGTH], NUM_ROWS))


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("axes", [None, (None, "model")])
def test_the_models_optimizer_trains_a_table_without_an_optimizer(mesh, axes):
    host, meshed = model_of(None), on_mesh(mesh, None, axes)
    for model in (host, meshed):
        model.compile(keras.optimizers.Adagrad(0.5), loss=weighted_sum)
        model.fit(IDS, Y, batch_size=BATCH, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        table_of(meshed).embeddings.numpy(),
        table_of(host).embeddings.numpy(),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("axes", [None, (None, "model"), ("batch", "model")])
def test_a_layout_that_shards_more_than_the_rows_raises(axes):
    with pytest.raises(
        ValueError,
        match=(
            r"words\.embeddings \(24, 4\) with layout .*layer 'words' .*with "
            r"sharded rows .*set the key \"words\.embeddings\""
        ),
    ):
        on_mesh(mesh_of(batch=2, model=2), RULES["sgd"](), axes)


def test_sharded_rows_without_an_optimizer_raise():
    with pytest.raises(
        ValueError,
        match="layer 'words' .*optimizer=None "
        "would gather the table.*pass an optimizer",
    ):
        on_mesh(mesh_of(batch=2, model=2), None)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_shards=2),
        dict(partitioner=tlm.partitioners.FixedShardsPartitioner(2)),
    ],
)
def test_num_shards_raises_on_a_mesh(options):
    with pytest.raises(ValueError, match="must be None on a mesh"):
        on_mesh(mesh_of(batch=2, model=2), RULES["sgd"](), **options)


def test_float_ids_raise_on_a_mesh():
    meshed = on_mesh(mesh_of(batch=2, model=2), RULES["sgd"]())
    with pytest.raises(
        TypeError, match="ids must be a dense tensor of integers.*float32"
    ):
        table_of(meshed)(np.zeros([2, 3], np.float32))


def accumulating(steps):
    return keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("steps", [2, 3])
def test_accumulated_gradients_are_those_of_a_table_on_the_host(
    mesh, rule, steps
):
    """The last batch of an epoch has fewer samples."""
    host, meshed = model_of(RULES[rule]()), on_mesh(mesh, RULES[rule]())
    for model in (host, meshed):
        model.compile(accumulating(steps), loss=weighted_sum)
        for samples in (5 * BATCH + 4, 3 * BATCH + 1):
            model.fit(
                IDS[:samples],
                Y[:samples],
                batch_size=BATCH,
                epochs=2,
                shuffle=False,
                verbose=0,
            )
    assert int(table_of(meshed).optimizer.iterations) == 20 // steps
    assert_same_tables(host, meshed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", [None, 8.0])
def test_batches_of_accumulated_gradients_may_grow(mesh, scale):
    host = model_of(RULES["adagrad"](), calls=2)
    meshed = on_mesh(mesh, RULES["adagrad"](), calls=2)
    for model in (host, meshed):
        model.compile(
            keras.optimizers.SGD(
                0.1, gradient_accumulation_steps=4, loss_scale_factor=scale
            ),
            loss=weighted_sum,
        )
        for size in (2, 4, 2, 8, 1, 16, 2, 4, 16):
            model.train_on_batch(IDS[:size], Y[:size])
    assert int(table_of(meshed).optimizer.iterations) == 2
    assert_same_tables(host, meshed)


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("in_a_function", [True, False])
def test_a_custom_loop_accumulates_gradients(mesh, in_a_function):
    host, meshed = model_of(RULES["adam"]()), on_mesh(mesh, RULES["adam"]())
    for model in (host, meshed):
        optimizer = accumulating(2)

        def step(ids, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(weighted_sum(y, model(ids)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        run = tf.function(step) if in_a_function else step
        for start in range(0, 5 * BATCH, BATCH):
            batch = slice(start, start + BATCH)
            values = IDS[batch], Y[batch]
            if model is meshed:
                values = [
                    tlm.layout.to_mesh(
                        one,
                        dtensor.Layout.batch_sharded(mesh, "batch", one.ndim),
                    )
                    for one in values
                ]
            else:
                values = [tf.constant(one) for one in values]
            with (
                dtensor.default_mesh(mesh)
                if model is meshed and not in_a_function
                else contextlib.nullcontext()
            ):
                run(*values)
    assert int(table_of(meshed).optimizer.iterations) == 2
    assert_same_tables(host, meshed)


@pytest.mark.exhaustive
@by_files
@pytest.mark.parametrize(
    "start, end", [("mesh", "host"), ("host", "mesh"), ("mesh", "mesh")]
)
def test_accumulated_gradients_are_saved(save, load, start, end, tmp_path):
    def make(where):
        model = (
            model_of(RULES["adam"](), num_shards=3)
            if where == "host"
            else on_mesh(mesh_of(**MESHES["2x2"]), RULES["adam"]())
        )
        model.compile(accumulating(4), loss=weighted_sum)
        return model

    def train(model, first, last):
        for i in range(first, last):
            batch = slice(i * BATCH, (i + 1) * BATCH - i % 3)
            model.train_on_batch(IDS[batch], Y[batch])

    host, first, second = make("host"), make(start), make(end)
    train(host, 0, 12)
    train(first, 0, 6)
    # Creates the variables of the optimizer and of the accumulators.
    train(second, 0, 1)
    save(first, tmp_path)
    load(second, tmp_path)
    train(second, 6, 12)
    assert int(table_of(second).optimizer.iterations) == 3
    assert_same_tables(host, second)


def test_an_asynchronous_save_writes_the_accumulated_gradients_of_its_time():
    model = on_mesh(mesh_of(**MESHES["2x2"]), RULES["sgd"]())
    model.compile(accumulating(8), loss=weighted_sum)
    copies = None
    for number in range(3):
        model.train_on_batch(IDS[:BATCH], Y[:BATCH])
        accumulators = table_of(model).optimizer._table.accumulators
        # TensorFlow copies eagerly in the first save, and in a function later.
        if copies is None:
            copies = object_identity.ObjectIdentityDictionary()
            accumulators.ids._copy_trackable_to_cpu(copies)
            copy = tf.function(
                lambda: accumulators.ids._copy_trackable_to_cpu(copies)
            )
        else:
            copy()
        expected = accumulators.ids.numpy()
        assert len(expected) == (2 * number + 1) * BATCH * LENGTH
        model.train_on_batch(IDS[:BATCH], Y[:BATCH])
        np.testing.assert_array_equal(copies[accumulators.ids], expected)
        assert len(accumulators.ids.numpy()) > len(expected)


def test_a_trace_with_smaller_accumulators_raises():
    """The first trace writes to variables that larger ones have replaced."""
    mesh = mesh_of(batch=2, model=2)
    meshed = on_mesh(mesh, RULES["sgd"]())
    optimizer = accumulating(2)

    @tf.function
    def step(ids, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(weighted_sum(y, meshed(ids)))
        gradients = tape.gradient(loss, meshed.trainable_variables)
        optimizer.apply_gradients(zip(gradients, meshed.trainable_variables))

    def run(size):
        step(
            *(
                tlm.layout.to_mesh(
                    one, dtensor.Layout.replicated(mesh, one.ndim)
                )
                for one in (IDS[:size], Y[:size])
            )
        )

    run(2)
    run(4)
    with pytest.raises(tf.errors.OpError):
        run(2)
        table_of(meshed).embeddings.numpy()
    with contextlib.suppress(tf.errors.OpError):
        table_of(meshed).embeddings.numpy()


def test_explain_shows_the_table_and_its_problems():
    mesh = mesh_of(batch=2, model=2)
    layout_map = tlm.LayoutMap(mesh)
    layout_map["words.embeddings"] = layout_of(mesh, None, "model")
    shown = str(layout_map.explain(model_of(RULES["sgd"]())))
    assert "with sharded rows" in " ".join(shown.split())


RULES_OF_ROWS = {
    "embeddings_regularizer": keras.regularizers.L2(0.25),
    "embeddings_constraint": keras.constraints.UnitNorm(axis=1),
}


def test_rules_apply_on_a_mesh_if_the_models_optimizer_trains():
    tables = []
    for place in (
        contextlib.nullcontext(),
        scope(mesh_of(batch=2, model=2), axes=(None, "model")),
    ):
        with place:
            model = model_of(None, **RULES_OF_ROWS)
            model.compile("sgd", loss=weighted_sum)
            model.fit(IDS[:BATCH], Y[:BATCH], batch_size=BATCH, verbose=0)
        tables.append(np.asarray(model.get_weights()[0]))
    np.testing.assert_allclose(*tables, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(tables[0], axis=1), 1, rtol=1e-5)


CONSTRAINTS = {
    "unit norm": keras.constraints.UnitNorm(axis=1),
    "max norm": keras.constraints.MaxNorm(0.1, axis=1),
    "non-negative": keras.constraints.NonNeg(),
    "function": lambda rows: tf.clip_by_value(rows, -0.01, 0.03),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("steps", [None, 2])
def test_constraints_apply_to_the_rows_of_a_step(mesh, constraint, rule, steps):
    options = {"embeddings_constraint": CONSTRAINTS[constraint]}
    host = model_of(RULES[rule](), **options)
    meshed = on_mesh(mesh, RULES[rule](), **options)
    for model in (host, meshed):
        model.compile(accumulating(steps), loss=weighted_sum)
        for size in (8, 8, 5, 1):
            model.fit(
                IDS[:size], Y[:size], batch_size=4, shuffle=False, verbose=0
            )
    assert_same_tables(host, meshed)


def test_constraints_leave_other_rows_unchanged(mesh):
    meshed = on_mesh(
        mesh,
        RULES["sgd"](),
        embeddings_constraint=lambda rows: tf.ones_like(rows) * 0.3,
    )
    before = table_of(meshed).embeddings.numpy()
    meshed.compile("sgd", loss=weighted_sum)
    meshed.train_on_batch(
        np.full([4, LENGTH], NUM_ROWS - 1),
        np.ones([4, LENGTH, DIM], np.float32),
    )
    after = table_of(meshed).embeddings.numpy()
    np.testing.assert_array_equal(after[:-1], before[:-1])
    np.testing.assert_array_equal(after[-1], np.float32(0.3))


REGULARIZERS = {
    "L1": keras.regularizers.L1(0.25),
    "L2": keras.regularizers.L2(0.125),
    "L1L2": keras.regularizers.L1L2(0.25, 0.125),
}


@pytest.mark.covering(1, 1)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("rule", ["sgd", "adagrad"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("steps", [None, 2])
def test_regularizers_apply_to_the_rows_of_a_step(
    mesh, regularizer, rule, calls, steps
):
    options = {
        "calls": calls,
        "embeddings_regularizer": REGULARIZERS[regularizer],
    }
    host = model_of(RULES[rule](), **options)
    meshed = on_mesh(mesh, RULES[rule](), **options)
    losses = []
    for model in (host, meshed):
        model.compile(accumulating(steps), loss=weighted_sum)
        for size in (8, 8, 5, 1):
            history = model.fit(
                IDS[:size], Y[:size], batch_size=4, shuffle=False, verbose=0
            )
            losses.append(history.history["loss"][0])
        losses.append(model.evaluate(IDS[:8], Y[:8], verbose=0))
    # The terms of a loss are summed in a different order.
    np.testing.assert_allclose(losses[:5], losses[5:], rtol=1e-5)
    if calls == 1:
        assert_same_tables(host, meshed)
        return
    # The gradients of the calls and of their regularizers are summed in a
    # different order.
    found, expected = table_of(meshed), table_of(host)
    np.testing.assert_allclose(
        found.embeddings.numpy(), expected.embeddings.numpy(), atol=1e-6
    )
    for name, slot in expected.optimizer.slots.items():
        np.testing.assert_allclose(
            found.optimizer.slots[name].numpy(), slot.numpy(), rtol=1e-5
        )


@pytest.mark.parametrize(
    "regularizer",
    [keras.regularizers.OrthogonalRegularizer(), lambda rows: tf.norm(rows)],
)
def test_regularizers_of_unknown_sums_raise_on_a_mesh(regularizer):
    with pytest.raises(
        ValueError, match="must be a .*L1, L2 or L1L2 on a mesh"
    ):
        on_mesh(
            mesh_of(batch=2, model=2),
            "sgd",
            embeddings_regularizer=regularizer,
        )


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_initial_values_on_a_mesh_equal_keras_embedding(optimizer):
    keras.utils.set_random_seed(5)
    expected = keras.layers.Embedding(NUM_ROWS, DIM)
    expected.build()
    axes = ROWS if optimizer else (None, "model")
    with scope(mesh_of(batch=2, model=2), axes=axes):
        found = model_of(optimizer).get_weights()[0]
    np.testing.assert_array_equal(found, expected.get_weights()[0])
