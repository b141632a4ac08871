"""Setting the distribution of a thread, as keras.distribution does."""

from typing import Any

import keras

from tf_layoutmap import _checks, _keras_private
from tf_layoutmap.distribution import state
from tf_layoutmap.distribution.base import Distribution
from tf_layoutmap.distribution.parallel import DataParallel, ModelParallel
from tf_layoutmap.layout.keras3 import context as mesh_context


def set_distribution(value: Any) -> None:
    """Places what this thread builds from now on as `value` says.

    A `scope()` or `tlm.layout_map_scope` inside takes precedence. Weights get
    their values at their first use, so layers that a layout does not fit are
    refused then, or by `layout_map.explain(model)`.

    ```python
    tlm.distribution.set_distribution(tlm.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"))
    model = make_model()
    model.compile("adam", "mse")
    model.fit(x, y)
    tlm.distribution.set_distribution(None)
    ```

    Args:
      value: `ModelParallel` or `DataParallel`, ours or Keras' own, which
        `distribution()` then returns; None for none.

    Raises:
      TypeError: It is none of them.
      RuntimeError: DTensor's unsafe all-reduce pass is on in this process.
    """
    mesh_context.set_standing_context(
        None if value is None else _ours(value).context()
    )
    state.note(value)


def _ours(value: Any) -> Distribution:
    """Returns a distribution of Keras' as ours, which places on TensorFlow."""
    if isinstance(value, Distribution):
        return value
    theirs = keras.distribution
    for kind in (theirs.ModelParallel, theirs.DataParallel):
        # A class of the program's own may place variables by other rules.
        if isinstance(value, kind) and type(value).get_variable_layout is (
            kind.get_variable_layout
        ):
            return _counterpart(value)
    return _checks.check_type(
        "value", value, Distribution, "a ModelParallel, a DataParallel or None"
    )


def _counterpart(value: Any) -> Distribution:
    if isinstance(value, keras.distribution.DataParallel):
        return DataParallel(
            value.device_mesh, auto_shard_dataset=value.auto_shard_dataset
        )
    return ModelParallel(
        layout_map=_keras_private.layout_map_of(value),
        batch_dim_name=value.batch_dim_name,
        auto_shard_dataset=value.auto_shard_dataset,
    )
