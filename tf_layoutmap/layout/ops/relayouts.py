"""Relayouts whose target layout is known only when DTensor compiles a function.

DTensor selects the layout of a tensor from the operation that computes it (the
producer) and from the operations that use it (the consumers). A consumer can
shard dimensions that the producer leaves unsharded. Some operations cannot
produce the result in such a layout, and raise an error.

`RelayoutLike`, the gradient of a relayout, is one of these operations: its
result must have the layout of its second input. In this module, the second
input is a copy whose layout changes together with the layout of the result.
With this correction, `tracing.with_layout_of_producer` gives a tensor the
layout of its producer: the consumers use another tensor, whose layout they may
change.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh

dtensor = tf.experimental.dtensor


def relayout_like(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    layout_input: Any,
    name: str | None = None,
) -> Any:
    """Computes `dtensor.relayout_like`; consumers may shard the result further.

    The second input is replaced by a sum with zero. DTensor shards the sum like
    the result, and converts `input` to this layout. No device computes the
    sum, because only its layout is used.

    The zero has an explicit layout, which defines the mesh of the sum. If
    DTensor had to infer the mesh through several `RelayoutLike` operations, the
    process would end.
    """
    layout_input = tf.convert_to_tensor(layout_input)
    is_bool = layout_input.dtype.is_bool
    if mesh is not None and tracing.has_known_size(layout_input):
        zero = dtensor.relayout(
            tf.zeros([], layout_input.dtype),
            dtensor.Layout.replicated(mesh, rank=0),
        )
        layout_input = (tf.logical_or if is_bool else tf.add)(
            layout_input, zero
        )
    return original(input, layout_input, name=name)
