"""Convolutions whose kernel is sharded by channels.

DTensor supports only unsharded kernels. On a mesh, this module therefore
computes a convolution with `shard_map`: each device convolves with its shard of
the kernel, and the kernel is never gathered.

* If the output channels are sharded, each device computes its output channels.
* If the input channels are sharded, each device convolves its input channels,
  and the partial results are summed.
* In a depthwise convolution, each device computes its channels.

Kernels are sharded only during the call of a layer for which `sharded_kernels`
is used. With an unsharded kernel, three kinds of convolutions are also computed
with `shard_map`, so that the samples stay sharded: eager convolutions,
depthwise convolutions, whose gradients have no rule, and dilated convolutions,
for which TensorFlow rearranges samples with ops that have no rule.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import dtensor_ops
from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.known_layouts import known_axes
from tf_layoutmap.layout.mesh.shard_map import (
    SCOPE,
    ShardedKernel,
    local_size,
    shard_map,
)
from tf_layoutmap.layout.mesh.tracing import ThreadValue
from tf_layoutmap.layout.ops.corrections import static_array

# Name scope of convolutions whose kernel is gathered after all, because the
# call does not fit the layout of the kernel.
GATHERED_SCOPE = "layoutmap_gathered_kernel"

dtensor = tf.experimental.dtensor


@dataclasses.dataclass(frozen=True)
class _Call:
    """The layer call that is running.

    Attributes:
      mesh: `dtensor.Mesh` of the layer.
      batch_dim: Mesh axis that shards batches, or None.
      kernels: The sharded kernels of the layer.
    """

    mesh: Mesh
    batch_dim: str | None
    kernels: tuple[ShardedKernel, ...]

    def kernel(self, kind: str, filters: Any) -> ShardedKernel | None:
        """Returns the sharded kernel that an op uses, or None.

        A layer can use other kernels, too, and a gradient that is computed in
        the call of the layer uses local shards.
        """
        for kernel in self.kernels:
            if kernel.kind == kind and kernel.channels == tuple(
                filters.shape[-2:]
            ):
                return kernel
        return None

    def shards(self, images: Sequence[str | None]) -> bool:
        """Returns whether images with the layout `images` are sharded."""
        return any(
            axis is not None and self.mesh.dim_size(axis) > 1 for axis in images
        )

    def spec(self, x: Any, channels: str | None, *axes: str | None) -> list:
        """Returns the layout of images or results of a convolution.

        Args:
          x: The images.
          channels: Mesh axis of the channels.
          *axes: Mesh axes of the kernel, which cannot shard the batch.
        """
        batch = tracing.axis_of_samples(
            x, self.mesh, self.batch_dim, channels, *axes
        )
        return [batch, *[None] * (x.shape.rank - 2), channels]


_call: ThreadValue[_Call | None] = ThreadValue(None)


def sharded_kernels(
    mesh: Mesh, batch_dim: str | None, kernels: Sequence[ShardedKernel]
) -> AbstractContextManager[None]:
    """Shards the convolutions of a layer that is called in the context.

    Args:
      mesh: `dtensor.Mesh` of the layer.
      batch_dim: Mesh axis that shards batches, or None.
      kernels: The sharded kernels of the layer.
    """
    return _call.set_to(_Call(mesh, batch_dim, tuple(kernels)))


def convolution(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    filter: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes a convolution; with a sharded kernel, on shards.

    The kernel is `[..., input channels / groups, output channels]`.
    """
    x, kernel = tf.convert_to_tensor(input), tf.convert_to_tensor(filter)
    call = _running_call()
    if _computes_groups(call, mesh, x, kernel, kwargs):
        original = _by_groups(original)
    if call is None and not _is_pinned(x):
        call = _call_of_samples(mesh, x, kernel, kwargs)
    if call is None:
        return original(x, kernel, *args, **kwargs)
    sharded = call.kernel("convolution", kernel)
    if sharded is None and not call.kernels:
        sharded = _unsharded("convolution", x, kernel)
    if sharded is None:
        return _pinned(original, call, x, kernel, *args, **kwargs)
    return _convolution(original, call, sharded, x, kernel, *args, **kwargs)


