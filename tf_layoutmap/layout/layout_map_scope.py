"""The scope that places the weights of Keras models on a mesh."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import keras

from tf_layoutmap._core import checks, keras_private, literals
from tf_layoutmap._patches import engine
from tf_layoutmap.layout import dtensor_switches
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.keras3.context import MeshContext, activated
from tf_layoutmap.layout.keras_layout_map import as_table
from tf_layoutmap.layout.layout_table import LayoutTable
from tf_layoutmap.layout.mesh.device_mesh import Mesh, prepare_process

# The scope yields the map that was passed, with the same type.
AnyLayoutMap = TypeVar(
    "AnyLayoutMap", bound=LayoutTable | keras.distribution.LayoutMap
)


@contextlib.contextmanager
def layout_map_scope(
    layout_map: AnyLayoutMap,
    *,
    init: literals.Init = "sharded",
    batch_dim: str | None = None,
) -> Iterator[AnyLayoutMap]:
    """Places the weights of layers that are created in the scope on a mesh.

    Each weight becomes a `dtensor.DVariable` with the layout that `layout_map`
    has for its name. A weight without a layout is replicated. Weights may be
    built inside the scope or later.

    A weight `kernel` of a layer `d1` has these names:

    * in subclassed models, attribute names: `"d1.kernel"` or
      `"blocks.0.d1.kernel"`;
    * in Functional and Sequential models, the name of the layer, then
      attribute names: `"d1.kernel"`;
    * in all models, the path of the variable in Keras, `"model/d1/kernel"`,
      also without the name of the model, and with dots.

    ```python
    layout_map = tlm.LayoutMap(mesh=mesh)
    layout_map["d1.kernel"] = dtensor.Layout(["unsharded", "model"], mesh)
    with tlm.layout_map_scope(layout_map):
        model = keras.Sequential([
            keras.Input((10,)), keras.layers.Dense(20, name="d1")])
    model.layers[0].kernel.layout
    model.compile("adam", "mse")
    model.fit(x, y)
    ```

    Args:
      layout_map: `tlm.LayoutMap`, `tlm.distribution.LayoutMap`, or
        `keras.distribution.LayoutMap`. As in Keras, the keys of a Keras map
        must match the full path of a variable.
      init: `"sharded"`: each device draws its shard of a weight, so no device
        ever holds more than its shard. `"host"`: the initial values are
        bitwise identical to the values without a mesh; the host holds one
        unsharded weight at a time.
      batch_dim: Mesh axis along which `fit`, `evaluate` and `predict` shard
        batches. None selects the axis named `"batch"` or `"data"`, if any.

    Yields:
      `layout_map`.

    Raises:
      TypeError: If `layout_map` is not a LayoutMap.
      ValueError: If the map has no mesh, if `batch_dim` is not an axis of the
        mesh, or, on exit, if a layout does not fit a variable.
      RuntimeError: If an unsafe pass of DTensor is enabled in this process.
    """
    context = prepared_context(as_table(layout_map), init, batch_dim)
    with activated(context), _tf_keras_scope(context):
        yield layout_map
        context.initialize_pending()
    context.check_all_patterns_used()


def prepared_context(
    layout_map: LayoutTable, init: str, batch_dim: str | None
) -> MeshContext:
    """Prepares the process for DTensor and returns a context for new models.

    Arguments and errors are the same as for `layout_map_scope`, except that
    `layout_map` is the result of `as_table`.
    """
    checks.check_one_of("init", init, initial_values.INITS)
    context = MeshContext(layout_map, init, batch_dim)
    context.batch_dim = _batch_dim(context.mesh, batch_dim)
    prepare_process(context.mesh)
    dtensor_switches.check_process(context.mesh)
    engine.ensure("keras3")
    return context


def _tf_keras_scope(context: MeshContext) -> Any:
    """Returns the scope for tf_keras models if tf_keras is imported."""
    if keras_private.imported_tf_keras() is None:
        return contextlib.nullcontext()
    from tf_layoutmap.layout.tf_keras import patches

    return patches.scope(context)


def _batch_dim(mesh: Mesh, batch_dim: str | None) -> str | None:
    if batch_dim is not None:
        return checks.check_one_of("batch_dim", batch_dim, mesh.dim_names)
    return next((n for n in ("batch", "data") if n in mesh.dim_names), None)
