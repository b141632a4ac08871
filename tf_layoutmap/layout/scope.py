"""The context in which the weights of new Keras models are on a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import keras

from tf_layoutmap._core import (
    checks,
    keras_private,
    patches,
    strategies,
)
from tf_layoutmap.layout import dtensor_switches
from tf_layoutmap.layout.keras3.context import MeshContext, activated
from tf_layoutmap.layout.keras_map import as_table
from tf_layoutmap.layout.layout_table import LayoutTable
from tf_layoutmap.layout.mesh.device_mesh import (
    Mesh,
    check_devices,
    prepare_process,
)

# The type of the map that is passed to the scope. The scope yields the same
# map.
AnyLayoutMap = TypeVar(
    "AnyLayoutMap", bound=LayoutTable | keras.distribution.LayoutMap
)


@contextlib.contextmanager
def weights_on_mesh(
    layout_map: AnyLayoutMap, batch_dim: str | None
) -> Iterator[AnyLayoutMap]:
    """Places the weights of new layers on the mesh of a layout map.

    Arguments, result and errors are the same as for `tlm.layout_map_scope`,
    except that `layout_map` must be a layout map.
    """
    context = prepared_context(as_table(layout_map), batch_dim)
    with activated(context), _tf_keras_scope(context):
        yield layout_map
        context.initialize_pending()
    context.check_all_patterns_used()


def prepared_context(
    layout_map: LayoutTable, batch_dim: str | None
) -> MeshContext:
    """Prepares the process for DTensor and returns a context for new models.

    The arguments and errors are the same as for `layout_map_scope`, except that
    `layout_map` must be a result of `as_table`.
    """
    context = MeshContext(layout_map, batch_dim)
    context.batch_dim = _batch_dim(context.mesh, batch_dim)
    strategies.check_no_replicas("layout_map_scope")
    check_devices(context.mesh)
    prepare_process(context.mesh)
    dtensor_switches.check_process(context.mesh)
    patches.ensure("keras3")
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
