"""Simplifications of graphs for a mesh that Grappler applies to other graphs.

Grappler is disabled on a mesh, because it would optimize the function of each
device separately (`layout/mesh/device_mesh.py`). Two of its simplifications
save much time, so they are applied when the ops are created:

* A matrix product reads a transposed matrix without a transposed copy. The
  output layer of a language model with tied weights multiplies with the
  transposed table of its tokens.
* `x ** 2` and `x ** 3` are products. The GELU activation contains a cube.

`argmax_of_shards` replaces `tf.argmax` by ops that do not gather the classes of
a sample. It is enabled for accuracy metrics (`shards_argmax`).
`position_of_largest` is used by `generate`, and needs only one all-reduce.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops.corrections import static_value

# Attribute of the transpositions that a product has skipped, and of exponents.
_SKIPPED = "_layoutmap_skipped"


# Attribute of the transpositions that the gradient of a product creates.
_IN_GRADIENT = "_layoutmap_in_gradient"
# Ops that return their input, or convert it.
_COPIES = frozenset(("Cast", "Identity", "IdentityN", "Relayout"))


def _is_weight(x: Any) -> bool:
    """Returns whether `x` is the value of a variable, possibly converted."""
    while x.op.type in _COPIES:
        x = x.op.inputs[x.value_index if x.op.type == "IdentityN" else 0]
    return x.op.type == "ReadVariableOp"


def _transposed_input(x: Any) -> Any:
    """Returns the matrix that `x` is the transpose of, or None.

    The matrix must be a weight. DTensor ends the process when it compiles some
    programs in which a product reads a transposed matrix of activations, for
    example the gradient of Keras' `Circle` loss.
    """
    if (
        not tf.is_symbolic_tensor(x)
        or x.graph is not tf.compat.v1.get_default_graph()
        or x.op.type != "Transpose"
        or x.shape.rank != 2
        or not x.dtype.is_floating
    ):
        return None
    if not (getattr(x.op, _IN_GRADIENT, False) or _is_weight(x.op.inputs[0])):
        return None
    # The only other permutation of two dimensions is the identity.
    perm = static_value(x.op.inputs[1])
    return x.op.inputs[0] if perm is not None and perm[0] == 1 else None


def matmul(
    original: Callable[..., Any],
    mesh: Mesh | None,
    a: Any,
    b: Any,
    transpose_a: bool = False,
    transpose_b: bool = False,
    **options: Any,
) -> Any:
    """Computes the op `MatMul`; does not copy the transpose of `b`.

    Tapes record a product with the transposed tensor, because a program can
    compute a gradient with respect to it. `symbolic_gradients` checks that
    `tf.gradients` does not need this product.
    """
    del mesh
    matrix = _transposed_input(b)
    if (
        matrix is None
        or not tf.is_tensor(a)
        or not isinstance(transpose_b, bool)
    ):
        return original(a, b, transpose_a, transpose_b, **options)
    with tf_private.stop_recording():
        product = original(a, matrix, transpose_a, not transpose_b, **options)
    setattr(b.op, _SKIPPED, True)

    def gradient(dy: Any) -> list[Any]:
        # The matrix product is `op(a) @ op(b)`. `op` transposes a matrix or
        # returns it unchanged.
        if transpose_a:
            da = tf.matmul(b, dy, transpose_a=transpose_b, transpose_b=True)
        else:
            da = tf.matmul(dy, b, transpose_b=not transpose_b)
        # `transposed` removes this transpose and the transpose in the gradient
        # of `b`.
        if transpose_b:
            db = tf.matmul(dy, a, transpose_a=True, transpose_b=transpose_a)
        else:
            db = tf.transpose(
                tf.matmul(dy, a, transpose_a=True, transpose_b=transpose_a)
            )
            if tf.is_symbolic_tensor(db):
                setattr(db.op, _IN_GRADIENT, True)
        return [da, db]

    tf_private.record_operation("MatMul", [product], [a, b], gradient)
    return product


def transposed(
    original: Callable[..., Any],
    mesh: Mesh | None,
    x: Any,
    perm: Any,
    name: str | None = None,
) -> Any:
    """Computes `tf.transpose`; returns the matrix of a transposed matrix."""
    del mesh
    matrix = _transposed_input(x)
    static = None if matrix is None else static_value(perm)
    if static is None or static[0] != 1:
        return original(x, perm, name=name)
    with tf_private.stop_recording():
        result = tf.identity(matrix, name=name)
    setattr(x.op, _SKIPPED, True)
    tf_private.record_operation(
        "Transpose", [result], [x], lambda dy: [tf.transpose(dy)]
    )
    return result


def symbolic_gradients(
    original: Callable[..., Any], ys: Any, xs: Any, *args: Any, **kwargs: Any
) -> Any:
    """Computes `tf.gradients`; rejects skipped tensors as `xs`.

    `tf.gradients` follows the inputs of ops, so it does not find the products
    that read the matrix itself. Gradient tapes find all products.
    """
    for x in tf.nest.flatten(xs):
        if tf.is_symbolic_tensor(x) and getattr(x.op, _SKIPPED, False):
            raise ValueError(
                "Argument `xs` of tf.gradients must not contain the result of "
                "a tf.transpose that a matrix product on a mesh reads, or a "
                f"constant exponent of tf.pow. Received: {x}. Use the gradient "
                "of the matrix before tf.transpose, or a tf.GradientTape."
            )
    return original(ys, xs, *args, **kwargs)


def power(
    original: Callable[..., Any],
    mesh: Mesh | None,
    x: Any,
    y: Any,
    name: str | None = None,
) -> Any:
    """Computes `tf.pow`; squares and cubes of floats are products.

    Keras converts the exponent to a tensor, so it can also be a constant of the
    graph, for example in the normalization of Llama.
    """
    del mesh
    if not tf.is_symbolic_tensor(x) or not x.dtype.is_floating:
        return original(x, y, name=name)
    exponent = y
    if (
        tf.is_symbolic_tensor(y)
        and y.op.type == "Const"
        and not tf_private.should_record_backprop([y])
    ):
        exponent = tf.get_static_value(y)
    if isinstance(exponent, int | float | np.number | np.ndarray) and (
        np.ndim(exponent) == 0 and exponent in (2, 3)
    ):
        if tf.is_symbolic_tensor(y):
            setattr(y.op, _SKIPPED, True)
        with tf.name_scope(name or "Pow"):
            square = tf.square(x)
            return square if exponent == 2 else x * square
    return original(x, y, name=name)


_shards_argmax = ThreadValue(False)


def shards_argmax() -> AbstractContextManager[None]:
    """Returns a context in which `tf.argmax` keeps the classes sharded."""
    return _shards_argmax.set_to(True)


def argmax_of_shards(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    dimension: Any,
    output_type: Any = tf.int64,
    name: str | None = None,
) -> Any:
    """Computes `tf.argmax` along the last dimension; does not gather it.

    DTensor reduces a maximum and a minimum over shards. The result is the first
    position of the maximum. If the input contains NaN, the result can be the
    size of the dimension, which is not a valid index.
    """
    x = tf.convert_to_tensor(input)
    size = x.shape[-1] if x.shape.rank else None
    if (
        not _shards_argmax.get()
        or not tf.is_symbolic_tensor(x)
        or not size
        or tf.get_static_value(tf.convert_to_tensor(dimension))
        not in (-1, x.shape.rank - 1)
    ):
        return original(input, dimension, output_type=output_type, name=name)
    del mesh
    largest = tf.reduce_max(x, axis=-1, keepdims=True)
    positions = tf.where(
        tf.equal(x, largest), tf.range(size), tf.constant(size)
    )
    return tf.cast(tf.reduce_min(positions, axis=-1), output_type)


# The largest float32, above which a logit makes all probabilities NaN.
_LARGEST = tf.float32.max


def position_of_largest(logits: Any, num_parts: int) -> Any:
    """Returns the position of the largest logit of each sample.

    The result is the position of the largest probability: the first position of
    the maximum, and 0 if the probabilities are NaN. The classes can be sharded.
    Each device finds the largest logit of its classes. One all-reduce then
    compares integers that contain the logit and the position.

    Args:
      logits: float32 tensor `[batch, classes]`.
      num_parts: A multiple of the number of shards of the classes.

    Returns:
      int32 tensor `[batch]`.
    """
    batch, size = logits.shape
    if size % num_parts:
        num_parts = 1
    blocks = tf.reshape(logits, [batch, num_parts, size // num_parts])
    largest = tf.reduce_max(blocks, axis=-1)
    position = tf.argmax(blocks, axis=-1, output_type=tf.int64)
    position += tf.range(num_parts, dtype=tf.int64) * (size // num_parts)
    # The order of the bits of two positive floats is the order of the floats.
    # The order of the bits of two negative floats is reversed. -0 equals 0.
    bits = tf.bitcast(largest + 0.0, tf.int32)
    bits = tf.where(bits < 0, tf.bitwise.bitwise_xor(bits, 2**31 - 1), bits)
    # The probabilities are NaN if a logit is NaN or infinite, or if all logits
    # are -infinity. The position of the maximum of -infinity is 0.
    is_number = largest <= _LARGEST
    bits = tf.where(is_number, bits, 2**31 - 1)
    position = tf.where(is_number, position, tf.zeros_like(position))
    # Among equal logits, the smallest position has the largest integer.
    keys = tf.cast(bits, tf.int64) * 2**32 + (2**31 - position)
    best = tf.reduce_max(keys, axis=-1)
    return tf.cast(2**31 - tf.math.floormod(best, 2**32), tf.int32)
