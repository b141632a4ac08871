"""Operations of `keras.ops` that Keras makes in a way DTensor cannot divide."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private
from tf_layoutmap.layout.keras3.context import context_of
from tf_layoutmap.layout.keras3.variable import MeshVariable
from tf_layoutmap.layout.mesh import pinning, tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh, axes_of_layout
from tf_layoutmap.layout.ops import corrections, einsum_axes
from tf_layoutmap.layout.replication import gathered_reads

dtensor = tf.experimental.dtensor


def einsum(
    original: Callable[..., Any],
    subscripts: str,
    *operands: Any,
    **options: Any,
) -> Any:
    """`keras.ops.einsum`; in layers on a mesh, TensorFlow's own.

    Keras computes most of them as matrix products of reshaped operands. DTensor
    divides the reshaped gradients differently from the weights, and then
    cannot convert one layout to the other. And where a weight has several
    labels in common with the other operand, that is divided as the weight is.
    """
    layer = keras_private.calling_layer()
    context = None if layer is None else context_of(layer)
    if context is None:
        return original(subscripts, *operands, **options)
    # Any option keeps Keras from its matrix products; this is the default.
    options = {"optimize": "greedy", **options}
    subscripts = einsum_axes.without_ellipsis(
        subscripts, [len(x.shape) for x in operands]
    )
    divided = None
    # In a function whose weights are gathered, nothing is sharded.
    if (
        tracing.traced_for_mesh()
        and len(operands) == 2
        and (gathered_reads.current() is None)
    ):
        divided = _axes_of_product(subscripts, operands, context)
    if divided is None:
        return original(subscripts, *operands, **options)
    *of_operands, of_result = divided
    pinned = [
        x
        if isinstance(x, MeshVariable) and axes == _axes_in_layers(x, context)
        else pinning.sharded(tf.convert_to_tensor(x), context.mesh, axes)
        for x, axes in zip(operands, of_operands)
    ]
    with tf.name_scope(corrections.SAME_SHARDING):
        result = original(subscripts, *pinned, **options)
    return pinning.sharded(result, context.mesh, of_result)


def _axes_of_product(
    subscripts: str, operands: tuple[Any, ...], context: Any
) -> tuple[Any, ...] | None:
    """Returns the axes of both operands and the result, for a weight."""
    number = int(isinstance(operands[1], MeshVariable))
    weight, other = operands[number], operands[1 - number]
    if not isinstance(weight, MeshVariable):
        return None
    size = other.shape[0] if len(other.shape) else None
    is_cut = (
        context.batch_dim is not None
        and size is not None
        and (size % context.mesh.dim_size(context.batch_dim) == 0)
    )
    return einsum_axes.axes_of_product(
        subscripts,
        number,
        _axes_in_layers(weight, context),
        context.batch_dim if is_cut else None,
    )


def _axes_in_layers(
    weight: MeshVariable, context: Any
) -> tuple[str | None, ...]:
    """Returns what divides what a layer reads: see `MeshVariable.value`."""
    return tuple(
        None if axis == context.batch_dim else axis
        for axis in axes_of_layout(weight.layout)
    )


def add(original: Callable[..., Any], x1: Any, x2: Any) -> Any:
    """`keras.ops.add`; on a mesh never as a BiasAdd of squeezed tensors.

    Keras treats a second operand with one dimension above 1 as a bias. DTensor
    cannot divide that unless it is the last dimension.
    """
    shape = getattr(x2, "shape", ())
    if (
        tracing.traced_for_mesh()
        and len(shape) > 1
        and (len(shape) - list(shape).count(1) == 1)
    ):
        x1, x2 = x2, x1
    return original(x1, x2)


def repeat(
    original: Callable[..., Any], x: Any, repeats: Any, axis: int | None = None
) -> Any:
    """`keras.ops.repeat`; on a mesh of samples that are not divided.

    DTensor does not tile what it divides, as the heads of GroupQueryAttention.
    """
    mesh = tracing.mesh_of_trace()
    if mesh is None:
        return original(x, repeats, axis)
    x = tf.convert_to_tensor(x)
    result = original(_by_samples(x, mesh, axis), repeats, axis)
    return _by_samples(result, mesh, axis)


def _by_samples(x: Any, mesh: Mesh, axis: int | None) -> Any:
    """Returns `x` divided as batches are, unless that divides `axis`."""
    batch_dim = tracing.batch_dim_of_trace()
    is_cut = (
        batch_dim is not None
        and axis not in (None, 0, -x.shape.rank)
        and (x.shape[0] or 1) % mesh.dim_size(batch_dim) == 0
    )
    return pinning.sharded(
        x,
        mesh,
        [
            batch_dim if is_cut and dim == 0 else None
            for dim in range(x.shape.rank)
        ],
    )


def eye(
    original: Callable[..., Any],
    N: Any,  # noqa: N803
    M: Any = None,  # noqa: N803
    k: Any = 0,
    dtype: str | None = None,
) -> Any:
    """`keras.ops.eye`; on a mesh, by comparing row and column numbers.

    DTensor has no MatrixDiagV3. `keras.ops.image.extract_patches` needs it.
    """
    mesh = tracing.mesh_of_trace()
    if mesh is None:
        return original(N, M, k, dtype)
    rows = tf.range(N)[:, tf.newaxis]
    columns = tf.range(N if M is None else M)[tf.newaxis, :]
    return pinning.replicated(
        tf.cast(columns - rows == k, dtype or keras.config.floatx()), mesh
    )
