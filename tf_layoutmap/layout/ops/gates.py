"""Recurrent cells whose weights are sharded, without gathering the weights.

The last dimension of a weight of an LSTM or a GRU contains one block per gate.
A shard of the weight can contain several gates, or a part of a gate. DTensor
cannot split a sharded dimension into gates. On a mesh, this module therefore
computes the products of all gates at once:

* If the gates are sharded, each device computes its columns.
* If the features are sharded, the partial products are summed.

Only the products of one time step are then gathered and split into gates. The
states of a cell are sharded by sample. If each gate has its own input, because
each gate has its own dropout mask, each device selects the inputs of the gates
whose columns it holds.

The cells of Keras 3 and tf_keras have the same attributes, except for the
methods that return dropout masks.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.shard_map import local_size, shard_map
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops.splits import UNSHARDED

Axes = tuple[str | None, ...]
# A product of the inputs of a gate and a part of the columns of a weight.
Product = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class _ShardedCell:
    """A cell whose weights are sharded.

    Attributes:
      mesh: `dtensor.Mesh` of the weights.
      batch_dim: Mesh axis that shards batches, or None.
      kernel: Mesh axes of the kernel.
      recurrent_kernel: Mesh axes of the recurrent kernel.
    """

    mesh: Mesh
    batch_dim: str | None
    kernel: Axes
    recurrent_kernel: Axes

    def products(
        self,
        xs: Sequence[Any],
        weight: Any,
        axes: Axes,
        num_gates: int,
        product: Product = tf.matmul,
        key: Any = None,
    ) -> Any:
        """Returns the products of all gates, `[..., num_gates * units]`.

        Args:
          xs: The input of each gate, or a list of one input for all gates.
          weight: Tensor of shape `[..., features, num_gates * units]`.
          axes: Mesh axes of the weight.
          num_gates: Number of gates.
          product: Function of an input and of columns of the weight.
          key: Value that identifies `product`; see `shard_map`.
        """
        if len(xs) == 1 and product is tf.matmul:
            return tf.matmul(xs[0], weight)
        inner, outer = axes[-2:]
        if outer is not None and self.mesh.dim_size(outer) == 1:
            outer = None
        units = weight.shape[-1] // num_gates
        columns = local_size(weight.shape[-1], self.mesh, outer)
        # Each part of the local columns belongs to one gate.
        part = columns if len(xs) == 1 else math.gcd(columns, units)
        starts = range(0, columns, part)
        num_shards = weight.shape[-1] // columns

        def local(position: Any, weight: Any, *xs: Any) -> Any:
            results = []
            for start in starts:
                shards = [
                    (shard * columns + start) // units % len(xs)
                    for shard in range(num_shards)
                ]
                x = xs[shards[0]]
                for shard in range(1, num_shards):
                    if shards[shard] != shards[0]:
                        # DTensor's compiler ends the process if the rank of
                        # the condition is smaller than the rank of `x`.
                        is_shard = tf.reshape(
                            tf.equal(position, shard), [1] * x.shape.rank
                        )
                        x = tf.where(is_shard, xs[shards[shard]], x)
                results.append(product(x, weight[..., start : start + part]))
            return results[0] if len(results) == 1 else tf.concat(results, -1)

        batch = tracing.axis_of_samples(
            xs[0], self.mesh, self.batch_dim, inner, outer
        )
        between = [None] * (xs[0].shape.rank - 2)
        return shard_map(
            local,
            self.mesh,
            [tf.range(num_shards), weight, *xs],
            [
                [outer],
                [*[None] * (weight.shape.rank - 2), inner, outer],
                *[[batch, *between, inner]] * len(xs),
            ],
            [batch, *between, outer],
            [] if inner is None else [inner],
            key=key and (key, num_gates, len(xs), tuple(weight.shape)),
        )

    def gates(self, z: Any, num_gates: int) -> list[Any]:
        """Returns the gates of products, which are gathered first."""
        batch = tracing.axis_of_samples(z, self.mesh, self.batch_dim)
        axes = [batch, *[None] * (z.shape.rank - 1)]

        def pinned(x: Any) -> Any:
            return tracing.pin_sharded(x, self.mesh, axes)

        with tf.name_scope(UNSHARDED):
            parts = tf.split(pinned(z), num_gates, axis=-1)
            return [pinned(part) for part in parts]


_cell: ThreadValue[_ShardedCell | None] = ThreadValue(None)


def sharded_weights(
    mesh: Mesh, batch_dim: str | None, axes: Mapping[str, Axes] | None
) -> AbstractContextManager[None]:
    """Shards a recurrent cell that is called in the context.

    Args:
      mesh: `dtensor.Mesh` of the weights.
      batch_dim: Mesh axis that shards batches, or None.
      axes: Mesh axes of each weight, by the name of the attribute; None if the
        weights are gathered.
    """
    if axes is None or not any(map(any, axes.values())):
        return _cell.set_to(None)
    return _cell.set_to(
        _ShardedCell(mesh, batch_dim, axes["kernel"], axes["recurrent_kernel"])
    )


def _products_of_cell(
    sharded: _ShardedCell,
    cell: Any,
    inputs: Any,
    h: Any,
    training: Any,
    input_product: Product = tf.matmul,
    recurrent_product: Product = tf.matmul,
    keys: tuple[Any, Any] = ("x", "h"),
) -> Any:
    """Returns the sums of both products and the bias of a cell with 4 gates.

    Args:
      sharded: The layouts of the weights.
      cell: The cell.
      inputs: Inputs of the cell.
      h: Hidden state.
      training: Whether dropout is applied.
      input_product: Product of the inputs and the kernel.
      recurrent_product: Product of `h` and the recurrent kernel.
      keys: Values that identify the two products; see `shard_map`.
    """
    z = sharded.products(
        _inputs_of_gates(cell, inputs, training, 4),
        _tensor(cell.kernel),
        sharded.kernel,
        4,
        input_product,
        keys[0],
    )
    z += sharded.products(
        _inputs_of_gates(cell, h, training, 4, is_recurrent=True),
        _tensor(cell.recurrent_kernel),
        sharded.recurrent_kernel,
        4,
        recurrent_product,
        keys[1],
    )
    return z + _tensor(cell.bias) if cell.use_bias else z


def lstm(
    original: Callable[..., Any],
    cell: Any,
    inputs: Any,
    states: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls an LSTM cell; computes with shards of its weights on a mesh."""
    sharded = _cell.get()
    if sharded is None:
        return original(cell, inputs, states, *args, **kwargs)
    training = args[0] if args else kwargs.get("training")
    h, c = states[0], states[1]
    z = _products_of_cell(sharded, cell, inputs, h, training)
    c, o = cell._compute_carry_and_output_fused(sharded.gates(z, 4), c)
    h = o * cell.activation(c)
    return h, [h, c]


