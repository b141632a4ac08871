"""Tests the layouts that are planned for Keras models on a mesh."""

import re

import keras
import numpy as np
import pytest

import tf_layoutmap as tlm
from tests.layout.meshes import mesh_of
from tests.planning import models
from tf_layoutmap.planning import keras_models, search

SIZES = {"batch": 2, "model": 2}


def plan_of(model, sizes=None, **options):
    return keras_models.plan_model(
        model, SIZES if sizes is None else sizes, batch_size=8, **options
    )


def axes_of(plan, *, by_shape=False):
    """Returns the planned axes of each weight, by name or by shape."""
    found = {}
    for item in plan.solution.problem.items:
        choice = plan.solution.choice_of(item)
        for name, axes in choice.layouts.items():
            if by_shape:
                found.setdefault(item.weights[name], set()).add(axes)
            else:
                found[name] = axes
    return found


def item_of(plan, kind):
    items = [i for i in plan.solution.problem.items if i.kind == kind]
    assert len(items) == 1, items
    return items[0]


def reasons_of(plan, kind):
    return [c.refused for c in item_of(plan, kind).choices if c.refused]


def test_attention_is_sharded_by_heads():
    plan = plan_of(models.transformer())
    axes = axes_of(plan)
    for name in ("query", "key", "value"):
        key = f"block_1.attention.{name}_dense"
        assert axes[f"{key}.kernel"] == (None, "model", None)
        assert axes[f"{key}.bias"] == ("model", None)
    output = "block_1.attention.output_dense"
    assert axes[f"{output}.kernel"] == ("model", None, None)
    assert axes[f"{output}.bias"] == (None,)


def test_repeated_layers_share_an_item_and_keys():
    plan = plan_of(models.transformer(layers=3))
    item = item_of(plan, "attention")
    assert len(item.weights) == 3 * 8
    assert item.name == "block_*.attention"
    assert len({*item.keys.values()}) == 8
    assert ".*query_dense.kernel" in item.keys.values()


@pytest.mark.parametrize("is_gated", [False, True])
def test_an_mlp_is_sharded_by_columns_then_rows(is_gated):
    plan = plan_of(models.transformer(is_gated=is_gated))
    axes = axes_of(plan)
    for name in ("up", "gate")[: 1 + is_gated]:
        assert axes[f"block_0.{name}.kernel"] == (None, "model")
        assert axes[f"block_0.{name}.bias"] == ("model",)
    assert axes["block_0.down.kernel"] == ("model", None)
    assert axes["block_0.down.bias"] == (None,)


@pytest.mark.exhaustive
def test_grouped_keys_and_values_are_sharded_if_the_axis_divides_them():
    plan = plan_of(models.transformer(kv_heads=2))
    axes = axes_of(plan)
    assert axes["block_0.attention.query_dense.kernel"] == (None, "model", None)
    assert axes["block_0.attention.key_dense.kernel"] == (None, "model", None)
    plan = plan_of(models.transformer(kv_heads=2), {"model": 4})
    axes = axes_of(plan)
    assert axes["block_0.attention.query_dense.kernel"] == (None, "model", None)
    assert axes["block_0.attention.key_dense.kernel"] == (None, None, None)


def test_heads_that_the_axis_does_not_divide_are_refused():
    plan = plan_of(models.transformer(dim=12, heads=3))
    assert any(
        "axis 'model' of size 2 does not divide 3" in reason
        for reason in reasons_of(plan, "attention")
    )
    axes = axes_of(plan)
    assert axes["block_0.attention.query_dense.kernel"] != (
        None,
        "model",
        None,
    )


def test_norms_are_replicated():
    for name, axes in axes_of(plan_of(models.transformer())).items():
        if "norm" in name:
            assert axes == (None,)


def test_convolutions_are_sharded_by_channels():
    axes = axes_of(plan_of(models.images()))
    for name in ("first", "second"):
        assert "model" in axes[f"{name}.kernel"][2:]
    # The depth multiplier of size 1 is the last dimension.
    assert axes["third.kernel"] == (None, None, "model", None)


def test_experts_are_sharded_by_experts():
    plan = plan_of(models.mixture())
    axes = axes_of(plan)
    assert axes["experts.up"] == ("model", None, None)
    assert axes["experts.down"] == ("model", None, None)
    assert item_of(plan, "experts")