def dilated_convolution(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    filters: Any,
    strides: Any = None,
    padding: Any = "VALID",
    data_format: str | None = None,
    dilations: Any = None,
    name: str | None = None,
    **kwargs: Any,
) -> Any:
    """Computes `tf.nn.convolution`; with dilations, on shards.

    With dilations, TensorFlow moves blocks of each image to the dimension of
    the samples. On each device, these are the blocks of its own samples.
    """
    options = dict(
        strides=strides,
        padding=padding,
        data_format=data_format,
        dilations=dilations,
        **kwargs,
    )
    x, kernel = tf.convert_to_tensor(input), tf.convert_to_tensor(filters)
    call = None
    if _is_dilated(dilations) and x.shape.rank == kernel.shape.rank:
        call = _running_call() or _call_of_samples(mesh, x, kernel, options)
    if call is None or not _fits(x, kernel, options):
        return original(x, kernel, name=name, **options)
    if _computes_groups(call, mesh, x, kernel, options):
        original = _by_groups(original)
    sharded = call.kernel("convolution", kernel)
    return _convolution(
        original,
        call,
        sharded or _unsharded("convolution", x, kernel),
        x,
        kernel,
        **options,
    )


def _is_dilated(dilations: Any) -> bool:
    return dilations is not None and bool(np.any(np.not_equal(dilations, 1)))


def _is_pinned(x: Any) -> bool:
    """Returns whether the images of a layer are pinned.

    The layer also pins the result, so that DTensor's rule can be used.
    """
    return tf.is_symbolic_tensor(x) and x.op.type == "Relayout"


def _unsharded(kind: str, x: Any, kernel: Any) -> ShardedKernel:
    """Returns the layout in which an unsharded kernel is used.

    Args:
      kind: See `ShardedKernel`.
      x: The images. If their channels are sharded in eager mode, each device
        uses the part of the kernel that belongs to its channels.
      kernel: The kernel.
    """
    channels = known_axes(x) if tf.executing_eagerly() else None
    inner = channels[-1] if channels and _num_groups(x, kernel) == 1 else None
    if kind == "transpose":
        inner = channels[-1] if channels else None
    axes = (None, inner) if kind == "transpose" else (inner, None)
    return ShardedKernel(kind, tuple(kernel.shape[-2:]), axes)


def _call_of_samples(
    mesh: Mesh | None, x: Any, kernel: Any, options: dict[str, Any]
) -> _Call | None:
    """Returns a call with an unsharded kernel; None if no sample is sharded."""
    if SCOPE in tf.get_current_name_scope() or not _fits(x, kernel, options):
        return None
    if tf.executing_eagerly():
        # A sharded kernel would be gathered.
        if not (
            tracing.on_mesh(x)
            and tracing.on_mesh(kernel)
            and dtensor.fetch_layout(kernel).is_fully_replicated()
        ):
            return None
        mesh = dtensor.fetch_layout(x).mesh
    if mesh is None or not dtensor_ops.has_local_blocks():
        return None
    call = _Call(mesh, tracing.batch_dim_of_trace(), ())
    channels = known_axes(x) if tf.executing_eagerly() else None
    images = call.spec(x, channels[-1] if channels else None)
    return call if call.shards(images) else None


