"""Replaced names of TensorFlow, for gradients of sharded tables."""

from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch
from tf_layoutmap.sharded import gradient

PATCHES: tuple[Patch, ...] = (
    Patch(
        "table_gradients",
        "_core.tf_private:imperative_grad",
        "imperative_grad",
        gradient.with_source_of_each_shard,
        "With `unconnected_gradients=ZERO`, the zeros of a variable after "
        "a sharded table have the shape of another variable, or the "
        "process ends with a segmentation fault.",
        TENSORFLOW,
        "tests/sharded/test_gradient.py",
    ),
)
