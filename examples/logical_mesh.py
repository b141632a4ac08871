"""Creates meshes of logical CPUs: TensorFlow splits one CPU into devices."""

from __future__ import annotations

import re

_SHAPE = re.compile(r"([1-9]\d?)x([1-9]\d?)")
AXES = ("batch", "model")


def parse_shape(text: str) -> tuple[int, int]:
    """Returns the sizes of the axes "batch" and "model".

    >>> parse_shape("2x4")
    (2, 4)

    Raises:
      ValueError: The text does not have this format.
    """
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(
            "must be the sizes of the axes batch and model, each 1 to 99, "
            f"such as '2x2'. Received: {text!r}."
        )
    return int(found[1]), int(found[2])


def is_shape(text: str | None) -> bool:
    """Returns whether `parse_shape` accepts `text`, or `text` is None."""
    return text is None or _SHAPE.fullmatch(text) is not None


def make_mesh(shape: tuple[int, int]):
    """Splits the CPU into logical devices and returns a mesh of them.

    TensorFlow can split the CPU only before it runs its first operation.

    Args:
      shape: Sizes of the axes "batch" and "model".

    Returns:
      A `dtensor.Mesh` of `shape[0] * shape[1]` logical CPUs.
    """
    import tensorflow as tf

    count = shape[0] * shape[1]
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * count,
    )
    return tf.experimental.dtensor.create_mesh(
        list(zip(AXES, shape, strict=True)),
        devices=[f"CPU:{index}" for index in range(count)],
    )
