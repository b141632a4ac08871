"""Layouts of tensors that are known while a function is traced.

DTensor assigns layouts when it compiles a function, so most layouts are unknown
during tracing. `known_axes` searches the inputs of a tensor for a relayout or
for the read of a variable, which set a layout. The result can be wrong, because
DTensor also propagates layouts backwards. Use the result only to choose the
layout of a relayout.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing

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
    return tuple(None if one == dtensor.UNSHARDED else one for one in specs)


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
        axes = next((one for one in known if one is not None), None)
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
            if dtensor.MATCH in specs[1:] or batch is None:
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
