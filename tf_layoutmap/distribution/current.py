"""Setting the distribution of a thread, as keras.distribution does."""

from typing import Any

from tf_layoutmap import _checks
from tf_layoutmap.distribution import state
from tf_layoutmap.distribution.parallel import ModelParallel
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
      value: `ModelParallel` or `DataParallel` of ours; None for none.

    Raises:
      TypeError: It is none of them.
      RuntimeError: DTensor's unsafe all-reduce pass is on in this process.
    """
    if type(value).__module__.startswith("keras."):
        name = type(value).__name__
        raise TypeError(
            f"keras.distribution.{name} shards nothing on TensorFlow; use "
            f"tlm.distribution.{name}. Received: {value!r}.")
    if value is not None:
        _checks.check_type("value", value, ModelParallel,
                           "a ModelParallel, a DataParallel or None")
    mesh_context.set_standing_context(
        None if value is None else value.context())
    state.note(value)
