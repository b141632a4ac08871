"""Known layouts, and layouts with an unsharded dimension.

DTensor selects layouts only when it compiles a function. `known_layout` returns
the layout of a tensor if a pinned layout determines it. `UnshardedDim` gathers
one dimension of a tensor and keeps the sharding of other dimensions.
"""

from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh.device_mesh import Mesh

dtensor = tf.experimental.dtensor

# Ops whose first input has the shape and the layout of the result.
_SAME_LAYOUT = frozenset(
    ("BiasAdd", "Cast", "Identity", "Neg", "Relu", "Elu", "Erf", "Exp", "Log")
    + ("Rsqrt", "Sigmoid", "Softplus", "Sqrt", "Square", "StopGradient", "Tanh")
)
_BINARY = frozenset(("Add", "AddV2", "Maximum", "Minimum", "Mul", "Sub"))


def known_layout(x: Any, depth: int = 16) -> list[str] | None:
    """Returns the sharding specs of a symbolic tensor, if they are known.

    DTensor selects layouts only when it compiles a function. During tracing,
    the layout of a tensor is known if elementwise operations compute it from a
    tensor with a pinned layout. DTensor can shard further dimensions of the
    tensor.

    Args:
      x: A symbolic tensor.
      depth: Maximum number of operations between the pinned tensor and `x`.

    Returns:
      One sharding spec per dimension, or None.
    """
    for _ in range(depth):
        if not tf.is_symbolic_tensor(x):
            return None
        op = x.op
        if op.type == "Relayout":
            layout = op.get_attr("layout").decode()
            if f"{dtensor.MATCH}," in layout:
                return None
            return dtensor.Layout.from_string(layout).sharding_specs
        if op.type in _BINARY:
            inputs = [y for y in op.inputs if y.shape == x.shape]
            if not inputs or not x.shape.is_fully_defined():
                return None
            if len(inputs) == 2:
                specs = known_layout(inputs[0], depth - 1)
                if specs is not None:
                    return specs
            x = inputs[-1]
        elif op.type in _SAME_LAYOUT:
            x = op.inputs[0]
        elif op.type == "IdentityN":
            x = op.inputs[x.value_index]
        elif op.type == "Transpose":
            order = tf.get_static_value(op.inputs[1])
            specs = known_layout(op.inputs[0], depth - 1)
            if order is None or specs is None:
                return None
            return [specs[i] for i in order]
        else:
            return None
    return None


class UnshardedDim:
    """The layout of a tensor, except that one dimension is unsharded.

    A tensor of up to three dimensions keeps only the sharding of its first
    other dimension, unless its layout is known during tracing. For a tensor
    with more dimensions, DTensor determines the layout.
    """

    def __init__(self, x: Any, mesh: Mesh | None, dim: int):
        """Initializes the layout.

        Args:
          x: A symbolic tensor of a function for `mesh`, or an eager tensor on a
            mesh. The rank must be known.
          mesh: `dtensor.Mesh` of a symbolic tensor. Ignored for eager tensors.
          dim: Index of the dimension, which can be negative.
        """
        self._mesh = mesh
        self._like = None
        rank = x.shape.rank
        dim %= rank
        specs = None
        if not tf.is_symbolic_tensor(x):
            layout = dtensor.fetch_layout(x)
            self._mesh, specs = layout.mesh, layout.sharding_specs
        elif (specs := known_layout(x)) is None:
            # A layout can contain MATCH only once.
            specs = [dtensor.UNSHARDED] * rank
            if rank > 1:
                specs[1 if dim == 0 else 0] = dtensor.MATCH
            if rank > 3 and dim > 0:
                # The compiler removes the values, unless DTensor adds up the
                # values of several devices because the dimension is sharded.
                self._like = tf.reduce_any(
                    tf.not_equal(x, x), axis=dim, keepdims=True
                )
        self._specs = [
            dtensor.UNSHARDED if i == dim else spec
            for i, spec in enumerate(specs)
        ]

    def pin(self, x: Any) -> Any:
        """Returns `x` with this layout.

        Args:
          x: A tensor like the tensor of this layout. It may have another size
            in the unsharded dimension.
        """
        if self._like is None:
            return dtensor.relayout(x, dtensor.Layout(self._specs, self._mesh))
        # Each use needs a separate tensor, because DTensor can shard further
        # dimensions of this tensor for the consumers of the result.
        return dtensor.relayout_like(x, tf.broadcast_to(self._like, x.shape))
