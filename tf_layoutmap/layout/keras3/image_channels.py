"""Images whose channels stay sharded between layers.

A convolution whose kernel is sharded by output channels returns images whose
channels are sharded. Most layers, and user code, need all channels of an image
on one device, because DTensor has no rule for many ops on sharded channels. The
result of the layer is therefore gathered.

Some layers process each channel separately, for example batch normalization,
activations and pooling. A convolution whose kernel is sharded by input channels
needs only the channels of its device. `gathered` records the sharded images
with the gathered images. Convolutions, and layers that process each channel
separately, read the sharded images. If no other operation reads the gathered
images, DTensor does not compute them. A chain of such layers then needs no
communication until the convolution that sums over its input channels.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap.layout.mesh import tracing
from tf_layoutmap.layout.mesh.device_mesh import Mesh
from tf_layoutmap.layout.mesh.shard_map import ShardedKernel

# Attribute of gathered images: their sharded images.
_SHARDED = "_layoutmap_sharded_images"


def _classes(names: str) -> frozenset[type]:
    return frozenset(getattr(keras.layers, name) for name in names.split())


# Layers that process each channel separately if the channels are the last
# dimension. Subclasses are not included, because they can override `call`.
_BY_CHANNEL = _classes(
    """
    BatchNormalization Activation ReLU LeakyReLU ELU Dropout
    MaxPooling1D MaxPooling2D MaxPooling3D
    AveragePooling1D AveragePooling2D AveragePooling3D
    GlobalMaxPooling1D GlobalMaxPooling2D GlobalMaxPooling3D
    GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D
    UpSampling1D UpSampling2D UpSampling3D
    ZeroPadding1D ZeroPadding2D ZeroPadding3D
    Cropping1D Cropping2D Cropping3D
    """
)
# Layers with several inputs of the same shape.
_MERGES = _classes("Add Subtract Multiply Average Maximum Minimum")
# The input and the result of a separable convolution belong to different
# kernels, so these convolutions are not included.
_CONVOLUTIONS = _classes(
    """
    Conv1D Conv2D Conv3D Conv1DTranspose Conv2DTranspose Conv3DTranspose
    DepthwiseConv1D DepthwiseConv2D
    """
)
_ELEMENTWISE = tuple(
    getattr(keras.activations, name)
    for name in """
    relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid hard_sigmoid
    hard_silu tanh hard_tanh softplus softsign exponential linear
    """.split()
)


@dataclasses.dataclass(frozen=True)
class _Sharded:
    """Images with sharded channels.

    Attributes:
      images: The images. The channels are the last dimension.
      axis: Mesh axis that shards the channels.
    """

    images: Any
    axis: str


def gathered(
    x: Any, mesh: Mesh, batch_dim: str | None, axis: str | None
) -> Any:
    """Returns images with gathered channels, and records the sharded images.

    Args:
      x: Images whose channels are the last dimension.
      mesh: `dtensor.Mesh` of the images.
      batch_dim: Mesh axis that shards batches, or None.
      axis: Mesh axis that shards the channels, or None.
    """
    result = tracing.pin_images(x, mesh, batch_dim)
    if (
        axis is None
        or not tf.is_symbolic_tensor(x)
        or not tracing.has_known_size(x)
        or not x.dtype.is_floating
        or mesh.dim_size(axis) == 1
        or x.shape[-1] % mesh.dim_size(axis)
    ):
        return result
    batch = tracing.axis_of_samples(x, mesh, batch_dim, axis)
    specs = [batch, *[None] * (x.shape.rank - 2), axis]
    sharded = tracing.pin_sharded(x, mesh, specs)
    setattr(result, _SHARDED, _Sharded(sharded, axis))
    return result


def _sharded_form(x: Any) -> _Sharded | None:
    """Returns the sharded images of gathered images, or None."""
    form = getattr(x, _SHARDED, None)
    if (
        form is None
        or form.images.graph is not tf.compat.v1.get_default_graph()
        # The sharded images have no mask.
        or getattr(x, "_keras_mask", None) is not None
    ):
        return None
    return form


def _has_last_channels(layer: Any) -> bool:
    return getattr(layer, "data_format", None) in (None, "channels_last")


def input_of_convolution(
    layer: Any, kernels: Sequence[ShardedKernel], x: Any
) -> Any:
    """Returns the sharded images that a convolution reads instead of `x`.

    Args:
      layer: A layer.
      kernels: The sharded kernels of the layer.
      x: The input of the layer.

    Returns:
      The sharded images; None if the convolution must read `x`.
    """
    form = _sharded_form(x)
    if form is None or len(kernels) != 1 or type(layer) not in _CONVOLUTIONS:
        return None
    (kernel,) = kernels
    first, second = kernel.axes
    if kernel.kind == "transpose" or getattr(layer, "groups", 1) > 1:
        # A device computes groups from the input channels of these groups.
        first = second
    return form.images if first == form.axis else None


def axis_of_result(layer: Any, kernels: Sequence[ShardedKernel]) -> str | None:
    """Returns the mesh axis that shards the channels of a convolution, or None.

    Args:
      layer: A layer.
      kernels: The sharded kernels of the layer.
    """
    if (
        len(kernels) != 1
        or type(layer) not in _CONVOLUTIONS
        or not _is_elementwise(layer.activation)
    ):
        return None
    (kernel,) = kernels
    return kernel.axes[1 if kernel.kind == "convolution" else 0]


def _is_elementwise(activation: Any) -> bool:
    return any(activation is known for known in _ELEMENTWISE)


def _processes_channels(layer: Any, rank: int) -> bool:
    if type(layer) is keras.layers.BatchNormalization:
        return layer.axis in (-1, rank - 1)
    if type(layer) is keras.layers.Activation:
        return _is_elementwise(layer.activation)
    return True


def sharded_inputs(layer: Any, inputs: Any) -> tuple[Any, str] | None:
    """Returns sharded images for a layer that processes channels separately.

    Args:
      layer: A layer.
      inputs: The first argument of the call of the layer.

    Returns:
      The argument with sharded images, and the mesh axis that shards the
      channels. None if the layer must be called with `inputs`.
    """
    if type(layer) in _MERGES and isinstance(inputs, list | tuple):
        forms = [_sharded_form(x) for x in inputs]
        axes = {None if form is None else form.axis for form in forms}
        if len({tuple(x.shape) for x in inputs}) != 1 or len(axes) != 1:
            return None
    elif type(layer) in _BY_CHANNEL and _has_last_channels(layer):
        forms = [_sharded_form(inputs)]
        axes = {None if form is None else form.axis for form in forms}
    else:
        return None
    (axis,) = axes
    images = [form.images for form in forms if form is not None]
    if axis is None or not _processes_channels(layer, images[0].shape.rank):
        return None
    return (images if type(layer) in _MERGES else images[0]), axis
