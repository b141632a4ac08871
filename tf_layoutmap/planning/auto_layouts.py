"""`AutoLayoutMap`: the layout map of `layout_map_scope("auto")`.

The map is empty until a model is planned: at the end of the scope, in the first
step of a model that is built later, or when a weight of a built model is read.
The layouts of a weight that has a value are never changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import keras

from tf_layoutmap._core import checks, user_warnings
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.keras3.host_layers import LOOKUPS
from tf_layoutmap.layout.layout_map import LayoutMap
from tf_layoutmap.layout.mesh.device_mesh import (
    axis_sizes,
    check_mesh,
    to_dtensor_mesh,
)
from tf_layoutmap.layout.mesh.errors import LayoutMapWarning
from tf_layoutmap.layout.variable_names import ObjectPaths
from tf_layoutmap.planning import keras_models, planned_map
from tf_layoutmap.planning.plan import Plan


class AutoLayoutMap(LayoutMap):
    """A `LayoutMap` whose entries are planned."""

    def __init__(
        self,
        mesh: Any = None,
        *,
        batch_dim: str | None = None,
        memory: int | str | None = None,
        optimizer: Any = None,
        batch_size: int | None = None,
        pins: Mapping[str, str] | None = None,
    ):
        """Initializes an empty map.

        Args:
          mesh: `dtensor.Mesh` or `DeviceMesh`.
          batch_dim: Mesh axis that shards batches.
          memory: See `tlm.plan`.
          optimizer: See `tlm.plan`.
          batch_size: Samples per step; None for 32.
          pins: See `tlm.plan`.

        Raises:
          TypeError: If `mesh` is not a mesh.
        """
        super().__init__(to_dtensor_mesh(check_mesh("mesh", mesh)))
        if batch_size is not None:
            checks.check_int("batch_size", batch_size, lowest=1)
        self.planner = AutoPlanner(
            self,
            axis_sizes(mesh),
            dict(
                memory=memory,
                optimizer=optimizer,
                batch_size=batch_size or 32,
                batch_dim=batch_dim,
            ),
            dict(pins or {}),
        )

    @property
    def plan(self) -> Plan:
        """The plan of the model.

        Raises:
          RuntimeError: If no model is planned yet, or several models are.
        """
        plans = self.planner.plans
        if len(plans) != 1:
            raise RuntimeError(
                "`plan` requires that one model was planned. Received: "
                f"{len(plans)} planned models. "
                + (
                    "Use `plans`."
                    if plans
                    else "A model is planned when the scope ends, or in its "
                    "first step if it is not built then."
                )
            )
        return plans[0]

    @property
    def plans(self) -> list[Plan]:
        """The plans of all models of the scope."""
        return list(self.planner.plans)


class AutoPlanner:
    """Plans the models of a scope, each of them once."""

    def __init__(
        self,
        layout_map: AutoLayoutMap,
        sizes: dict[str, int],
        options: dict[str, Any],
        pins: dict[str, str],
    ):
        # The map refers to the planner.
        self._layout_map = weakref.ref(layout_map)
        self._sizes, self._options, self._pins = sizes, options, pins
        self._planned: weakref.WeakSet[Any] = weakref.WeakSet()
        self._known: set[int] = set()
        # The model and the inputs of the step that is being prepared.
        self._step: tuple[Any, Any] | None = None
        self.plans: list[Plan] = []

    def is_planned(self, variable: Any) -> bool:
        """Returns whether the layout of a pending variable is known."""
        return self._without_plan(variable) or id(variable) in self._known

    def _without_plan(self, variable: Any) -> bool:
        """Returns whether the layout of a variable is not planned.

        A slot variable has the layout of its table.
        """
        owner, is_state = assignments.owner_of(variable)
        is_slot = getattr(variable, "_slot_of", None) is not None
        return is_state or owner is None or is_slot

    def plan_for_variable(self, context: Any, variable: Any) -> None:
        """Plans the model of a variable; None plans all complete models.

        Raises:
          RuntimeError: If no built model contains the variable.
        """
        with context.registry.lock:
            if variable is None:
                paths = ObjectPaths(context.registry.layers)
                for root in paths.outermost():
                    if self._is_complete(root):
                        self._plan(root, context)
                return
            if self.is_planned(variable):
                return
            owner, _ = assignments.owner_of(variable)
            paths = ObjectPaths(context.registry.layers)
            for root in paths.outermost(owner):
                if isinstance(root, keras.Model) and self._is_complete(root):
                    self._plan(root, context)
            if id(variable) not in self._known:
                raise RuntimeError(
                    "A weight can be read or assigned only if a built model "
                    'contains it, because layout_map_scope("auto") plans '
                    "complete models. Received: weight "
                    f"{variable.path!r} {tuple(variable.shape)}, which no "
                    "built model contains. Build the model first, for example "
                    "with `model.build(input_shape)`, and read the weight "
                    "after the scope."
                )

    def start_step(self, model: Any, batch: Any) -> None:
        """Records the model and the batch of a step that builds the model.

        The optimizer reads layouts when the model is built. Layers that the
        model does not use are not built then.
        """
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self._step = model, inputs

    def plan_for_step(self, context: Any, model: Any) -> None:
        """Plans the model of a step that is about to run."""
        with context.registry.lock:
            paths = ObjectPaths(context.registry.layers)
            for root in paths.outermost(model):
                self._plan(root, context)
        self._step = None

    def _is_complete(self, root: Any) -> bool:
        if self._step is not None and root is self._step[0]:
            return True
        # Keras does not build the `StringLookup` of a `TextVectorization`.
        return bool(root.weights) and all(
            layer.built or isinstance(layer, LOOKUPS)
            for layer in root._flatten_layers()
        )

    def _plan(self, root: Any, context: Any) -> None:
        inputs = (
            self._step[1]
            if self._step is not None and root is self._step[0]
            else None
        )
        pending = [
            w for w in root.weights if getattr(w, "_value", None) is None
        ]
        new = [w for w in pending if id(w) not in self._known]
        if not new:
            return
        if root in self._planned:
            self._known.update(id(w) for w in new)
            user_warnings.warn(
                f"{len(new)} weights of model {root.name!r} were built after "
                "its layouts were planned, and are replicated, for example "
                f"{new[0].path!r}. Build the complete model in the scope.",
                LayoutMapWarning,
            )
            return
        layout_map = self._layout_map()
        assert layout_map is not None
        plan = keras_models.plan_model(
            root,
            self._sizes,
            inputs=inputs,
            pins=self._pins or None,
            **self._options,
        )
        problem, selected = plan.solution.problem, plan.solution.selected
        for key, axes in planned_map.keys_and_axes(problem, selected).items():
            layout = layout_map[key] if key in layout_map else None
            if layout is not None and layout_map.axes_of(layout) != axes:
                raise ValueError(
                    "Models of one scope must have different names of weights "
                    f"to be planned. Received: key {key!r} for two models. "
                    "Use a separate scope for each model."
                )
            if layout is None:
                layout_map[key] = axes
        self._planned.add(root)
        self._known.update(id(w) for w in root.weights)
        self.plans.append(plan)
        keras_models.check_layouts(
            problem, selected, root, context.assign_layouts
        )