@pytest.mark.exhaustive
def test_the_gates_of_recurrent_layers_are_sharded_and_not_gathered():
    plan = plan_of(models.recurrent())
    assert axes_of(plan)["lstm.cell.kernel"] == (None, "model")
    layout_map = keras_models.layout_map_of(plan, mesh_of(**SIZES))
    with tlm.layout_map_scope(layout_map) as used:
        model = models.compiled(models.recurrent(), "adam")
    models.losses(model)
    measured = used.explain(model).measured
    assert measured
    assert all(one.gathered_bytes == 0 for one in measured)


def test_items_of_recurrent_layers_have_their_kind():
    plan = plan_of(models.recurrent())
    item = item_of(plan, "recurrent")
    assert {*item.weights} == {"lstm.cell.kernel", "lstm.cell.recurrent_kernel"}
    assert "(recurrent, 8 x 32" in plan.explain("lstm")


def test_a_table_that_trains_itself_is_sharded_by_rows():
    plan = plan_of(models.recommender())
    assert axes_of(plan)["words_table.embeddings"] == ("model", None)
    (item,) = (
        i for i in plan.solution.problem.items if i.name == "words_table"
    )
    assert item.kind == "embedding"
    replicated = item.choices[0]
    assert "has an optimizer" in replicated.refused
    # The accumulators of Adagrad, with one row of padding on each mesh.
    memory = plan.solution.choice_of(item).memory
    assert memory["weights"] == memory["slot variables"] == 17 * 8 * 4
    with pytest.raises(ValueError, match="'replicate' is not possible: words_"):
        plan_of(models.recommender(), pins={"words_table": "replicate"})


def test_a_table_can_be_sharded_over_both_axes_if_memory_is_short():
    model = models.transformer(vocabulary=1024)
    tight = plan_of(model, memory=int(models.fewest_bytes(model, SIZES) * 1.02))
    assert set(axes_of(tight)["words.embeddings"]) == {"batch", "model"}
    loose = plan_of(model, memory="1GiB")
    assert loose.step_seconds < tight.step_seconds


def test_without_a_limit_no_step_gathers_weights():
    plan = plan_of(models.transformer())
    assert "batch" not in {a for axes in axes_of(plan).values() for a in axes}
    reasons = reasons_of(plan, "attention")
    assert any("pass `memory` to allow it" in r for r in reasons)


def test_odd_dimensions_are_replicated_with_reasons():
    model = models.transformer(dim=15, heads=3, hidden=21, vocabulary=33)
    plan = plan_of(model, {"batch": 2, "model": 2})
    assert not any(a for axes in axes_of(plan).values() for a in axes)
    for item in plan.solution.problem.items:
        if item.kind == "vector":
            continue
        assert plan.choices[item.name] == "replicate"
        others = item.choices[1:]
        assert others
        assert all("does not divide" in c.refused for c in others), item.name
    assert len(plan.layout_map()) == 0


def test_the_names_of_layers_do_not_change_the_plan():
    plans = [plan_of(models.functional_mlp(p)) for p in ("", "z_", "a.b-1_")]
    first = plans[0].solution
    for plan in plans[1:]:
        assert [*plan.choices.values()] == [*plans[0].choices.values()]
        assert axes_of(plan, by_shape=True) == axes_of(plans[0], by_shape=True)
        assert plan.solution.memory() == first.memory()
        assert plan.step_seconds == first.step_seconds


def test_functional_sequential_and_subclassed_models_have_the_same_plan():
    subclassed = models.SubclassedMlp()
    subclassed(np.zeros((8, 8), "float32"))
    plans = [
        plan_of(model)
        for model in (models.mlp(), models.functional_mlp(), subclassed)
    ]
    for plan in plans:
        assert axes_of(plan) == {
            "one.kernel": (None, "model"),
            "one.bias": ("model",),
            "two.kernel": ("model", None),
            "two.bias": (None,),
            "three.kernel": (None, "model"),
            "three.bias": ("model",),
            "four.kernel": ("model", None),
            "four.bias": (None,),
        }
        assert plan.solution.memory() == plans[0].solution.memory()


def test_a_model_without_inputs_is_planned_layer_by_layer():
    class Untraceable(models.SubclassedMlp):
        def call(self, x):
            raise RuntimeError("cannot be called")

    model = Untraceable()
    shape = (None, 8)
    for layer in (model.one, model.two, model.three, model.four):
        layer.build(shape)
        shape = layer.compute_output_shape(shape)
    axes = axes_of(plan_of(model))
    assert all("model" in axes[f"{n}.kernel"] for n in ("one", "two", "three"))