def _convolution(
    original: Callable[..., Any],
    call: _Call,
    sharded: ShardedKernel,
    x: Any,
    kernel: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes a convolution on shards of its kernel."""
    inner, outer = sharded.axes
    groups = _num_groups(x, kernel)
    if not _fits(x, kernel, kwargs) or (
        groups > 1
        and (
            inner is not None
            or outer is None
            or groups % call.mesh.dim_size(outer)
        )
    ):
        return _gathered(original, call, x, kernel, *args, **kwargs)
    images = call.spec(x, inner if groups == 1 else outer, inner, outer)
    return shard_map(
        lambda x, kernel: original(x, kernel, *args, **_without_name(kwargs)),
        call.mesh,
        [x, kernel],
        [images, [*[None] * (kernel.shape.rank - 2), inner, outer]],
        [*images[:-1], outer],
        [] if inner is None else [inner],
        key=_key(original, args, kwargs),
        has_separate_gradients=True,
    )


def depthwise_convolution(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    filter: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes a depthwise convolution; with a sharded kernel, on shards.

    The kernel is `[height, width, channels, multiplier]`.
    """
    x, kernel = tf.convert_to_tensor(input), tf.convert_to_tensor(filter)
    call = _running_call() or _call_of_samples(mesh, x, kernel, kwargs)
    known = None
    if tf.is_symbolic_tensor(kernel) and not (call and call.kernels):
        # The kernel is not the kernel of a convolution layer.
        known = known_axes(kernel)
    on = mesh if call is None else call.mesh
    if known and not (on and _divides(on, known[-2], x.shape[-1])):
        known = None
    if call is None:
        if (
            mesh is None
            or SCOPE in tf.get_current_name_scope()
            or not tf.is_symbolic_tensor(x)
        ):
            return original(x, kernel, *args, **kwargs)
        # No sample is sharded, for example when tokens are generated.
        call = _Call(mesh, None, ())
        if known is None:
            return _pinned(original, call, x, kernel, *args, **kwargs)
    # In a separable convolution, it is possible that only the pointwise kernel
    # is sharded. DTensor has no rule for the gradients of this op, so the batch
    # is sharded in the same way.
    sharded = call.kernel("depthwise", kernel)
    channels, multiplier = (None, None) if sharded is None else sharded.axes
    if known is not None:
        channels, multiplier = known[-2:]
    if not call.kernels and tf.executing_eagerly():
        channels = (known_axes(x) or (None,))[-1]
    if not _fits(x, kernel, kwargs) or multiplier is not None:
        return _gathered(original, call, x, kernel, *args, **kwargs)
    images = call.spec(x, channels, channels)
    return shard_map(
        lambda x, kernel: original(x, kernel, *args, **_without_name(kwargs)),
        call.mesh,
        [x, kernel],
        [images, [None, None, channels, None]],
        images,
        key=_key(original, 1, args, kwargs),
        has_separate_gradients=True,
    )


def _divides(mesh: Mesh, axis: str | None, size: int | None) -> bool:
    return axis is not None and bool(size) and size % mesh.dim_size(axis) == 0


def dilated_depthwise_convolution(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input: Any,
    filter: Any,
    strides: Any,
    padding: Any,
    rate: Any = None,
    name: str | None = None,
    data_format: str | None = None,
    dilations: Any = None,
) -> Any:
    """Computes `tf.nn.depthwise_conv2d`; with dilations, on shards."""
    options = dict(
        strides=strides,
        padding=padding,
        rate=rate,
        data_format=data_format,
        dilations=dilations,
    )
    if _is_dilated(rate) or _is_dilated(dilations):
        return depthwise_convolution(original, mesh, input, filter, **options)
    return original(input, filter, name=name, **options)


def transposed_convolution(
    original: Callable[..., Any],
    mesh: Mesh | None,
    input_sizes: Any,
    filter: Any,
    out_backprop: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes a transposed convolution; with a sharded kernel, on shards.

    The kernel is `[..., output channels, input channels]`.
    """
    x = tf.convert_to_tensor(out_backprop)
    kernel = tf.convert_to_tensor(filter)
    call = _running_call()
    if call is None and tf.executing_eagerly():
        call = _call_of_samples(mesh, x, kernel, kwargs)
    sharded = call and call.kernel("transpose", kernel)
    if call is not None and not call.kernels:
        sharded = _unsharded("transpose", x, kernel)
    if call is None or sharded is None:
        return original(input_sizes, kernel, x, *args, **kwargs)
    sizes = static_array(input_sizes)
    if sizes is None or not _fits(x, kernel, kwargs):
        return _gathered(
            lambda x, kernel: original(input_sizes, kernel, x, *args, **kwargs),
            call,
            x,
            kernel,
        )
    outer, inner = sharded.axes
    images = call.spec(x, inner, inner, outer)
    local_sizes = [*sizes]
    local_sizes[0] = local_size(local_sizes[0], call.mesh, images[0])
    local_sizes[-1] = local_size(local_sizes[-1], call.mesh, outer)
    return shard_map(
        lambda x, kernel: original(
            tf.constant(local_sizes, sizes.dtype),
            kernel,
            x,
            *args,
            **_without_name(kwargs),
        ),
        call.mesh,
        [x, kernel],
        [images, [*[None] * (kernel.shape.rank - 2), outer, inner]],
        [*images[:-1], outer],
        [] if inner is None else [inner],
        key=_key(original, local_sizes, args, kwargs),
        has_separate_gradients=True,
    )


def _running_call() -> _Call | None:
    """Returns the layer call in which an op is created, or None.

    A gradient that is computed in the call of a layer uses local shards.
    """
    return None if SCOPE in tf.get_current_name_scope() else _call.get()


def _fits(x: Any, kernel: Any, options: dict[str, Any]) -> bool:
    """Returns whether an op can run on shards of its inputs."""
    return (
        x.shape.is_fully_defined()
        and kernel.shape.is_fully_defined()
        and 0 not in (*x.shape, *kernel.shape)
        and options.get("data_format") in (None, "NHWC", "NWC", "NDHWC")
    )


def _gathered(
    original: Callable[..., Any],
    call: _Call,
    x: Any,
    kernel: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    with tf.name_scope(GATHERED_SCOPE):
        kernel = tracing.pin_replicated(kernel, call.mesh)
        return _pinned(
            original, call, x, kernel, *args, **_without_name(kwargs)
        )


def _key(original: Callable[..., Any], *options: Any) -> Any:
    """Returns a value that identifies a convolution with its options."""
    return original.__name__, repr(options)


def _without_name(options: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments without the name of the op.

    TensorFlow passes names that place the op outside of the current scope.
    """
    return {key: x for key, x in options.items() if key != "name"}


def _pinned(
    original: Callable[..., Any],
    call: _Call,
    x: Any,
    kernel: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Returns the result of an op on unsharded samples.

    DTensor propagates layouts backwards, so the next op of a layer could shard
    the channels of the result.
    """
    x = tracing.pin_unsharded_samples(x, call.mesh)
    return tracing.pin_unsharded_samples(
        original(x, kernel, *args, **kwargs), call.mesh
    )


def _computes_groups(
    call: _Call | None,
    mesh: Mesh | None,
    x: Any,
    kernel: Any,
    options: dict[str, Any],
) -> bool:
    """Returns whether a convolution must be computed group by group.

    TensorFlow's kernels for CPUs support the gradients of grouped convolutions
    only for images in float32, with oneDNN. Keras compiles these convolutions
    with XLA, which DTensor does not support.
    """
    mesh = mesh or (call and call.mesh)
    return (
        mesh is not None
        and mesh.device_type() == "CPU"
        and (x.dtype != tf.float32 or x.shape.rank != 4)
        and _fits(x, kernel, options)
        and _num_groups(x, kernel) > 1
    )


def _num_groups(x: Any, kernel: Any) -> int:
    """Returns the number of groups of a convolution; 1 if it is unknown."""
    sizes = x.shape.as_list()[-1:], kernel.shape.as_list()[-2:-1]
    if not all(size and size[0] for size in sizes):
        return 1
    return sizes[0][0] // sizes[1][0]


def _by_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a convolution that computes each group separately."""

    def convolution(x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        groups = _num_groups(x, kernel)
        return tf.concat(
            [
                original(group, weights, *args, **_without_name(kwargs))
                for group, weights in zip(
                    tf.split(x, groups, axis=-1),
                    tf.split(kernel, groups, axis=-1),
                )
            ],
            axis=-1,
        )

    # `_key` uses the name.
    convolution.__name__ = f"{original.__name__}_by_groups"
    return convolution
