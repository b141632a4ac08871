"""The scope under which Keras models are placed on a mesh."""

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import keras

from tf_layoutmap._core import checks, keras_private
from tf_layoutmap._patches import engine
from tf_layoutmap.layout import dtensor_switches
from tf_layoutmap.layout.keras3 import initial_values
from tf_layoutmap.layout.keras3.context import MeshContext, activated
from tf_layoutmap.layout.keras_layout_map import as_table
from tf_layoutmap.layout.layout_table import LayoutTable
from tf_layoutmap.layout.mesh.device_mesh import Mesh, prepare_process

# What is given is what the scope yields.
AnyLayoutMap = TypeVar(
    "AnyLayoutMap", bound=LayoutTable | keras.distribution.LayoutMap
)


@contextlib.contextmanager
def layout_map_scope(
    layout_map: AnyLayoutMap,
    *,
    init: str = "sharded",
    batch_dim: str | None = None,
) -> Iterator[AnyLayoutMap]:
    """Layers made under this scope keep their weights on a mesh.

    Each weight becomes a `dtensor.DVariable` with the layout that
    `layout_map` has for its name; one without is replicated. Weights may be
    built under the scope or after it.

    Names, for a layer `d1` with a weight `kernel`:

    * subclassed models: attribute names, `"d1.kernel"`, `"blocks.0.d1.kernel"`;
    * Functional and Sequential models: the name of the layer, then attribute
      names: `"d1.kernel"`;
    * always: the path Keras gives, `"model/d1/kernel"`, also without the
      name of the model, and with dots.

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
        `keras.distribution.LayoutMap`, whose keys then match as Keras matches
        them: the whole path of a variable.
      init: `"sharded"`: each device draws its own part of a weight, so no
        device ever holds more. `"host"`: weights start with the same bits as
        without a mesh, at the price of one whole weight on the host.
      batch_dim: Mesh axis along which `fit`, `evaluate` and `predict` cut
        batches; None for the axis called `"batch"` or `"data"`, if any.

    Yields:
      `layout_map`.

    Raises:
      TypeError: `layout_map` is no LayoutMap.
      ValueError: It has no mesh, `batch_dim` is no axis of it, or, on the way
        out, a layout does not fit a variable.
      RuntimeError: DTensor's unsafe all-reduce pass is on in this process.
    """
    context = prepared_context(as_table(layout_map), init, batch_dim)
    with activated(context), _tf_keras_scope(context):
        yield layout_map
        context.initialize_pending()
    context.check_all_patterns_used()


def prepared_context(
    layout_map: LayoutTable, init: str, batch_dim: str | None
) -> MeshContext:
    """Returns a context for new models, in a process that is ready for it.

    Arguments and errors are those of `layout_map_scope`, for a map that
    `as_table` has returned.
    """
    checks.check_one_of("init", init, initial_values.INITS)
    context = MeshContext(layout_map, init, batch_dim)
    context.batch_dim = _batch_dim(context.mesh, batch_dim)
    prepare_process(context.mesh)
    dtensor_switches.check_process(context.mesh)
    engine.ensure("keras3")
    return context


def _tf_keras_scope(context: MeshContext) -> Any:
    """The scope for tf_keras' models, in a program that uses it."""
    if keras_private.imported_tf_keras() is None:
        return contextlib.nullcontext()
    from tf_layoutmap.layout.tf_keras import patches

    return patches.scope(context)


def _batch_dim(mesh: Mesh, batch_dim: str | None) -> str | None:
    if batch_dim is not None:
        return checks.check_one_of("batch_dim", batch_dim, mesh.dim_names)
    return next((n for n in ("batch", "data") if n in mesh.dim_names), None)
