"""Fused batch normalization, computed with ops that DTensor supports."""

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tf_layoutmap.layout.mesh.device_mesh import Mesh


class FusedBatchNormResults(NamedTuple):
    """The outputs of the op `FusedBatchNormV3`."""

    y: Any
    batch_mean: Any
    batch_variance: Any
    reserve_space_1: Any
    reserve_space_2: Any
    reserve_space_3: Any


def fused_batch_norm(
    original: Callable[..., Any],
    mesh: Mesh | None,
    x: Any,
    scale: Any,
    offset: Any,
    mean: Any,
    variance: Any,
    epsilon: float = 1e-4,
    exponential_avg_factor: float = 1.0,
    data_format: str = "NHWC",
    is_training: bool = True,
    name: str | None = None,
) -> Any:
    """Computes the op `FusedBatchNormV3` with ops that DTensor supports.

    DTensor ends the process when it compiles the fused op. The outputs are
    equal to the outputs of the fused op on CPUs. The variance of a batch that
    the op returns is divided by the number of values minus one.
    """
    del original, mesh
    x = tf.convert_to_tensor(x)
    channels = 1 if data_format.startswith("NC") else x.shape.rank - 1
    axes = [i for i in range(x.shape.rank) if i != channels]
    shape = [-1 if i == channels else 1 for i in range(x.shape.rank)]
    with tf.name_scope(name or "FusedBatchNormV3"):
        # The fused op computes statistics of 16-bit values in float32.
        values = tf.cast(x, tf.as_dtype(scale.dtype))
        mean, variance = map(tf.convert_to_tensor, (mean, variance))
        new_mean, new_variance = mean, variance
        if is_training:
            before = mean, variance
            mean = tf.reduce_mean(values, axes)
            variance = tf.reduce_mean(
                tf.math.squared_difference(values, tf.reshape(mean, shape)),
                axes,
            )
            count = tf.cast(tf.size(values) // tf.size(mean), values.dtype)
            unbiased = variance * (count / tf.maximum(count - 1, 1))
            factor = exponential_avg_factor
            new_mean, new_variance = (
                (mean, unbiased)
                if factor == 1
                else (
                    (1 - factor) * old + factor * new
                    for old, new in zip(before, (mean, unbiased))
                )
            )
        factors = tf.reshape(scale * tf.math.rsqrt(variance + epsilon), shape)
        y = (values - tf.reshape(mean, shape)) * factors
        y = tf.cast(y + tf.reshape(offset, shape), x.dtype)
        return FusedBatchNormResults(
            y, new_mean, new_variance, mean, variance, tf.zeros([0])
        )


class FusedBatchNormV1Results(NamedTuple):
    """The outputs of the ops `FusedBatchNorm` and `FusedBatchNormV2`."""

    y: Any
    batch_mean: Any
    batch_variance: Any
    reserve_space_1: Any
    reserve_space_2: Any


def fused_batch_norm_v1(
    original: Callable[..., Any], mesh: Mesh | None, *args: Any, **kwargs: Any
) -> Any:
    """Computes the op `FusedBatchNorm`; see `fused_batch_norm`."""
    results = fused_batch_norm(original, mesh, *args, **kwargs)
    return FusedBatchNormV1Results(*results[:5])
