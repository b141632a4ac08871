"""What every device computes whole in a step, named and counted for users."""

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import dtensor_ops
from tf_layoutmap.layout import assignments
from tf_layoutmap.layout.mesh import errors
from tf_layoutmap.layout.ops.corrections import is_shape
from tf_layoutmap.layout.replication.gathered_reads import GatheredReads

_SHOWN = 8
# In place of an operation: nothing of a function is divided.
ALL = "everything, with all weights gathered"


@dataclasses.dataclass(frozen=True)
class ReplicatedOp:
    """An operation that every device computes whole.

    Attributes:
      operation: Its type, as `"GatherV2"`; or that it is all of a step.
      layer: Quoted name of the innermost layer it is in; None outside of
        layers.
      why: What DTensor says, or that it has no rule.
      bytes_per_device: Of its inputs and results, as far as their sizes are
        known; of the weights, where all of a step is computed whole.
      count: How many such operations there are in the layer.
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
    """Returns what every device computes whole in the graph of a step.

    Args:
      graph: Of a step on a mesh.
      model: Of Keras 3 or tf_keras, whose layers are named.
      reason_of: What DTensor said of an operation, by its name; None of one
        that it divides.

    Returns:
      One entry for each operation, layer and reason, the largest first.
    """
    found: dict[tuple, ReplicatedOp] = {}
    for op in graph.get_operations():
        why = reason_of(op.name)
        if (
            why is None
            and dtensor_ops.is_replicated_op(op.type)
            and not all(map(is_shape, op.inputs))
        ):
            why = "DTensor has no rule for it"
        if why is None:
            continue
        layer = errors.layer_of(op.name, model)
        size = sum(map(_num_bytes, [*op.inputs, *op.outputs]))
        key = op.type, layer, why
        so_far = found.get(key, ReplicatedOp(*key, 0, 0))
        found[key] = dataclasses.replace(
            so_far,
            bytes_per_device=so_far.bytes_per_device + size,
            count=so_far.count + 1,
        )
    return tuple(
        sorted(
            [*found.values(), *_gathered(model)],
            key=lambda one: -one.bytes_per_device,
        )
    )


def report_of_function(reads: GatheredReads, why: str) -> ReplicatedOp:
    """Returns the entry of a function that every device computes whole."""
    return ReplicatedOp(ALL, None, why, sum(reads.bytes.values()))


def _gathered(model: Any) -> Iterator[ReplicatedOp]:
    """Finds layers that are given all of their divided weights."""
    told = set()
    for layer in model._flatten_layers(include_self=False):
        if not assignments.gathers_weights(layer):
            continue
        # Those of a recurrent layer are those of its cell, too.
        divided = [
            v
            for v in layer.weights
            if hasattr(v, "layout")
            and not v.layout.is_fully_replicated()
            and id(v) not in told
        ]
        told.update(map(id, divided))
        if divided:
            yield ReplicatedOp(
                "gather of weights",
                repr(layer.name),
                "DTensor has them whole only",
                sum(map(_num_bytes, divided)),
                len(divided),
            )


def message(found: tuple[ReplicatedOp, ...], model: Any, kind: str) -> str:
    """Returns what is computed whole, in words."""
    shown = "; ".join(map(str, found[:_SHOWN]))
    if len(found) > _SHOWN:
        shown += f"; and {len(found) - _SHOWN} more"
    return (
        f"To {kind}, model {model.name!r} needs operations that DTensor "
        f"cannot divide as the layouts ask for: {shown}."
    )


# What the steps of a model were found to compute whole, by kind of step.
_of_models: weakref.WeakKeyDictionary[
    Any, dict[str, tuple[ReplicatedOp, ...]]
] = weakref.WeakKeyDictionary()


def replicated_ops_of_model(model: Any) -> tuple[ReplicatedOp, ...]:
    """Returns what the steps of `model` that ran compute whole."""
    kinds = _of_models.get(model, {})
    return tuple(
        dict.fromkeys(one for kind in sorted(kinds) for one in kinds[kind])
    )


def record(found: tuple[ReplicatedOp, ...], model: Any, kind: str) -> None:
    """Notes what a step computes whole; warns when there is something new."""
    kinds = _of_models.setdefault(model, {})
    is_new = not set(found) <= set(kinds.get(kind, ()))
    kinds[kind] = found
    if is_new:
        warnings.warn(
            message(found, model, kind) + " Every device computes them whole: "
            "the numbers are right, at the cost of this memory. "
            "layout_map.explain(model) lists them; a LayoutMap with "
            "strict=True refuses them.",
            errors.LayoutMapWarning,
            stacklevel=4,
        )


def _num_bytes(x: Any) -> int:
    count, dtype = tf.TensorShape(x.shape).num_elements(), tf.as_dtype(x.dtype)
    return (
        0
        if count is None or dtype in (tf.resource, tf.variant)
        else (count * dtype.size)
    )
