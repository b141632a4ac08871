"""Memory and time of the layouts of a group of weights.

The memory is exact for weights and slot variables. The time is an estimate: the
operations that each device computes, and the tensors that devices exchange.
This module does not depend on TensorFlow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tf_layoutmap.layout.mesh import shard_shapes
from tf_layoutmap.planning.layout_choices import Group, MeshAxes, Option
from tf_layoutmap.planning.problem import Axes
from tf_layoutmap.planning.step_graph import StepGraph, Use

# The gradients of a product are two products of the same size.
_FORWARD_AND_BACKWARD = 3
# An all-gather or a reduce-scatter sends half as many bytes as an all-reduce.
_HALF = 0.5


class Costs(Protocol):
    """Speed of a machine (see `MachineCosts`)."""

    def seconds_of_collective(
        self, num_bytes: float, num_devices: int
    ) -> float: ...

    def seconds_of_flops(self, num_flops: float) -> float: ...

    def seconds_of_copy(self, num_bytes: float) -> float: ...


# Returns the bytes per device of the slot variables of a weight with a local
# shape.
SlotBytes = Callable[[int, tuple[int, ...]], int]


class LayoutCosts:
    """Computes the memory and the time of layouts."""

    def __init__(
        self,
        graph: StepGraph,
        shapes: Sequence[tuple[int, ...]],
        itemsizes: Sequence[int],
        trainable: Sequence[bool],
        slot_bytes: SlotBytes,
        mesh: MeshAxes,
        costs: Costs,
    ):
        self._graph, self._shapes, self._itemsizes = graph, shapes, itemsizes
        self._trainable, self._slot_bytes = trainable, slot_bytes
        self._mesh, self._costs = mesh, costs

    def local_shape(self, weight: int, axes: Axes) -> tuple[int, ...]:
        return shard_shapes.local_shape(
            axes, self._shapes[weight], self._mesh.sizes
        )

    def memory(self, axes: Mapping[int, Axes]) -> dict[str, int]:
        """Returns the bytes on each device, by part."""
        found = {"weights": 0, "slot variables": 0, "gradients": 0}
        for weight, one in axes.items():
            local = self.local_shape(weight, one)
            size = math.prod(local) * self._itemsizes[weight]
            found["weights"] += size
            if self._trainable[weight]:
                found["slot variables"] += self._slot_bytes(weight, local)
                # A gradient is computed before it is sharded along the axis of
                # the batch.
                found["gradients"] += (
                    math.prod(
                        self.local_shape(weight, self._without_batch(one))
                    )
                    * self._itemsizes[weight]
                )
        return found

    def _without_batch(self, axes: Axes) -> Axes:
        return tuple(None if a == self._mesh.batch else a for a in axes)

    def seconds(self, group: Group, option: Option) -> dict[str, float]:
        """Returns the time per step on each device, by part."""
        compute, collectives = 0.0, 0.0
        for weight in group.weights:
            axes = option.axes[weight]
            collectives += self._seconds_of_weight(weight, axes)
            local = math.prod(self.local_shape(weight, axes))
            if self._trainable[weight]:
                compute += self._costs.seconds_of_copy(
                    local * self._itemsizes[weight]
                    + self._slot_bytes(weight, self.local_shape(weight, axes))
                )
            is_lookup = False
            for use in self._graph.uses[weight]:
                op = self._graph.ops[use.op]
                is_lookup = is_lookup or op.kind == "lookup"
                parts = self._mesh.batch_parts if self._by_batch(use) else 1
                parts *= math.prod(
                    self._mesh.sizes[a]
                    for a in self._without_batch(axes)
                    if a is not None
                )
                compute += self._costs.seconds_of_flops(
                    _FORWARD_AND_BACKWARD * op.flops / parts
                )
                collectives += self._seconds_of_use(weight, use, axes, option)
            if group.kind == "recurrent" and any(self._without_batch(axes)):
                collectives += self._gather(
                    math.prod(self._shapes[weight]) * self._itemsizes[weight],
                    self._axis_of(self._without_batch(axes)),
                )
            if not self._graph.uses[weight] and any(self._without_batch(axes)):
                for _ in self._graph.other_uses[weight]:
                    collectives += 2 * self._gather(
                        math.prod(self._shapes[weight])
                        * self._itemsizes[weight],
                        self._axis_of(self._without_batch(axes)),
                    )
        more_compute, more = self._seconds_between(group, option)
        return {
            "compute": compute + more_compute,
            "collectives": collectives + more,
        }

    def _axis_of(self, axes: Axes) -> str:
        return next(a for a in axes if a is not None)

    def _by_batch(self, use: Use) -> bool:
        return self._graph.is_batch(self._graph.ops[use.op].outputs[0])

    def _activation_bytes(self, tensor: int) -> float:
        parts = self._mesh.batch_parts if self._graph.is_batch(tensor) else 1
        return self._graph.tensors[tensor].num_bytes / parts

    def _sum(self, num_bytes: float, axis: str) -> float:
        return self._costs.seconds_of_collective(
            num_bytes, self._mesh.sizes[axis]
        )

    def _gather(self, num_bytes: float, axis: str) -> float:
        return self._sum(_HALF * num_bytes, axis)

    def _seconds_of_weight(self, weight: int, axes: Axes) -> float:
        """Returns the time of collectives along the axis of the batch."""
        batch = self._mesh.batch
        if batch is None or self._mesh.batch_parts == 1:
            return 0.0
        size = (
            math.prod(self.local_shape(weight, self._without_batch(axes)))
            * self._itemsizes[weight]
        )
        if batch not in axes:
            # The gradients of all replicas are summed.
            return self._sum(size, batch) if self._trainable[weight] else 0.0
        # The weight is gathered, and its gradient is summed and sharded.
        uses = max(len(self._graph.uses[weight]), 1)
        return uses * self._gather(size, batch) + (
            self._gather(size, batch) if self._trainable[weight] else 0.0
        )

    def _seconds_of_use(
        self, weight: int, use: Use, axes: Axes, option: Option
    ) -> float:
        """Returns the time of the collectives of one product."""
        op = self._graph.ops[use.op]
        result = self._activation_bytes(op.outputs[0])
        arguments = sum(
            self._activation_bytes(t)
            for t in op.inputs
            if self._graph.is_activation[t]
        )
        found = 0.0
        for dim, axis in enumerate(self._without_batch(axes)):
            if axis is None:
                continue
            if dim in use.contracted:
                found += self._sum(result, axis)
                if option.shared is None:
                    # The gradient of the argument is gathered.
                    found += self._gather(
                        0 if op.kind == "lookup" else arguments, axis
                    )
            elif dim in use.dims:
                if option.shared is None:
                    found += self._gather(result, axis)
                if op.kind == "lookup":
                    # The gradient of a table with sharded columns is dense.
                    found += self._costs.seconds_of_copy(
                        math.prod(self.local_shape(weight, axes))
                        * self._itemsizes[weight]
                    )
                else:
                    # The gradient of the argument is summed.
                    found += self._sum(arguments, axis)
        return found

    def _seconds_between(
        self, group: Group, option: Option
    ) -> tuple[float, float]:
        """Returns the time of operations between the products of a group.

        Returns:
          The time of products of activations, such as attention scores, and
          the time of collectives.
        """
        graph = self._graph
        roots = {one.shared for one in group.options if one.shared is not None}
        if not roots:
            return 0.0, 0.0
        axis = None
        if option.shared is not None:
            axis = next(
                a
                for one in option.axes.values()
                for a in self._without_batch(one)
                if a is not None
            )
        compute, collectives = 0.0, 0.0
        for op in graph.ops:
            if op.kind in ("convolution", "lookup"):
                continue
            inputs = [
                (i, t)
                for i, t in enumerate(op.inputs)
                if graph.is_activation[t]
            ]
            if len(inputs) == 2 and op.kind == "product":
                classes = {
                    graph.class_of(t, d)
                    for _, t in inputs
                    for d in range(len(graph.tensors[t].shape))
                }
                if not classes & roots:
                    continue
                parts = (
                    self._mesh.batch_parts
                    if graph.is_batch(op.outputs[0])
                    else 1
                )
                if axis is not None and option.shared in classes:
                    parts *= self._mesh.sizes[axis]
                compute += self._costs.seconds_of_flops(
                    _FORWARD_AND_BACKWARD * op.flops / parts
                )
            if axis is None:
                continue
            kept = {dim for dim, _ in op.same}
            summed = {dim for pair in op.contracted for dim in pair}
            for i, tensor in inputs:
                for d in range(len(graph.tensors[tensor].shape)):
                    if graph.class_of(tensor, d) != option.shared:
                        continue
                    if (i, d) in summed:
                        if len(inputs) == 2:
                            collectives += self._sum(
                                self._activation_bytes(op.outputs[0]), axis
                            )
                    elif (i, d) not in kept and op.outputs:
                        collectives += 2 * self._gather(
                            self._activation_bytes(tensor), axis
                        )
        return compute, collectives
