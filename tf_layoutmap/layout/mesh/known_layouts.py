"""Layouts of tensors that are known while a function is traced.

DTensor assigns layouts when it compiles a function, so most layouts are unknown
during tracing. `known_axes` searches the inputs of a tensor for a relayout or
for the read of a variable, which set a layout. The result can be wrong, because
DTensor also propagates layouts backwards. Use the result only to choose the
layout of a relayout.

`UnshardedDim` gathers one dimension of a tensor and keeps the sharding of other
dimensions.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh

dtensor = tf.experimental.dtensor

# Mesh axis of each dimension of a tensor.
Axes = tuple[str | None, ...]

# Ops whose results have the layout of an input of the same shape.
_ELEMENTWISE = frozenset(
    """
    Abs Add AddN AddV2 BiasAdd Cast Ceil CheckNumerics Div DivNoNan Elu EluGrad
    Erf Exp Expm1 Floor Identity LeakyRelu LeakyReluGrad Log Log1p Maximum
    Minimum Mul MulNoNan Neg Pow PreventGradient RealDiv Reciprocal Relu Relu6
    Relu6Grad ReluGrad Round Rsqrt RsqrtGrad SelectV2 Selu SeluGrad Sigmoid
    SigmoidGrad Sign Softplus SoftplusGrad Softsign SoftsignGrad Sqrt SqrtGrad
    Square SquaredDifference StopGradient Sub Tanh TanhGrad ZerosLike OnesLike
    """.split()
)
# Maximum number of ops that are searched.
_MAX_OPS = 64


def known_axes(x: Any) -> Axes | None:
    """Returns the mesh axis of each dimension of `x`; None if it is unknown.

    Args:
      x: An eager tensor, or a symbolic tensor of a function for a mesh.
    """
    if not tf.is_symbolic_tensor(x):
        if not tracing.on_mesh(x):
            return None
        return _axes(dtensor.fetch_layout(x).sharding_specs)
    visited: set[tuple[Any, int]] = set()
    return _search(x, visited)


def _axes(specs: Any) -> Axes:
    return tuple(None if spec == dtensor.UNSHARDED else spec for spec in specs)


def _search(x: Any, visited: set[tuple[Any, int]]) -> Axes | None:
    op, index = x.op, x.value_index
    if (op, index) in visited or len(visited) == _MAX_OPS:
        return None
    visited.add((op, index))

    def of(y: Any) -> Axes | None:
        return _search(y, visited)

    axes = None
    if op.type == "Relayout":
        axes = _of_relayout(op, of)
    elif op.type == "ReadVariableOp":
        axes = _of_variable(op)
    elif op.type == "IdentityN":
        axes = of(op.inputs[index])
    elif op.type in _ELEMENTWISE:
        known = (
            of(y)
            for y in op.inputs
            if y.shape.is_fully_defined() and y.shape == x.shape
        )
        axes = next(
            (candidate for candidate in known if candidate is not None), None
        )
    elif op.type in ("ExpandDims", "Squeeze", "Transpose"):
        axes = _of_view(op, of)
    return None if axes is None or len(axes) != x.shape.rank else axes


def _of_relayout(op: Any, of: Callable[[Any], Axes | None]) -> Axes | None:
    layout = dtensor.Layout.from_string(tf.compat.as_str(op.get_attr("layout")))
    specs = list(layout.sharding_specs)
    if dtensor.MATCH in specs:
        before = of(op.inputs[0])
        if before is None:
            # Most of these relayouts keep the sharding of the samples.
            batch = tracing.batch_dim_of_trace()
            size = op.outputs[0].shape[0]
            if (
                dtensor.MATCH in specs[1:]
                or batch is None
                or not size
                or size % layout.mesh.dim_size(batch)
            ):
                return None
            before = (batch, *[None] * (len(specs) - 1))
        return tuple(
            old if new == dtensor.MATCH else new
            for old, new in zip(before, _axes(specs))
        )
    return _axes(specs)


def _of_variable(op: Any) -> Axes | None:
    handle = op.inputs[0]
    for outer, inner in getattr(op.graph, "captures", ()):
        if inner is handle:
            with tf.init_scope():
                return known_axes(outer)
    return None


def _of_view(op: Any, of: Callable[[Any], Axes | None]) -> Axes | None:
    x = op.inputs[0]
    before = of(x)
    if before is None:
        return None
    if op.type == "Squeeze":
        dims = {d % len(before) for d in op.get_attr("squeeze_dims")}
        dims = dims or {d for d, size in enumerate(x.shape) if size == 1}
        return tuple(a for d, a in enumerate(before) if d not in dims)
    positions = tf.get_static_value(op.inputs[1])
    if positions is None:
        return None
    if op.type == "Transpose":
        return tuple(before[d] for d in positions)
    after = list(before)
    after.insert(int(positions) % (len(before) + 1), None)
    return tuple(after)


def _can_be_like(shape: tf.TensorShape, dim: int) -> bool:
    """Returns whether DTensor can determine the layout of other dimensions."""
    return shape.is_fully_defined() and shape.rank > 3 and dim % shape.rank > 0


class UnshardedDim:
    """The layout of a tensor, except that one dimension is unsharded.

    A tensor of up to three dimensions, or of unknown size, keeps only the
    sharding of its first other dimension, unless its layout is known during
    tracing. For other tensors, DTensor determines the layout.
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
        if not tf.is_symbolic_tensor(x):
            self._mesh = dtensor.fetch_layout(x).mesh
        axes = known_axes(x)
        if axes is not None:
            specs = [
                dtensor.UNSHARDED if axis is None else axis for axis in axes
            ]
        else:
            # A layout can contain MATCH only once.
            specs = [dtensor.UNSHARDED] * rank
            if rank > 1:
                specs[1 if dim == 0 else 0] = dtensor.MATCH
            if _can_be_like(x.shape, dim):
                # The compiler removes the values, unless DTensor adds up the
                # values of several devices because the dimension is sharded.
                self._like = tf.reduce_any(
                    tf.not_equal(x, x), axis=dim, keepdims=True
                )
        self._specs = [
            dtensor.UNSHARDED if i == dim else spec
            for i, spec in enumerate(specs)
        ]

    @staticmethod
    def keeps_sharding(x: Any, dim: int) -> bool:
        """Returns whether all other dimensions of `x` keep their sharding.

        Args:
          x: As in `__init__`.
          dim: As in `__init__`.
        """
        return _can_be_like(x.shape, dim) or known_axes(x) is not None

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
