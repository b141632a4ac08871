"""A checkpoint that is written one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf


def write(target: str, tensors: Iterable[tuple[str, Any]]) -> None:
    """Writes a checkpoint of TensorFlow.

    Each tensor is written before the next one is asked for, so that one at a
    time is in memory. What is at `target` is replaced at the end, and stays if
    something fails.

    Args:
      target: Its prefix.
      tensors: Names and values, at least one.
    """
    parts: list[str] = []
    try:
        for name, value in tensors:
            parts.append(f"{target}.part-{len(parts)}")
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=parts[-1], tensor_names=[name],
                    shape_and_slices=[""], tensors=[tf.constant(value)])
            del value
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=target,
            delete_old_dirs=False)
    finally:
        for part in parts:
            for path in tf.io.gfile.glob(f"{part}.*"):
                tf.io.gfile.remove(path)
