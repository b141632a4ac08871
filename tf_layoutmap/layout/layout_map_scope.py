"""The scope that places the weights of Keras models on a mesh.

`as_table` converts a `keras.distribution.LayoutMap` to a `LayoutTable`. As in
Keras, the keys of this table must match the full path of a variable.
"""

from __future__ import annotations

import contextlib
import importlib
import typing
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack

import keras

from tf_layoutmap._core import checks, keras_private, lazy, literals
from tf_layoutmap._patches import engine
from tf_layoutmap.layout import dtensor_switches
from tf_layoutmap.layout.keras3.context import MeshContext, activated
from tf_layoutmap.layout.key_matching import Match
from tf_layoutmap.layout.layout_table import LayoutTable
from tf_layoutmap.layout.mesh.device_mesh import (
    AnyMesh,
    Mesh,
    prepare_process,
    to_dtensor_mesh,
)

# Attribute of a Keras layout map that holds its `_KerasLayoutTable`.
_TABLE = "_tf_layoutmap_table"


def as_table(layout_map: Any) -> LayoutTable:
    """Returns the `LayoutTable` of a layout map of this package or of Keras.

    Raises:
      TypeError: If `layout_map` is not a layout map.
    """
    if isinstance(layout_map, LayoutTable) or not isinstance(
        layout_map, keras.distribution.LayoutMap
    ):
        return checks.check_type(
            "layout_map", layout_map, LayoutTable, "a LayoutMap"
        )
    table = getattr(layout_map, _TABLE, None)
    if table is None:
        table = _KerasLayoutTable(layout_map)
        setattr(layout_map, _TABLE, table)
    return table


class _KerasLayoutTable(LayoutTable):
    """The entries of a Keras layout map, which user code can still change.

    Exactly one key may match the full path that Keras gives to a variable.
    """

    _refuses_two = True

    def __init__(self, layout_map: keras.distribution.LayoutMap):
        mesh = layout_map.device_mesh
        super().__init__(
            None if mesh is None else to_dtensor_mesh(mesh), match="fullmatch"
        )
        self._keras_map = layout_map
        self._synchronize()

    def _synchronize(self) -> None:
        """Copies the entries that user code has changed since the last call."""
        current = dict(self._keras_map.items())
        if list(current) == list(self._layouts) and all(
            self._layouts[key] is layout for key, layout in current.items()
        ):
            return
        for key in list(self._layouts):
            del self[key]
        for key, layout in current.items():
            self[key] = layout

    def find(
        self, keys: Sequence[str], *, names_of_others: Container[str] = ()
    ) -> Match | None:
        self._synchronize()
        return super().find(keys, names_of_others=names_of_others)

    def _names_to_match(self, path: str, names: Sequence[str]) -> Sequence[str]:
        del names
        return [path]

    def _is_layer_output(self, key: str) -> bool:
        # Keras looks up the path of a layer and this suffix.
        return key.endswith("/output")

    def mesh_in_use(self) -> Mesh:
        self._synchronize()
        return super().mesh_in_use()

    def __iter__(self) -> Iterator[str]:
        self._synchronize()
        return super().__iter__()

    def axes_of(self, value: Any) -> tuple[str | None, ...]:
        return tuple(value.axes)

    def _mesh_of(self, value: Any) -> Mesh | None:
        return (
            None
            if value.device_mesh is None
            else to_dtensor_mesh(value.device_mesh)
        )

    def _check_layout(self, key: Any, layout: Any) -> Any:
        del key
        return layout


# The type of the map that is passed to the scope. The scope yields the same
# map.
AnyLayoutMap = TypeVar(
    "AnyLayoutMap", bound=LayoutTable | keras.distribution.LayoutMap
)


class PlanOptions(TypedDict, total=False):
    """Arguments of a scope that plans its layouts.

    Attributes:
      mesh: `dtensor.Mesh` or `DeviceMesh`; required.
      memory: Bytes of each device, for example `"16GiB"`; None shards what can
        be sharded without gathering weights in each step.
      optimizer: Optimizer of Keras 3 or its name; None for the optimizer with
        which a model was compiled in the scope, or Adam.
      batch_size: Samples per step; None for 32.
      pins: Choices that are fixed, by the name of an item or weight.
    """

    mesh: AnyMesh | None
    memory: int | str | None
    optimizer: Any
    batch_size: int | None
    pins: Mapping[str, str] | None


