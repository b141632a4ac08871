"""Tests scopes that plan the layouts of the models created in them."""

import keras
import numpy as np
import pytest
import tf_keras

import tf_layoutmap as tlm
from tests.layout.meshes import axes_of, mesh_of
from tests.planning import models
from tf_layoutmap.planning import keras_models, search
from tf_layoutmap.planning.auto_layouts import AutoLayoutMap

SIZES = {"batch": 2, "model": 2}


def losses_without_mesh(make):
    keras.utils.set_random_seed(1)
    return models.losses(models.compiled(make()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make", [models.mlp, models.transformer], ids=["mlp", "transformer"]
)
def test_a_planned_model_trains_like_one_device(make):
    expected = losses_without_mesh(make)
    keras.utils.set_random_seed(1)
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)) as layout_map:
        model = make()
        assert all(w._value is None for w in model.weights)
        assert not layout_map
    np.testing.assert_allclose(
        models.losses(models.compiled(model)), expected, rtol=1e-5
    )
    explanation = layout_map.explain(model)
    assert explanation.ok and not explanation.contested
    assert [v.axes for v in explanation.variables] == [
        axes_of(w) for w in model.weights
    ]
    assert layout_map.plan.choices[
        "one.kernel" if make is models.mlp else "words"
    ]


@pytest.mark.exhaustive
def test_the_printed_map_gives_the_same_weights():
    mesh = mesh_of(**SIZES)
    keras.utils.set_random_seed(1)
    with tlm.layout_map_scope("auto", mesh=mesh) as planned:
        first = models.transformer()
    copy = tlm.LayoutMap(mesh)
    for key, layout in planned.items():
        copy[key] = layout
    keras.utils.set_random_seed(1)
    with tlm.layout_map_scope(copy):
        second = models.transformer()
    for one, two in zip(first.weights, second.weights, strict=True):
        assert axes_of(one) == axes_of(two)
        np.testing.assert_array_equal(one.numpy(), two.numpy())


def test_a_model_that_is_built_later_is_planned_in_its_first_step():
    mesh = mesh_of(**SIZES)
    with tlm.layout_map_scope("auto", mesh=mesh) as layout_map:
        model = models.SubclassedMlp()
    assert not layout_map
    with pytest.raises(RuntimeError, match="0 planned models"):
        _ = layout_map.plan
    models.compiled(model)
    x = np.ones((8, 8), "float32")
    model.fit(x, np.zeros(8), batch_size=8, verbose=0)
    assert axes_of(model.one.kernel) == (None, "model")
    assert axes_of(model.two.kernel) == ("model", None)
    assert layout_map.plan.target.sizes == SIZES


def test_a_weight_of_a_built_model_can_be_read_in_the_scope():
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)) as layout_map:
        model = models.mlp()
        value = np.ones((8, 16), "float32")
        model.get_layer("one").kernel.assign(value)
        assert layout_map
    kernel = model.get_layer("one").kernel
    assert axes_of(kernel) == (None, "model")
    np.testing.assert_array_equal(kernel.numpy(), value)


def test_a_model_with_a_text_vectorization_is_planned():
    """Checks a layer whose inner `StringLookup` is never built."""
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)):
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="string"),
                keras.layers.TextVectorization(
                    vocabulary=["a", "b"], output_mode="multi_hot"
                ),
                keras.layers.Dense(8),
            ]
        )
    assert model.get_weights()[0].shape == (3, 8)


def test_a_weight_without_a_model_cannot_be_read_in_the_scope():
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)):
        layer = keras.layers.Dense(4, name="alone")
        layer.build((None, 8))
        with pytest.raises(RuntimeError, match="alone/kernel.*Build the model"):
            layer.kernel.numpy()


def test_an_eager_call_in_the_scope_plans_the_model():
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)) as layout_map:
        model = models.SubclassedMlp()
        model(np.ones((8, 8), "float32"))
        assert layout_map
    assert axes_of(model.one.kernel) == (None, "model")


def test_planning_does_not_change_names_and_seeds():
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)):
        models.transformer()
    planned = keras.layers.Dropout(0.5), keras.optimizers.Adam()
    seed = np.asarray(planned[0].seed_generator.state)
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    models.transformer()
    other = keras.layers.Dropout(0.5), keras.optimizers.Adam()
    assert [one.name for one in planned] == [one.name for one in other]
    np.testing.assert_array_equal(
        seed, np.asarray(other[0].seed_generator.state)
    )


def test_weights_that_are_built_after_the_plan_are_reported():
    class WithUnusedLayer(models.SubclassedMlp):
        def __init__(self):
            super().__init__()
            self.late = keras.layers.Dense(4)

    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)):
        model = models.compiled(WithUnusedLayer())
    model.fit(np.ones((8, 8)), np.zeros(8), batch_size=8, verbose=0)
    assert axes_of(model.one.kernel) == (None, "model")
    model.late.build((None, 4))
    with pytest.warns(tlm.layout.LayoutMapWarning, match="built after"):
        model.late.kernel.numpy()
    assert axes_of(model.late.kernel) == (None, None)


