"""The scope that places the weights of Keras models on a mesh.

The scope plans layouts if it gets `"auto"` instead of a layout map. The module
`layout.scope` implements all other parts of the scope.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from tf_layoutmap.layout import scope
from tf_layoutmap.layout.mesh.device_mesh import AnyMesh
from tf_layoutmap.layout.scope import AnyLayoutMap

if TYPE_CHECKING:
    from tf_layoutmap.layout.layout_map import LayoutMap


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
    **plan_options: Unpack[PlanOptions],
) -> Iterator[AnyLayoutMap | LayoutMap]:
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
    selected_map = with_auto_layouts(layout_map, batch_dim, **plan_options)
    with scope.weights_on_mesh(selected_map, batch_dim) as used:
        yield used


def with_auto_layouts(
    layout_map: Any, batch_dim: str | None, **options: Unpack[PlanOptions]
) -> Any:
    """Returns a layout map that a planner fills, or `layout_map` itself.

    Args:
      layout_map: A layout map, or `"auto"`.
      batch_dim: Mesh axis that shards batches.
      **options: See `PlanOptions`.

    Raises:
      TypeError: If `layout_map` is another string, if options are passed with a
        layout map, or if an option is not in `PlanOptions`.
    """
    unknown = sorted(options.keys() - PlanOptions.__annotations__.keys())
    if unknown:
        raise TypeError(
            "Options of a scope must be `batch_dim` and, with "
            f'layout_map="auto", {", ".join(PlanOptions.__annotations__)}. '
            f"Received: {', '.join(unknown)}."
        )
    if isinstance(layout_map, str) and layout_map == "auto":
        # The planner is imported only if a program uses it.
        from tf_layoutmap.planning.auto_layouts import AutoLayoutMap

        return AutoLayoutMap(batch_dim=batch_dim, **options)
    passed = [name for name, value in options.items() if value is not None]
    if passed:
        raise TypeError(
            f"Arguments {', '.join(f'`{name}`' for name in passed)} of "
            'layout_map_scope require layout_map="auto". Received: '
            f"layout_map={layout_map!r}. A LayoutMap has its own mesh."
        )
    return layout_map