@contextlib.contextmanager
def layout_map_scope(
    layout_map: AnyLayoutMap | Literal["auto"],
    *,
    batch_dim: str | None = None,
    init: literals.Init | None = None,
    **plan_options: Unpack[PlanOptions],
) -> Iterator[AnyLayoutMap | LayoutTable]:
    """Places the weights of layers that are created in the scope on a mesh.

    Each weight becomes a `dtensor.DVariable`. The initial value of a weight is
    bitwise identical to its initial value without a mesh. The layout of a
    weight is the layout that `layout_map` returns for the name of the weight.
    If the map has no layout for a weight, the weight is replicated. Weights may
    be built inside the scope or later.

    A weight `kernel` of a layer `d1` has these names:

    * in subclassed models, attribute names: `"d1.kernel"` or
      `"blocks.0.d1.kernel"`;
    * in Functional and Sequential models, the name of the layer, then
      attribute names: `"d1.kernel"`;
    * in all models, the path of the variable in Keras, `"model/d1/kernel"`. The
      path can also be written without the name of the model, or with dots
      instead of slashes.

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

    With `"auto"`, the layouts are planned when the scope ends, before any
    weight is allocated. A model whose layers are not built then is planned in
    its first step. If a weight is read or assigned in the scope, for example by
    `from_preset`, the built model that contains it is planned at that time. A
    weight that no built model contains cannot be read.

    ```py
    with tlm.layout_map_scope("auto", mesh=mesh) as layout_map:
        model = build_model()
    print(layout_map.plan)
    ```

    Args:
      layout_map: `tlm.LayoutMap`, `tlm.distribution.LayoutMap`, or
        `keras.distribution.LayoutMap`. As in Keras, the keys of a Keras map
        must match the full path of a variable. `"auto"` plans the layouts.
      batch_dim: Mesh axis along which `fit`, `evaluate` and `predict` shard
        batches. None selects the axis named `"batch"` or `"data"`, if any.
      init: Deprecated, has no effect.
      **plan_options: Only with `"auto"`: `mesh`, and the arguments `memory`,
        `optimizer`, `batch_size` and `pins` of `tlm.plan`.

    Yields:
      `layout_map`. With `"auto"`, a `tlm.LayoutMap` that the planner fills, and
      whose attribute `plan` is the plan.

    Raises:
      TypeError: If `layout_map` is not a LayoutMap, or if `mesh` is missing or
        is not a mesh.
      ValueError: If the map has no mesh, if `batch_dim` is not an axis of the
        mesh, or, on exit, if a layout does not fit a variable.
      RuntimeError: If an unsafe pass of DTensor is enabled in this process.
    """
    if init is not None:
        # The context manager adds frames to the call stack, so `stacklevel` is
        # 5.
        warn_of_init(init, stacklevel=5)
    found = with_auto_layouts(layout_map, batch_dim, **plan_options)
    context = prepared_context(as_table(found), batch_dim)
    with activated(context), _tf_keras_scope(context):
        yield found
        context.initialize_pending()
    context.check_all_patterns_used()


def with_auto_layouts(
    layout_map: Any, batch_dim: str | None, **options: Unpack[PlanOptions]
) -> Any:
    """Returns a layout map that a planner fills, or `layout_map` itself.

    Args:
      layout_map: A layout map, or `"auto"`.
      batch_dim: Mesh axis that shards batches.
      **options: See `PlanOptions`.

    Raises:
      TypeError: If `layout_map` is another string, or if options are passed
        with a layout map.
    """
    if isinstance(layout_map, str) and layout_map == "auto":
        # The planner uses this package, and is therefore imported by name.
        planner = importlib.import_module("tf_layoutmap.planning.auto_layouts")
        return planner.AutoLayoutMap(batch_dim=batch_dim, **options)
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise TypeError(
            f"Arguments {', '.join(f'`{name}`' for name in given)} of "
            'layout_map_scope require layout_map="auto". Received: '
            f"layout_map={layout_map!r}. A LayoutMap has its own mesh."
        )
    return layout_map


def warn_of_init(init: str, stacklevel: int) -> None:
    """Warns that the argument `init` has no effect."""
    checks.check_one_of("init", init, typing.get_args(literals.Init))
    lazy.warn_of_unused_argument("init", stacklevel)


def prepared_context(
    layout_map: LayoutTable, batch_dim: str | None
) -> MeshContext:
    """Prepares the process for DTensor and returns a context for new models.

    The arguments and errors are the same as for `layout_map_scope`, except that
    `layout_map` must be a result of `as_table`.
    """
    context = MeshContext(layout_map, batch_dim)
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