def test_memory_limits_the_plan():
    mesh = mesh_of(**SIZES)
    with (
        pytest.raises(search.PlanDoesNotFitError, match="What would fit: "),
        tlm.layout_map_scope("auto", mesh=mesh, memory="1KiB"),
    ):
        models.mlp()
    with tlm.layout_map_scope("auto", mesh=mesh, memory="1GiB") as layout_map:
        models.mlp()
    assert "batches of 32 samples" in layout_map.plan.notes[0]
    # Small matrices are faster if they are replicated.
    assert not layout_map


def test_pins_apply_to_a_scope():
    pins = {"one": "replicate"}
    with tlm.layout_map_scope(
        "auto", mesh=mesh_of(**SIZES), pins=pins
    ) as layout_map:
        model = models.mlp()
    assert axes_of(model.get_layer("one").kernel) == (None, None)
    assert layout_map.plan.choices["one.kernel"] == "replicate"


def test_model_parallel_plans_its_scope():
    expected = losses_without_mesh(models.mlp)
    keras.utils.set_random_seed(1)
    devices = tlm.distribution.list_devices()[:4]
    distribution = tlm.distribution.ModelParallel(
        "auto",
        device_mesh=tlm.distribution.DeviceMesh(
            (2, 2), ("batch", "model"), devices
        ),
    )
    with distribution.scope():
        model = models.mlp()
    np.testing.assert_allclose(
        models.losses(models.compiled(model)), expected, rtol=1e-5
    )
    assert axes_of(model.get_layer("one").kernel) == (None, "model")
    assert isinstance(distribution.layout_map, AutoLayoutMap)


def test_wrong_arguments_raise():
    mesh = mesh_of(**SIZES)
    with (
        pytest.raises(TypeError, match="`mesh`"),
        tlm.layout_map_scope("auto"),
    ):
        pass
    with (
        pytest.raises(TypeError, match='`memory`.*"auto"'),
        tlm.layout_map_scope(tlm.LayoutMap(mesh), memory="1GiB"),
    ):
        pass
    for layout_map in (tlm.LayoutMap(mesh), "auto"):
        with (
            pytest.raises(TypeError, match="pins. Received: memroy"),
            tlm.layout_map_scope(layout_map, memroy="1GiB"),
        ):
            pass
    with (
        pytest.raises(TypeError, match="a LayoutMap"),
        tlm.layout_map_scope("automatic"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="batch_size"),
        tlm.layout_map_scope("auto", mesh=mesh, batch_size=0),
    ):
        pass
    with pytest.raises(TypeError, match="memory"):
        tlm.distribution.ModelParallel(
            layout_map=tlm.LayoutMap(mesh), memory="1GiB"
        )


def test_a_plan_is_equal_to_the_plan_of_the_scope():
    model = models.transformer()
    plan = keras_models.plan_model(model, SIZES)
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)) as layout_map:
        models.transformer()
    assert layout_map.plan == plan


def test_models_of_tf_keras_raise():
    with pytest.raises(
        TypeError, match="Keras 3.*tf_keras model 'old'.*Pass a tlm.LayoutMap"
    ):
        tlm.plan(
            tf_keras.Sequential(
                [tf_keras.layers.Dense(4, input_shape=(8,))], name="old"
            ),
            mesh=SIZES,
            costs=tlm.planning.MachineCosts.typical(),
        )
    with (
        pytest.raises(
            NotImplementedError,
            match="\"auto\" requires.*Keras 3.*layer 'old'.*tlm.LayoutMap",
        ),
        tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)),
    ):
        tf_keras.layers.Dense(4, name="old")(tf_keras.Input((8,)))


@pytest.mark.exhaustive
def test_slot_variables_of_a_table_get_the_planned_layout():
    keras.utils.set_random_seed(1)
    expected = models.losses(models.compiled(models.recommender(), "sgd"))
    keras.utils.set_random_seed(1)
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)):
        model = models.recommender()
    table = model.get_layer("words_table")
    assert axes_of(table.embeddings) == ("model", None)
    assert axes_of(table.optimizer.accumulators) == ("model", None)
    np.testing.assert_allclose(
        models.losses(models.compiled(model, "sgd")), expected, rtol=1e-5
    )


@pytest.mark.exhaustive
def test_recurrent_models_are_planned_in_a_scope():
    expected = losses_without_mesh(models.recurrent)
    keras.utils.set_random_seed(1)
    with tlm.layout_map_scope("auto", mesh=mesh_of(**SIZES)):
        model = models.recurrent()
    assert axes_of(model.get_layer("lstm").cell.kernel) == (None, "model")
    np.testing.assert_allclose(
        models.losses(models.compiled(model)), expected, rtol=1e-5
    )
