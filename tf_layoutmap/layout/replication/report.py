"""Report of the replicated ops of a step, for warnings and `explain`."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import dtensor_ops, user_warnings
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.mesh import errors, shard_map
from tf_layoutmap.layout.ops import convolutions, independent_dims
from tf_layoutmap.layout.ops.corrections import is_shape
from tf_layoutmap.layout.replication import measured
from tf_layoutmap.layout.replication.traces import Replication

# Operations whose kernel can be sharded by channels.
_CONVOLUTIONS = frozenset(
    (
        "Conv2D",
        "Conv3D",
        "Conv2DBackpropInput",
        "Conv3DBackpropInputV2",
        "DepthwiseConv2dNative",
    )
)
# Maximum number of operations in a message.
_SHOWN = 8
# The entry for a function that is fully replicated.
ALL = "everything, with all weights gathered"


@dataclasses.dataclass(frozen=True)
class ReplicatedOp:
    """An operation that is replicated: every device computes it in full.

    Attributes:
      operation: Type of the operation, for example `"GatherV2"`, or a
        description if the full step is replicated.
      layer: Quoted name of the innermost layer that contains the operation;
        None if no layer contains it.
      why: Reason for the replication, for example the error message of DTensor.
      bytes_per_device: Bytes of the inputs and results whose sizes are known.
        If the full step is replicated, bytes of the gathered weights.
      count: Number of such operations in the layer.
    """

    operation: str
    layer: str | None
    why: str
    bytes_per_device: int
    count: int = 1

    def __str__(self) -> str:
        times = f"{self.count} " if self.count > 1 else ""
        where = f" in layer {self.layer}" if self.layer else ""
        return (
            f"{times}{self.operation}{where} ({self.why}; "
            f"{self.bytes_per_device / 1024:.1f} KiB per device)"
        )


def replicated_ops_of_graph(
    graph: Any, model: Any, reason_of: Callable[[str], str | None]
) -> tuple[ReplicatedOp, ...]:
    """Returns the replicated operations in the graph of a step.

    Args:
      graph: Graph of a step on a mesh.
      model: Model of Keras 3 or tf_keras, whose layers are named.
      reason_of: Function from the name of an operation to the reason why it is
        replicated; None if it is sharded.

    Returns:
      One entry per operation type, layer and reason. The entry with the most
      bytes is first.
    """
    entries: dict[tuple, ReplicatedOp] = {}
    for op in graph.get_operations():
        why = reason_of(op.name)
        if why is None and convolutions.GATHERED_SCOPE in op.name:
            if op.type in _CONVOLUTIONS:
                why = "the call does not fit the sharded kernel"
        elif why is None and independent_dims.GATHERED_SCOPE in op.name:
            if op.type in independent_dims.OPS:
                why = "the op needs a sharded dimension in full"
        elif (
            why is None
            and shard_map.SCOPE not in op.name
            and dtensor_ops.is_replicated_op(op.type)
            and not all(map(is_shape, op.inputs))
        ):
            why = "DTensor has no rule for it"
        if why is None:
            continue
        layer = errors.layer_of(op.name, model)
        size = sum(map(_num_bytes, [*op.inputs, *op.outputs]))
        key = op.type, layer, why
        so_far = entries.get(key, ReplicatedOp(*key, 0, 0))
        entries[key] = dataclasses.replace(
            so_far,
            bytes_per_device=so_far.bytes_per_device + size,
            count=so_far.count + 1,
        )
    return tuple(
        sorted(
            [*entries.values(), *_gathered(model)],
            key=lambda entry: -entry.bytes_per_device,
        )
    )


def report_of_function(replication: Replication) -> ReplicatedOp:
    """Returns the entry for a function that is fully replicated."""
    return ReplicatedOp(
        ALL,
        None,
        replication.why_full or "",
        sum(replication.gathered_bytes.values()),
    )


def _gathered(model: Any) -> Iterator[ReplicatedOp]:
    """Yields entries for layers whose sharded weights are gathered."""
    reported = set()
    for layer in model._flatten_layers(include_self=False):
        if not assignments.gathers_weights(layer):
            continue
        # A recurrent layer and its cell have the same weights.
        sharded = [
            v
            for v in layer.weights
            if hasattr(v, "layout")
            and not v.layout.is_fully_replicated()
            and id(v) not in reported
        ]
        reported.update(map(id, sharded))
        if sharded:
            yield ReplicatedOp(
                "gather of weights",
                repr(layer.name),
                "DTensor requires unsharded weights here",
                sum(map(_num_bytes, sharded)),
                len(sharded),
            )


def message(
    replicated: tuple[ReplicatedOp, ...],
    model: Any,
    kind: str,
    shown: int = _SHOWN,
) -> str:
    """Returns a sentence that lists the replicated operations of a step."""
    listed = "; ".join(map(str, replicated[:shown]))
    if len(replicated) > shown:
        listed += f"; and {len(replicated) - shown} more"
    return (
        f"DTensor cannot shard operations of the {kind} step of model "
        f"{model.name!r}, so every device computes them in full: {listed}."
    )


# Maps each model to its replicated operations per kind of step.
_of_models: weakref.WeakKeyDictionary[
    Any, dict[str, tuple[ReplicatedOp, ...]]
] = weakref.WeakKeyDictionary()


def replicated_ops_of_model(model: Any) -> tuple[ReplicatedOp, ...]:
    """Returns the replicated operations of all steps that `model` has run."""
    kinds = _of_models.get(model, {})
    return tuple(
        dict.fromkeys(entry for kind in sorted(kinds) for entry in kinds[kind])
    )


def record(replicated: tuple[ReplicatedOp, ...], model: Any, kind: str) -> None:
    """Records the replicated operations of a step; warns about new ones."""
    kinds = _of_models.setdefault(model, {})
    is_new = not set(replicated) <= set(kinds.get(kind, ()))
    kinds[kind] = replicated
    if is_new:
        user_warnings.warn(
            message(replicated, model, kind, shown=2) + " Results are correct; "
            "layout_map.explain(model) lists all operations.",
            errors.LayoutMapWarning,
        )


def raise_if_gathered(model: Any, kind: str) -> None:
    """Raises an error if the program of the last step gathers weights.

    Args:
      model: Model of Keras 3 or tf_keras.
      kind: Kind of the step, for example `"train"`.

    Raises:
      UnsupportedByDTensorError: If DTensor's program gathers sharded weights.
    """
    gathered = measured.gathered_weights(model, kind)
    if gathered:
        layers = "; ".join(
            f"{layer.gathered_bytes / 1024:.1f} KiB "
            + ("outside of all layers" if layer.layer is None else layer.layer)
            for layer in gathered[:_SHOWN]
        )
        raise errors.UnsupportedByDTensorError(
            f"The program that DTensor compiled for the {kind} step of model "
            f"{model.name!r} gathers sharded weights on every device: "
            f"{layers}. This step has been applied. Change the layouts of "
            "these weights, or use a LayoutMap with strict=False to gather "
            "them."
        )


def _num_bytes(x: Any) -> int:
    count, dtype = tf.TensorShape(x.shape).num_elements(), tf.as_dtype(x.dtype)
    return (
        0
        if count is None or dtype in (tf.resource, tf.variant)
        else (count * dtype.size)
    )