def gru(
    original: Callable[..., Any],
    cell: Any,
    inputs: Any,
    states: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a GRU cell; computes with shards of its weights on a mesh.

    If the reset gate is applied before the product of the candidate state,
    there are two products with the full recurrent kernel, because each device
    can hold columns of all gates.
    """
    sharded = _cell.get()
    if sharded is None:
        return original(cell, inputs, states, *args, **kwargs)
    training = args[0] if args else kwargs.get("training")
    h = states[0] if tf.nest.is_nested(states) else states
    xs = _inputs_of_gates(cell, inputs, training, 3)
    hs = _inputs_of_gates(cell, h, training, 3, is_recurrent=True)

    def recurrent_products(hs: Sequence[Any], bias: Any = None) -> Any:
        products = sharded.products(
            hs,
            _tensor(cell.recurrent_kernel),
            sharded.recurrent_kernel,
            3,
            key="h",
        )
        if bias is not None:
            products += bias
        return sharded.gates(products, 3)

    bias, recurrent_bias = None, None
    if cell.use_bias:
        bias = _tensor(cell.bias)
        if cell.reset_after:
            bias, recurrent_bias = bias[0], bias[1]
    z = sharded.products(xs, _tensor(cell.kernel), sharded.kernel, 3, key="x")
    if bias is not None:
        z += bias
    x_z, x_r, x_h = sharded.gates(z, 3)
    h_z, h_r, h_h = recurrent_products(hs, recurrent_bias)
    z = cell.recurrent_activation(x_z + h_z)
    r = cell.recurrent_activation(x_r + h_r)
    h_h = r * h_h if cell.reset_after else recurrent_products([r * hs[-1]])[2]
    new = z * h + (1 - z) * cell.activation(x_h + h_h)
    return new, [new] if tf.nest.is_nested(states) else new


def conv_lstm(
    original: Callable[..., Any],
    cell: Any,
    inputs: Any,
    states: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls a cell of a ConvLSTM; computes with shards of its weights."""
    sharded = _cell.get()
    if sharded is None:
        return original(cell, inputs, states, *args, **kwargs)
    training = args[0] if args else kwargs.get("training")
    h, c = states[0], states[1]
    z = _products_of_cell(
        sharded,
        cell,
        inputs,
        h,
        training,
        lambda x, kernel: cell.input_conv(x, kernel, padding=cell.padding),
        cell.recurrent_conv,
        (("x", cell.strides, cell.padding, cell.dilation_rate), "conv h"),
    )
    z_i, z_f, z_c, z_o = sharded.gates(z, 4)
    i = cell.recurrent_activation(z_i)
    f = cell.recurrent_activation(z_f)
    c = f * c + i * cell.activation(z_c)
    h = cell.recurrent_activation(z_o) * cell.activation(c)
    return h, [h, c]


def _tensor(weight: Any) -> Any:
    return tf.convert_to_tensor(weight)


def _inputs_of_gates(
    cell: Any,
    x: Any,
    training: Any,
    num_gates: int,
    is_recurrent: bool = False,
) -> list[Any]:
    """Returns the input of each gate after dropout, or one for all gates.

    The dropout masks are drawn in the same order as in the original cell.
    """
    per_gate = getattr(cell, "implementation", 1) == 1
    rate = cell.recurrent_dropout if is_recurrent else cell.dropout
    is_dropped = 0.0 < rate < 1.0
    masks: Any = None
    if hasattr(cell, "get_dropout_mask_for_cell"):
        # A cell of tf_keras.
        get = (
            cell.get_recurrent_dropout_mask_for_cell
            if is_recurrent
            else cell.get_dropout_mask_for_cell
        )
        masks = get(x, training, count=num_gates)
    else:
        is_dropped = is_dropped and training
        if is_dropped and (per_gate or not is_recurrent):
            masks = (
                cell.get_recurrent_dropout_mask(x)
                if is_recurrent
                else cell.get_dropout_mask(x)
            )
    if not is_dropped or (is_recurrent and not per_gate):
        return [x]
    if per_gate:
        return [x * mask for mask in masks]
    return [x * (masks[0] if isinstance(masks, list) else masks)]