def test_pins_fix_choices():
    model = models.transformer()
    plan = plan_of(model, pins={"words": "replicate"})
    assert axes_of(plan)["words.embeddings"] == (None, None)
    plan = plan_of(model, pins={"words": "rows"})
    assert axes_of(plan)["words.embeddings"] == ("model", None)
    with pytest.raises(ValueError, match="no_such"):
        plan_of(model, pins={"no_such": "rows"})


def test_a_pin_that_exceeds_the_budget_raises():
    model = models.transformer(vocabulary=4096)
    with pytest.raises(search.PlanDoesNotFitError, match="words"):
        plan_of(
            model,
            memory=int(models.fewest_bytes(model, SIZES) * 1.1),
            pins={"words": "replicate"},
        )


def test_a_plan_is_used_on_its_own_mesh_only():
    plan = plan_of(models.mlp())
    other = mesh_of(batch=1, model=4)
    with pytest.raises(ValueError, match="was made for a mesh"):
        keras_models.layout_map_of(plan, other)
    layout_map = keras_models.layout_map_of(plan, mesh_of(**SIZES))
    assert layout_map.axes_of(layout_map["one.kernel"]) == (None, "model")


def test_a_model_without_weights_raises():
    with pytest.raises(ValueError, match="must have weights"):
        plan_of(models.SubclassedMlp())
    with pytest.raises(TypeError, match="Keras 3 model"):
        plan_of("model")


def test_the_keys_of_a_map_select_the_planned_layouts_only():
    model = models.transformer(layers=3, is_gated=True)
    plan = plan_of(model)
    layout_map = keras_models.layout_map_of(plan, mesh_of(**SIZES))
    explanation = layout_map.explain(model)
    assert explanation.ok
    assert not explanation.contested
    planned = axes_of(plan)
    assert {v.name: v.axes for v in explanation.variables} == planned
    assert ".*up.kernel" in layout_map
    assert "words.embeddings" in layout_map
    assert len(layout_map) < len(model.weights) / 2


def test_weights_with_the_same_name_are_replicated():
    inputs = keras.Input((8,))
    one, two = (keras.layers.Dense(8, name="same") for _ in range(2))
    hidden = one(inputs)
    total = keras.layers.Add()([hidden, keras.layers.Dense(8)(hidden)])

    class Holder(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = [keras.Model(inputs, total), keras.Sequential([two])]

        def call(self, x):
            return self.inner[1](self.inner[0](x))

    model = Holder()
    model(np.zeros((2, 8), "float32"))
    plan = plan_of(model)
    layout_map = keras_models.layout_map_of(plan, mesh_of(**SIZES))
    assert {
        v.name: v.axes for v in layout_map.explain(model).variables
    } == axes_of(plan)


def test_sharded_columns_of_a_table_spread_to_all_layers():
    """DTensor then shards all residual connections."""
    model = models.transformer()
    plans = {
        pin: tlm.plan(
            model,
            mesh={"batch": 2, "model": 2},
            memory="1GiB",
            pins={"words": f"{pin} over model", "head": "replicate"},
            costs=tlm.planning.MachineCosts.typical(),
        )
        for pin in ("rows", "columns")
    }
    assert plans["rows"].solution.shared_costs == {}
    assert len(plans["columns"].solution.shared_costs) == 1
    assert "Activations remain sharded" in plans["columns"].explain("words")
    assert plans["rows"].step_seconds < plans["columns"].step_seconds


def test_a_smaller_batch_is_suggested_if_activations_do_not_fit():
    model = models.transformer(vocabulary=1024, layers=1)
    options = {
        "mesh": SIZES,
        "optimizer": "sgd",
        "costs": tlm.planning.MachineCosts.typical(),
        "memory": models.fewest_bytes(model, SIZES, "sgd"),
    }
    with pytest.raises(search.PlanDoesNotFitError) as caught:
        tlm.plan(model, batch_size=4 * models.SAMPLES, **options)
    message = str(caught.value)
    assert re.search(
        "Each plan also needs [0-9,]+ bytes of activations", message
    )
    # `fewest_bytes` assumes this batch size.
    assert "batches of 8 samples (batch_size=8)" in message
    assert tlm.plan(model, batch_size=models.SAMPLES, **options)
