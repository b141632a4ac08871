"""Sharded embeddings and layouts for big Keras models on TensorFlow."""

import os as _os

from tf_layoutmap import _lazy
from tf_layoutmap._version import __version__

# DTensor's all-reduce combining pass lets a read overtake the write before it,
# and its all-to-all mixes up what has four dimensions (docs/design.md, "The
# DTensor switches"). TensorFlow reads the variables once, when DTensor first
# needs them, so they are set before anything else.
_os.environ.setdefault(
    "DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION", "0")
_os.environ.setdefault("DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE", "1")
_os.environ.setdefault("DTENSOR_USE_ALL_TO_ALL_RELAYOUT", "0")

# Each public name and where it lives; imported at first use.
_HOMES = {
    "ShardedVariable": "tf_layoutmap.sharded:ShardedVariable",
    "ShardedVariableMixin": "tf_layoutmap.sharded:ShardedVariableMixin",
    "ShardedVariableSpec": "tf_layoutmap.sharded:ShardedVariableSpec",
    "TPUEmbedding": "tf_layoutmap.embedding.tpu_embedding:TPUEmbedding",
    "serving_embedding_lookup":
        "tf_layoutmap.embedding.serving:serving_embedding_lookup",
    "inspect_ids": "tf_layoutmap.embedding.inspection.inspect_ids:inspect_ids",
    "emulation": "tf_layoutmap.emulation",
    "dtensor": "tf_layoutmap.dtensor",
    "layers": "tf_layoutmap.layers",
    "optimizers": "tf_layoutmap.embedding.optimizers",
    "partitioners": "tf_layoutmap.partition.partitioners",
    "LayoutMap": "tf_layoutmap.layout.layout_map:LayoutMap",
    "distribution": "tf_layoutmap.distribution",
    "layout": "tf_layoutmap.layout",
    "layout_map_scope":
        "tf_layoutmap.layout.layout_map_scope:layout_map_scope",
    "visualize_layout": "tf_layoutmap.layout.visualize:visualize_layout",
    "patches": "tf_layoutmap._patches.report:patches",
    "describe_process": "tf_layoutmap.process_report:describe_process",
}
__getattr__, __dir__ = _lazy.exports(__name__, _HOMES)
__all__ = ["__version__", *_HOMES]
