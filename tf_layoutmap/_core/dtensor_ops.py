"""Registers ops with tf.dtensor, and reads and updates rows of tables.

An expander is a rule by which DTensor partitions an op. If an op has no
expander, DTensor raises an error. `register_op` assigns an expander to an op.
This expander is the expander of a stock TensorFlow op that is partitioned in
the same way. DTensor does not verify the choice. If the policy is wrong,
results are wrong without an error. TensorFlow's library exports the C++
functions that `register_op` requires, but does not document them. If these
functions are missing, `available()` returns False and `register_op` raises an
error.

`enable_missing_ops` registers all stock ops that have no expander. Each device
then gathers the inputs of such an op and computes the full result, which
requires more memory and time.

`lookup_rows` and `update_rows` read and update the rows of a sharded table.
Without these functions, DTensor gathers the full table on each device for every
lookup, and the gradient of a lookup is as large as the table. With
`lookup_rows`, each device reads the rows that it owns, and the partial results
are summed over the mesh. `update_rows` updates only the rows that were looked
up.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tf_layoutmap._core import checks, literals, ops, tf_private

# Maps each policy to a stock op whose expander implements the policy.
_DONORS = {
    "elementwise": "Relu",
    "batch_parallel": "Cholesky",
    "replicated": "DiagPart",
    "local_update": "ResourceApplyAdam",
}
POLICIES = tuple(_DONORS)

# The op of `local_shard` on a mesh of CPUs, and the ops of `local_block` on a
# mesh of GPUs and on a mesh of TPUs. XLA has no kernel for the second op, and
# DTensor has no rule for these ops.
_LOCAL_SHARD = "PlaceholderWithDefault"
_LOCAL_BLOCK = "ScatterNdNonAliasingAdd"
_LOCAL_BLOCK_OF_TPU = "UnsortedSegmentProd"
# Expander that leaves inputs unchanged, and declares all results replicated.
_LOCAL_BLOCK_DONOR = "Const"

_registered: dict[str, str] = {}
_lock = threading.Lock()


def available() -> bool:
    """Returns whether ops can be registered with tf.dtensor in this process."""
    return not unavailable_reason()


def unavailable_reason() -> str:
    """Returns the reason why ops cannot be registered; "" if they can."""
    return ops.native.expander_registry_problem()


def can_shard(name: str) -> bool:
    """Returns whether tf.dtensor has a rule for op `name`.

    The rule may be built in or registered by this package. Returns False if
    ops cannot be registered with this tf.dtensor; see `available`.
    """
    return available() and ops.native.has_expander(name)


def register_op(name: str, policy: literals.Policy) -> None:
    """Sets how tf.dtensor partitions the op `name` in this process.

    * `"elementwise"`: All inputs have the same shape, or can be broadcast to
      the same shape. Each device computes its shard.
    * `"batch_parallel"`: The first dimension is sharded. All other dimensions
      are unsharded.
    * `"replicated"`: Inputs are gathered. Each device computes the full result.
    * `"local_update"`: The op has no outputs. Each device runs the op on its
      shard of each input, including resource handles.

    >>> import tf_layoutmap as tlm
    >>> tlm.dtensor.register_op("LayoutMap>LookupShard", "batch_parallel")

    Call this function before the first mesh, layout map or tensor on a mesh is
    created. When such an object is created, this package registers all ops
    without a rule as replicated. This registration cannot be undone.

    Args:
      name: Registered name of the op, such as `"MyNamespace>MyOp"`.
      policy: One of the policies above.

    Raises:
      ValueError: If TensorFlow has no such op, the policy does not exist, or
        the op is registered with another policy.
      RuntimeError: If ops cannot be registered with this version of tf.dtensor,
        or tf.dtensor has a built-in rule for the op.
    """
    checks.check_one_of("policy", policy, POLICIES)
    if tf_private.op_def_of(name) is None:
        raise ValueError(
            "Argument `name` must be the name of a registered op; load its "
            f"library first. Received: name={name!r}."
        )
    with _lock:
        known = _registered.get(name)
        if known == policy:
            return
        if known is not None:
            raise ValueError(
                f"Op {name!r} is registered with policy {known!r}, for the "
                f"whole process. Received: policy={policy!r}."
            )
        ops.native.share_expander(name, _DONORS[policy])
        _registered[name] = policy


# Random ops whose only state is their seeds. On a mesh, this package sets the
# seeds. StatelessRandomGetAlg is also in this list, although it uses no seed
# and only returns the random number algorithm of the device.
_RANDOM = frozenset(
    (
        "RandomStandardNormal",
        "TruncatedNormal",
        "RandomGamma",
        "RandomPoissonV2",
        "Multinomial",
        "RandomShuffle",
        "ParameterizedTruncatedNormal",
        "StatelessRandomGetAlg",
        "LayoutMap>RandomUniform",
        "LayoutMap>RandomUniformInt",
    )
)
# Ops that are not enabled: ops of compilers and of the runtime, and ops of this
# package, which are registered separately or are not used on a mesh. A function
# with DotInteraction can be traced before it gets tensors on a mesh.
_OTHERS = re.compile(
    r"_|LayoutMap>(?!DotInteraction)|DTensor|TPU|Tpu|Collective|Nccl|Xla(?!Dynamic(Update)?Slice)"
    r"|Risc|Cudnn|Debug|Boosted|Sdca|Placeholder|Batch$|Unbatch|Copy"
)
_CONTROL_FLOW = frozenset(
    (
        "Switch",
        "Merge",
        "Enter",
        "Exit",
        "NextIteration",
        "LoopCond",
        "ControlTrigger",
        "Abort",
        "NoOp",
        "FakeParam",
        "GetDeadline",
        "DeviceIndex",
        "ImmutableConst",
    )
)
# Ops with a result whose rank is unknown. DTensor ends the process when it
# compiles such an op. If the op has no rule, DTensor raises an error instead.
UNKNOWN_RANK = frozenset(
    (
        "KmeansPlusPlusInitialization",
        "NearestNeighbors",
        "QuantizedDepthwiseConv2D",
        "QuantizedDepthwiseConv2DWithBias",
        "QuantizedDepthwiseConv2DWithBiasAndRelu",
        "QuantizedDepthwiseConv2DWithBiasAndReluAndRequantize",
        "RaggedBincount",
        "SetSize",
        "SparseReduceMax",
        "SparseReduceMaxSparse",
        "SparseReduceSum",
        "SparseReduceSumSparse",
    )
)
# Dtypes for which DTensor does not support tensors.
_TYPES = frozenset(
    dtype.as_datatype_enum for dtype in (tf.string, tf.resource, tf.variant)
)

# Elementwise ops with one input, which stay sharded like their input.
_ELEMENTWISE = frozenset(
    (
        "Expint",
        "Dawsn",
        "Spence",
        "FresnelCos",
        "FresnelSin",
        "BesselI0",
        "BesselI0e",
        "BesselI1",
        "BesselI1e",
        "BesselJ0",
        "BesselJ1",
        "BesselK0",
        "BesselK0e",
        "BesselK1",
        "BesselK1e",
        "BesselY0",
        "BesselY1",
    )
)

_enabled: set[str] = set()


def enable_missing_ops() -> tuple[str, ...]:
    """Allows tf.dtensor to run stock ops for which it has no rule.

    The ops are replicated: each device gathers the inputs and computes the full
    result. A few elementwise ops are sharded instead. The change applies to the
    entire process. When this package creates a mesh, a layout map or a tensor
    on a mesh, it calls this function. A program has to call this function only
    if it uses `tf.experimental.dtensor` without these objects, or if it loads
    an op library later.

    Ops are not enabled if they have state (variables, tables, queues), call
    functions, or use strings. Most of DTensor does not support results whose
    number of rows is unknown during tracing, such as the result of `tf.unique`.

    >>> import tf_layoutmap as tlm
    >>> isinstance(tlm.dtensor.enable_missing_ops(), tuple)
    True

    Returns:
      Names of the ops that this call enabled. Ops with a built-in rule are not
      changed.

    Raises:
      RuntimeError: If ops cannot be registered with this tf.dtensor; see
        `available`.
    """
    enabled = []
    has_local_blocks()
    for op in tf_private.registered_ops():
        if _is_function_of_inputs(op) and not can_shard(op.name):
            is_divided = op.name in _ELEMENTWISE
            register_op(op.name, "elementwise" if is_divided else "replicated")
            enabled.append(op.name)
            if not is_divided:
                _enabled.add(op.name)
    return tuple(enabled)


def is_replicated_op(name: str) -> bool:
    """Returns whether the op `name` is replicated because it has no rule."""
    return name in _enabled


def _is_function_of_inputs(op: Any) -> bool:
    if op.name in _RANDOM:
        return True
    if (
        op.is_stateful
        or op.name in _CONTROL_FLOW
        or op.name in UNKNOWN_RANK
        or _OTHERS.match(op.name)
    ):
        return False
    arguments = [*op.input_arg, *op.output_arg]
    return (
        bool(op.output_arg)
        and not any(a.is_ref or a.type in _TYPES for a in arguments)
        and not any("func" in a.type for a in op.attr)
    )


@functools.cache
def has_local_blocks() -> bool:
    """Registers the ops of local shards; returns whether they can be used."""
    names = (_LOCAL_SHARD, _LOCAL_BLOCK, _LOCAL_BLOCK_OF_TPU)
    if not available() or any(map(can_shard, names)):
        return False
    for name in names:
        ops.native.share_expander(name, _LOCAL_BLOCK_DONOR)
    return True


def local_shard(x: tf.Tensor, shape: Sequence[int]) -> Any:
    """Returns the shard of `x` that each device holds, without a copy.

    To DTensor, the result is replicated, but its values are different on each
    device. Use `layout.mesh.shard_map` instead of this function.

    The first op returns its input. Its shape is unknown in the sharded
    dimensions, so that it agrees with the shape of `x` and with the shape of a
    shard. The second op sets the shape of a shard, because DTensor needs static
    shapes.

    Args:
      x: Tensor with a pinned layout.
      shape: Shape of the shard of each device.
    """
    unknown = [
        size if size == full else None for size, full in zip(shape, x.shape)
    ]
    return tf.ensure_shape(
        tf_private.gen_array_ops.placeholder_with_default(x, unknown), shape
    )


def local_block(zeros: tf.Tensor, indices: tf.Tensor, x: tf.Tensor) -> Any:
    """Returns the block of `x` that each device holds.

    To DTensor, the result is replicated, but its values are different on each
    device. Use `layout.mesh.shard_map` instead of this function.

    The op adds the blocks of `x` to `zeros` at `indices`. On each device, it
    adds the only local block at index 0.

    Args:
      zeros: Zeros of shape `[1, ..., 1, size]`, replicated.
      indices: int32 zeros of shape `[*num_blocks, len(num_blocks)]`, sharded
        like `x`.
      x: Tensor of shape `[*num_blocks, size]`. Each block dimension is sharded
        over a mesh axis of the same size; the last dimension is unsharded.

    Returns:
      Tensor of shape `[1, ..., 1, size]`.
    """
    return tf_private.gen_array_ops.scatter_nd_non_aliasing_add(
        zeros, indices, x
    )


def local_block_of_tpu(segments: tf.Tensor, x: tf.Tensor) -> Any:
    """Like `local_block`, with an op that XLA can compile for a TPU.

    The op multiplies the blocks of `x` in each segment. On each device, the
    segment 0 contains only the local block, so the product is this block.

    Args:
      segments: int32 zeros of shape `num_blocks`, sharded like `x`.
      x: Tensor of shape `[*num_blocks, size]`, as in `local_block`.

    Returns:
      Tensor of shape `[1, size]`.
    """
    # The op cannot multiply Booleans.
    numbers = tf.cast(x, tf.int32) if x.dtype == tf.bool else x
    block = tf_private.gen_math_ops.unsorted_segment_prod(numbers, segments, 1)
    return tf.cast(block, x.dtype)


@functools.cache
def _register() -> None:
    register_op("LayoutMap>LookupShard", "batch_parallel")
    register_op("LayoutMap>UpdateShard", "local_update")


def row_axis(table: dtensor.DVariable) -> str:
    """Returns the mesh dimension along which the rows of `table` are sharded.

    Raises:
      ValueError: If the rows are not sharded, or the columns are also sharded.
    """
    specs = table.layout.sharding_specs
    if (
        table.shape.rank != 2
        or specs[0] == dtensor.UNSHARDED
        or specs[1] != dtensor.UNSHARDED
    ):
        raise ValueError(
            "Argument `table` must be [num_rows, dim] with the layout "
            f"(mesh dimension, {dtensor.UNSHARDED!r}). Received: shape "
            f"{table.shape}, layout {specs} ({table.name!r})."
        )
    return specs[0]


def _shard_index(mesh: dtensor.Mesh, axis: str) -> tf.Tensor:
    """Returns the shard index of each device, `[num_shards, 1, 1]` int32.

    DTensor's device owns the tensor. The tensor is cached until this device is
    replaced.
    """
    kept = tf_private.kept_with_device("shard_index")
    key = mesh.to_string(), axis
    if key not in kept:
        # The tensor is created eagerly, because a function that is being traced
        # would otherwise own it.
        with tf.init_scope():
            layout = dtensor.Layout(
                [axis, dtensor.UNSHARDED, dtensor.UNSHARDED], mesh
            )
            kept[key] = dtensor.pack(
                [
                    np.full([1, 1, 1], location[axis], np.int32)
                    for location in mesh.local_device_locations()
                ],
                layout,
            )
    return kept[key]


def lookup_rows(
    table: dtensor.DVariable,
    ids: tf.Tensor,
    *,
    name: str | None = None,
    num_rows: int | None = None,
) -> tf.Tensor:
    """Returns the rows of `ids`. The gradient is one `tf.IndexedSlices`.

    Args:
      table: float32 variable of shape `[num_rows, dim]` with rows sharded along
        one mesh dimension and unsharded columns.
      ids: int32 or int64 DTensor of shape `[num_ids]` on the mesh of `table`.
      name: Name of the table for errors; None for the name of the variable.
      num_rows: Number of valid rows; the rows after them are padding. None if
        all rows are valid.

    Returns:
      Tensor of shape `[num_ids, dim]`, replicated.

    Raises:
      ValueError: If the table does not have this layout.
      RuntimeError: If ops cannot be registered with this tf.dtensor.
      tf.errors.OpError: If an id is outside the table. DTensor raises the error
        when the result is read, with the message of the first failed device.
    """
    _register()
    axis, mesh = row_axis(table), table.layout.mesh
    # All layouts are pinned, because DTensor propagates layouts backwards from
    # consumers of the result. These ops do not support the layout of a consumer
    # that shards the batch.
    ids = dtensor.relayout(ids, dtensor.Layout.replicated(mesh, 1))
    tf_private.variable_accessed(table)
    partial = ops.lookup_shard(
        shard_index=_shard_index(mesh, axis),
        shard=table.handle,
        ids=ids,
        dim=table.shape[1],
        num_rows=num_rows or table.shape[0],
        table=name or table.name,
    )
    partial = dtensor.relayout(
        partial,
        dtensor.Layout([axis, dtensor.UNSHARDED, dtensor.UNSHARDED], mesh),
    )
    return dtensor.relayout(
        tf.reduce_sum(partial, axis=0), dtensor.Layout.replicated(mesh, 2)
    )


def update_rows(
    table: dtensor.DVariable,
    slots: Sequence[dtensor.DVariable],
    ids: tf.Tensor,
    gradients: tf.Tensor,
    *,
    optimizer: str,
    hyperparameters: tf.Tensor,
    name: str | None = None,
    num_rows: int | None = None,
) -> None:
    """Runs one optimizer step on the rows of `ids`.

    Gradients of equal ids are summed.

    Args:
      table: As in `lookup_rows`.
      slots: Slot variables of the optimizer, with the layout of `table`.
      ids: int32 or int64 DTensor of shape `[num_ids]` on the mesh of `table`.
      gradients: float32 gradients of the rows of `ids`, `[num_ids, dim]`.
      optimizer: Name of the optimizer, for example `"sgd"`, `"adagrad"` or
        `"adam"`; see docs/ops.md.
      hyperparameters: Hyperparameters of the optimizer; float32, `[k]`,
        replicated.
      name: As in `lookup_rows`.
      num_rows: As in `lookup_rows`.

    Raises:
      ValueError: If the layouts of a slot variable and the table are different.
      RuntimeError: If ops cannot be registered with this tf.dtensor.
    """
    _register()
    axis, mesh = row_axis(table), table.layout.mesh
    for slot in slots:
        if slot.layout != table.layout:
            raise ValueError(
                "Argument `slots` must have the layout of the table, "
                f"{table.layout.sharding_specs}. Received: "
                f"{slot.layout.sharding_specs} ({slot.name!r})."
            )
    ops.update_shard(
        shard=table.handle,
        slots=[slot.handle for slot in slots],
        shard_index=_shard_index(mesh, axis),
        ids=dtensor.relayout(ids, dtensor.Layout.replicated(mesh, 1)),
        gradients=dtensor.relayout(
            gradients, dtensor.Layout.replicated(mesh, 2)
        ),
        hyperparameters=hyperparameters,
        optimizer=optimizer,
        num_rows=num_rows or table.shape[0],
        table=name or table.name,
    )
