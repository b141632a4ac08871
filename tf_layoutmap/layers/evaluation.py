"""Whether Keras runs its own step of an evaluation or a prediction.

A lookup that no tape records uses TensorFlow's ops, because its graph may be
exported and must then not depend on this package. The functions of `evaluate`
and `predict` are never exported, so that their lookups can use ops of this
package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tf_layoutmap._core import function_traces
from tf_layoutmap._core.patch_entry import Patch


class _State(threading.local):
    is_running: bool = False


_state = _State()


def is_running() -> bool:
    """Returns whether the caller is part of such a step.

    A `tf.function` that calls this function has separate traces for both
    results.
    """
    return function_traces.depends_on(_is_running)


def _is_running() -> bool:
    return _state.is_running


def make_step_function(
    original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Makes the function of an evaluation or a prediction, as Keras does.

    If the model contains no layer that uses these ops, Keras makes its usual
    function.

    Args:
      original: The replaced method `make_test_function` or
        `make_predict_function`.
      model: The model.
      *args: Positional arguments of the method.
      **kwargs: Keyword arguments of the method.
    """
    layers = getattr(model, "_flatten_layers", tuple)()
    if any(getattr(layer, "_uses_fused_lookups", False) for layer in layers):
        model = _Evaluated(model)
    return original(model, *args, **kwargs)


def patches_of_steps(group: str, owner: str, version: str) -> tuple[Patch, ...]:
    """Returns the entries for the models of one version of Keras."""
    return tuple(
        Patch(
            group,
            owner,
            name,
            make_step_function,
            "A layer cannot find out whether its graph may be exported, so "
            "that `evaluate` and `predict` take several times as long.",
            version,
            "tests/layers/base/test_evaluation.py",
        )
        for name in ("make_test_function", "make_predict_function")
    )


class _Evaluated:
    """A model whose steps make `is_running` true.

    The steps of the model itself are not changed, because a program can export
    functions that call them.
    """

    def __init__(self, model: Any) -> None:
        vars(self)["_model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def test_step(self, data: Any) -> Any:
        """Runs the step of an evaluation."""
        return _running(self._model.test_step, data)

    def predict_step(self, data: Any) -> Any:
        """Runs the step of a prediction."""
        return _running(self._model.predict_step, data)


def _running(step: Callable[[Any], Any], data: Any) -> Any:
    # With several replicas, each replica runs the step in its own thread.
    before, _state.is_running = _state.is_running, True
    try:
        return step(data)
    finally:
        _state.is_running = before
