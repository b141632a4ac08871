"""Says to tf.dtensor how an op is to be divided among devices.

DTensor refuses an op it has no expander for. A policy lends an op the
expander of a stock op that is divided in the same way. It is a claim about
the op, and DTensor believes it: a wrong policy gives wrong numbers, not an
error. TensorFlow exports the functions this needs but does not document them;
where they are missing, `available()` is false and `register_op` raises.
"""

# DOC-MERGE: Which operations DTensor has no rule for are right when computed whole.
#
# Every device then gathers the inputs and computes everything: correct, at the
# cost of memory and time. Left out is what is not a function of its inputs.
#
# DOC-MERGE: Reads and updates rows of a table whose rows tf.dtensor has divided.
#
# Stock DTensor gathers the whole table on each device to look up one row, and
# its gradient is as large as the table. Here each device reads the rows that it
# owns, the parts are summed over the mesh, and an update touches the rows that
# were looked up and no others.
#
from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tf_layoutmap._core import checks, ops, tf_private

# policy -> the stock op whose expander says the same.
_DONORS = {
    "elementwise": "Relu",
    "batch_parallel": "Cholesky",
    "replicated": "DiagPart",
    "local_update": "ResourceApplyAdam",
}
POLICIES = tuple(_DONORS)

_registered: dict[str, str] = {}
_lock = threading.Lock()


def available() -> bool:
    """Whether ops can be registered with the tf.dtensor of this process."""
    return not unavailable_reason()


def unavailable_reason() -> str:
    """Why ops cannot be registered here; empty if they can."""
    return ops.native.expander_registry_problem()


def can_shard(name: str) -> bool:
    """Whether tf.dtensor has a rule for op `name`, its own or one of ours.

    False where this tf.dtensor cannot be asked.
    """
    return available() and ops.native.has_expander(name)


def register_op(name: str, policy: str) -> None:
    """Has tf.dtensor divide op `name` by `policy`, for the whole process.

    * `"elementwise"`: all inputs have one shape, or broadcast; each device
      works on its own part.
    * `"batch_parallel"`: the first dimension is divided, the others are
      whole.
    * `"replicated"`: inputs are gathered, each device works on all of it.
    * `"local_update"`: no outputs; each device runs it on what it holds of
      each input, resource handles included.

    >>> import tf_layoutmap as tlm
    >>> tlm.dtensor.register_op("LayoutMap>LookupShard", "batch_parallel")

    Call it before the first mesh, layout map or tensor on a mesh is made:
    that registers ops without a rule to be computed whole, for good.

    Args:
      name: The op's registered name, as `"MyNamespace>MyOp"`.
      policy: One of the above.

    Raises:
      ValueError: If TensorFlow knows no such op, the policy is none of
        these, or the op is registered with another one.
      RuntimeError: If this tf.dtensor cannot be reached, or divides the op by
        a rule of its own.
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


# Without state but for their seeds, which our operations on a mesh give them.
# The last one only asks for the device's algorithm.
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
# Of compilers, of the run time, and ours, which have rules of their own.
_OTHERS = re.compile(
    r"_|LayoutMap>|DTensor|TPU|Tpu|Collective|Nccl|Xla(?!Dynamic(Update)?Slice)"
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
# What DTensor has no tensors of.
_TYPES = frozenset(
    dtype.as_datatype_enum for dtype in (tf.string, tf.resource, tf.variant)
)

# Those of one input that work on each element: divided as it is.
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
    """Lets tf.dtensor run the stock ops that it has no rule for.

    They are computed whole: each device gathers the inputs and computes
    everything; a few work on each element and stay divided. It holds for the
    whole process. What makes a mesh, a layout map or a tensor on a mesh with
    this package calls it. Call it yourself for programs that use
    `tf.experimental.dtensor` alone, or again after a library of ops was loaded.

    Left out are ops that keep something (variables, tables, queues), call
    functions, or take strings. Results with a number of rows that is not known
    while a function is traced, as `tf.unique`'s, stop most of DTensor.

    >>> import tf_layoutmap as tlm
    >>> isinstance(tlm.dtensor.enable_missing_ops(), tuple)
    True

    Returns:
      The ops that this call enabled; TensorFlow's own rules stay.

    Raises:
      RuntimeError: This tf.dtensor cannot be reached; see `available`.
    """
    enabled = []
    for op in tf_private.registered_ops():
        if _is_function_of_inputs(op) and not can_shard(op.name):
            is_divided = op.name in _ELEMENTWISE
            register_op(op.name, "elementwise" if is_divided else "replicated")
            enabled.append(op.name)
            if not is_divided:
                _enabled.add(op.name)
    return tuple(enabled)


def is_replicated_op(name: str) -> bool:
    """Whether op `name` is computed whole because DTensor has no rule."""
    return name in _enabled


def _is_function_of_inputs(op: Any) -> bool:
    if op.name in _RANDOM:
        return True
    if op.is_stateful or op.name in _CONTROL_FLOW or _OTHERS.match(op.name):
        return False
    arguments = [*op.input_arg, *op.output_arg]
    return (
        bool(op.output_arg)
        and not any(a.is_ref or a.type in _TYPES for a in arguments)
        and not any("func" in a.type for a in op.attr)
    )


@functools.cache
def _register() -> None:
    register_op("LayoutMap>LookupShard", "batch_parallel")
    register_op("LayoutMap>UpdateShard", "local_update")


def row_axis(table: dtensor.DVariable) -> str:
    """The mesh dimension along which the rows of `table` are divided.

    Raises:
      ValueError: If its rows are not divided, or its columns are too.
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
    """Returns the index of each device's shard, `[num_shards, 1, 1]` int32.

    The tensor is kept as long as DTensor's device, which owns it.
    """
    kept = tf_private.kept_with_device("shard_index")
    key = mesh.to_string(), axis
    if key not in kept:
        # Created eagerly: a function that is being traced would own the tensor.
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
    """The rows of `ids`; a tape gets one `tf.IndexedSlices` for the table.

    Args:
      table: `[num_rows, dim]` float32, its rows divided along one mesh
        dimension, its columns whole.
      ids: `[num_ids]` int32 or int64 DTensor of the table's mesh.
      name: Of the table, in errors; None for that of the variable.
      num_rows: Rows that ids may name; what is behind them is padding. None
        for all.

    Returns:
      `[num_ids, dim]`, replicated.

    Raises:
      ValueError: If the table has another layout.
      RuntimeError: If tf.dtensor cannot take our ops here.
      tf.errors.OpError: If an id is outside the table. DTensor reports it
        when the result is read, in the words of whichever device came first.
    """
    _register()
    axis, mesh = row_axis(table), table.layout.mesh
    # Layouts flow backwards from whoever uses the result: each is pinned, or
    # a consumer that divides the batch would make these ops impossible.
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
    """One optimizer step on the rows of `ids`, those of equal ids summed.

    Args:
      table: As in `lookup`.
      slots: The optimizer's slot variables, with the table's layout.
      ids: `[num_ids]` int32 or int64 DTensor of the table's mesh.
      gradients: `[num_ids, dim]` float32, of the rows of `ids`.
      optimizer: `"sgd"`, `"adagrad"`, `"adam"`, ...; docs/ops.md has them.
      hyperparameters: `[k]` float32, replicated: the numbers of the rule.
      name: As in `lookup`.
      num_rows: As in `lookup`.

    Raises:
      ValueError: If a layout differs.
      RuntimeError: If tf.dtensor cannot take our ops here.
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
