"""Sharded tables that programs use like one `tf.Variable`."""

# This import comes first. If TensorFlow is not installed, the import raises an
# error that names the package to install.
from tf_layoutmap._core import ops as _ops  # noqa: F401
from tf_layoutmap.sharded import dispatch as _dispatch
from tf_layoutmap.sharded.mixin import ShardedVariableMixin
from tf_layoutmap.sharded.sharded_variable import (
    ShardedVariable,
    ShardedVariableSpec,
)

_dispatch.register()

__all__ = [
    "ShardedVariable",
    "ShardedVariableMixin",
    "ShardedVariableSpec",
]
