"""All tables train in all ways in which a program can compute gradients.

A case compares the losses and the trained values with stock TensorFlow or
Keras, or expects one clear error.
"""

import functools

import numpy as np
import pytest

from tests import covering
from tests.gradients import calls, subjects

# Each call of these layers is a step, or has a gradient that DTensor cannot
# compute in a loop.
NOT_VECTORIZED = (
    "tpu embedding",
    "open tpu embedding",
    "embedding with optimizer on a mesh",
    "open embedding on a mesh",
)

FORWARD_IN_FUNCTION = (
    "forward_in_function",
    "both_in_functions",
    "forward_in_nested_functions",
    "recompute_grad_in_function",
    "fit",
)


def error_of(kind, runtime, way):
    """Returns words of the error that a case raises, or None."""
    # With several replicas, each call of this layer is a step, too.
    is_step = kind == "open embedding" and "replicas" in runtime
    if way == "vectorized_map" and (is_step or kind in NOT_VECTORIZED):
        # An evaluation on a mesh looks the keys up in the traced function.
        on_mesh = "|in a traced function on the mesh" * kind.endswith("mesh")
        return "vectorized_map" + on_mesh
    if "replicas" in runtime and way in FORWARD_IN_FUNCTION:
        return "inside `strategy.run`"
    if kind == "open embedding on a mesh" and way in (
        *FORWARD_IN_FUNCTION,
        "step_in_function",
        "nested_tapes_in_function",
    ):
        return "in a traced function on the mesh"
    return None


# For these ways, `make test` runs only a few cases, because other ways are
# similar.
RARE = (
    "forward_in_nested_functions",
    "recompute_grad",
    "nested_tapes",
    "both_in_functions",
)


def cases():
    """Returns all cases. The cases that pairs do not require are marked."""
    found = [
        (kind, runtime, way, first, training)
        for kind, runtime in subjects.kinds()
        for way in calls.WAYS
        for first in ("training", "evaluation")
        for training in (None, True, False)
        # A loop without Keras has no layer and no argument `training`.
        if not (runtime == "loop" and (way == "fit" or training is not None))
        # Keras passes the argument.
        if not (way == "fit" and training is not None)
    ]
    usual = [case for case in found if case[2] not in RARE]
    rare = [case for case in found if case[2] in RARE]
    selected = {
        *(usual[index] for index in covering.covering(usual, 2)),
        *(rare[index] for index in covering.covering(rare, 1)),
    }
    return [
        pytest.param(
            *case, marks=[] if case in selected else [pytest.mark.exhaustive]
        )
        for case in found
    ]


@functools.cache
def expected(runtime, way, first):
    program = subjects.stock(runtime)
    return calls.WAYS[way](program, first), program.values()


@pytest.mark.covering(1, 20)
@pytest.mark.parametrize(
    ("kind", "runtime", "way", "first", "training"), cases()
)
def test_gradients_equal_stock(kind, runtime, way, first, training):
    error = error_of(kind, runtime, way)
    with subjects.created(kind, runtime, training) as program:
        if error is not None:
            with pytest.raises(Exception, match=error):
                calls.WAYS[way](program, first)
            return
        losses = calls.WAYS[way](program, first)
        values = program.values()
    stock_runtime = runtime.partition(",")[0].replace("mesh", "keras")
    stock_losses, stock_values = expected(stock_runtime, way, first)
    np.testing.assert_allclose(losses, stock_losses, rtol=1e-5)
    for name, value in values.items():
        np.testing.assert_allclose(
            value, stock_values[name], rtol=1e-5, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("way", ["recompute_grad", "nested_tapes"])
def test_keys_on_the_host_of_a_mesh_train(way, monkeypatch):
    monkeypatch.setattr(
        subjects.MeshModel, "place", lambda program, *batch: batch
    )
    test_gradients_equal_stock(
        "open embedding on a mesh", "mesh", way, "training", None
    )


@pytest.mark.parametrize("way", calls.WAYS)
def test_the_stock_models_of_both_keras_versions_train_equally(way):
    _, found = expected("keras", way, "training")
    _, other = expected("tf_keras", way, "training")
    for name, value in found.items():
        np.testing.assert_allclose(value, other[name], rtol=1e-5)
    moved = np.abs(found["rows"] - 1).max(1) > 0
    assert np.flatnonzero(moved).tolist() == [0, 1, 3, 5, 7]
    assert (found["kernel"] != subjects.KERNEL).all()
