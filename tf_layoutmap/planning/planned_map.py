"""The layout map of a plan for a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.layout_map import LayoutMap
from tf_layoutmap.layout.mesh import device_mesh
from tf_layoutmap.planning.problem import Axes, Problem
from tf_layoutmap.planning.search import choice_named


def keys_and_axes(
    problem: Problem, selected: Mapping[str, str]
) -> dict[str, Axes]:
    """Returns the entries of the layout map of the selected choices."""
    entries: dict[str, Axes] = {}
    for item in problem.items:
        for weight, axes in choice_named(
            item, selected[item.name]
        ).layouts.items():
            if any(axes):
                entries[item.keys[weight]] = axes
    return entries


def layout_map_of(plan: Any, mesh: Any = None) -> LayoutMap:
    """Returns the `LayoutMap` of a plan for a mesh.

    Args:
      plan: A `Plan`.
      mesh: `dtensor.Mesh` or `DeviceMesh`; None creates a mesh of the first
        devices.

    Raises:
      ValueError: If the plan was made for another mesh.
    """
    if mesh is None:
        sizes = plan.target.sizes
        devices = device_mesh.list_devices()[: math.prod(sizes.values())]
        mesh = tf.experimental.dtensor.create_mesh(
            list(sizes.items()), devices=[d.upper() for d in devices]
        )
    plan.check_mesh(device_mesh.axis_sizes(mesh))
    layout_map = LayoutMap(device_mesh.to_dtensor_mesh(mesh))
    solution = plan.solution
    for key, axes in keys_and_axes(solution.problem, solution.selected).items():
        layout_map[key] = axes
    return layout_map
