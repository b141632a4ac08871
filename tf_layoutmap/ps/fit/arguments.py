"""The arguments of `fit` and `evaluate` where the data are `Datasets`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap import _checks
from tf_layoutmap.ps.datasets import Datasets

# What says how arrays become batches; and what tf_keras has for queues.
_OF_ARRAYS = (
    "y",
    "batch_size",
    "validation_split",
    "class_weight",
    "sample_weight",
)
_WITHOUT_MEANING = (
    "shuffle",
    "max_queue_size",
    "workers",
    "use_multiprocessing",
)


def read(
    original: Callable[..., Any],
    verb: str,
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Returns the arguments by name, or None if `x` is no `Datasets`.

    Args:
      original: The method of Keras.
      verb: Its name.
      model: Is called.
      args: Without the model.
      kwargs: By name.

    Raises:
      TypeError: As of a call of the method.
      ValueError: An argument is given that is for arrays, or a number of
        steps is below 1.
    """
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    given = {**given, **given.pop("kwargs", {})}
    data = given.pop("x", None)
    if not isinstance(data, Datasets):
        return None
    given.pop(next(iter(inspect.signature(original).parameters)))
    for name in _WITHOUT_MEANING:
        given.pop(name, None)
    for name in _OF_ARRAYS:
        value = given.pop(name, None)
        if value is not None and not (
            name == "validation_split" and value == 0
        ):
            raise ValueError(
                f"Argument `{name}` of `{verb}` must be left out with "
                "tlm.ps.Datasets, whose batches `dataset_fn` makes, with "
                "targets and weights of samples, (x, y, sample_weight). "
                f"Received: {value!r}."
            )
    for name in ("steps_per_epoch", "validation_steps", "steps"):
        if given.get(name) is not None:
            _checks.check_int(name, given[name], lowest=1)
    return {"data": data, **given}


def callbacks_of(callbacks: Any, kind: type) -> list[Any]:
    """Returns those of a class.

    Args:
      callbacks: As of `fit`: None, one, several, or a CallbackList of Keras.
      kind: The class.
    """
    return [
        one
        for one in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks))
        if isinstance(one, kind)
    ]


def no_prediction() -> ValueError:
    """What to raise where `predict` is given `Datasets`."""
    return ValueError(
        "Argument `x` of `predict` must be arrays or a tf.data.Dataset over "
        "parameter servers, which this process reads in order. Received: "
        "tlm.ps.Datasets, whose batches end in any order."
    )
