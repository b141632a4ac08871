"""Sharded embeddings and layouts for large Keras models on TensorFlow."""

import os as _os
from typing import TYPE_CHECKING

from tf_layoutmap._core import distribution_notice as _distribution_notice
from tf_layoutmap._core import lazy as _lazy
from tf_layoutmap._core import requirements as _requirements
from tf_layoutmap._version import __version__

# These environment variables disable two features of DTensor. The pass that
# combines all-reduces can move a read before the preceding write, and
# all-to-all has wrong results for tensors with four dimensions (docs/design.md,
# "The DTensor switches"). The variables are set here, because TensorFlow reads
# them only once, when a program first uses DTensor.
_os.environ.setdefault("DTENSOR_ENABLE_COMBINE_ALL_REDUCES_OPTIMIZATION", "0")
_os.environ.setdefault("DTENSOR_ALLREDUCE_COMBINE_OPTIMIZATION_GROUP_SIZE", "1")
_os.environ.setdefault("DTENSOR_USE_ALL_TO_ALL_RELAYOUT", "0")

# Before the import of TensorFlow, checks that it does not abort the process.
_requirements.check_libtpu_before_tensorflow()

# Issues a warning if the program sets a distribution of Keras, which has no
# effect before `tlm.distribution.enable()`.
_distribution_notice.start()

# Registers the classes that a saved model can contain, so that
# `keras.models.load_model` finds them. They are imported when they are loaded.
_lazy.register_classes(
    {
        "keras": [
            "tf_layoutmap.layers.keras3.dot_interaction:DotInteraction",
            "tf_layoutmap.layers.keras3.row_optimizer:RowOptimizer",
            "tf_layoutmap.layers.keras3.sharded_embedding:KeyMask",
            "tf_layoutmap.layers.keras3.sharded_embedding:ShardedEmbedding",
            "tf_layoutmap.layers.keras3.stock_adagrad:StockAdagrad",
            "tf_layoutmap.layers.keras3.stock_embedding:ReplacedEmbedding",
            "tf_layoutmap.layers.keras3.tpu_embedding:TPUEmbedding",
        ],
        "tf_keras": [
            "tf_layoutmap.layers.tf_keras.dot_interaction:DotInteraction",
            "tf_layoutmap.layers.tf_keras.row_optimizer:RowOptimizer",
            "tf_layoutmap.layers.tf_keras.sharded_embedding:ShardedEmbedding",
            "tf_layoutmap.layers.tf_keras.stock_embedding:ReplacedEmbedding",
            "tf_layoutmap.layers.tf_keras.tpu_embedding:TPUEmbedding",
        ],
    }
)

# Maps each public name to its location. A name is imported when a program first
# uses it.
_HOMES = {
    "ShardedVariable": "tf_layoutmap.sharded:ShardedVariable",
    "ShardedVariableMixin": "tf_layoutmap.sharded:ShardedVariableMixin",
    "ShardedVariableSpec": "tf_layoutmap.sharded:ShardedVariableSpec",
    "TPUEmbedding": "tf_layoutmap.embedding.tpu_embedding:TPUEmbedding",
    "TPUEmbeddingV2": (
        "tf_layoutmap.embedding.v2.tpu_embedding_v2:TPUEmbeddingV2"
    ),
    "pack": "tf_layoutmap.embedding.packing:pack",
    "export": "tf_layoutmap.serving.export:export",
    "inspect_ids": "tf_layoutmap.embedding.inspection.inspect_ids:inspect_ids",
    "plan": "tf_layoutmap.planning.planner:plan",
    "planning": "tf_layoutmap.planning",
    "emulation": "tf_layoutmap.emulation",
    "deltas": "tf_layoutmap.deltas",
    "dtensor": "tf_layoutmap.dtensor",
    "layers": "tf_layoutmap.layers",
    "vocabulary": "tf_layoutmap.vocabulary",
    "optimizers": "tf_layoutmap.embedding.optimizers",
    "ops": "tf_layoutmap.ops",
    "partitioners": "tf_layoutmap.partition",
    "serving": "tf_layoutmap.serving",
    "ps": "tf_layoutmap.ps",
    "LayoutMap": "tf_layoutmap.layout.layout_map:LayoutMap",
    "distribution": "tf_layoutmap.distribution",
    "layout": "tf_layoutmap.layout",
    "layout_map_scope": "tf_layoutmap.mesh_scope:layout_map_scope",
    "visualize_layout": "tf_layoutmap.layout.visualize:visualize_layout",
    "process": "tf_layoutmap.process",
}

if TYPE_CHECKING:
    import tf_layoutmap.deltas as deltas
    import tf_layoutmap.distribution as distribution
    import tf_layoutmap.dtensor as dtensor
    import tf_layoutmap.embedding.optimizers as optimizers
    import tf_layoutmap.emulation as emulation
    import tf_layoutmap.layers as layers
    import tf_layoutmap.layout as layout
    import tf_layoutmap.ops as ops
    import tf_layoutmap.partition as partitioners
    import tf_layoutmap.planning as planning
    import tf_layoutmap.process as process
    import tf_layoutmap.ps as ps
    import tf_layoutmap.serving as serving
    import tf_layoutmap.vocabulary as vocabulary
    from tf_layoutmap.embedding.inspection.inspect_ids import inspect_ids
    from tf_layoutmap.embedding.packing import pack
    from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding
    from tf_layoutmap.embedding.v2.tpu_embedding_v2 import TPUEmbeddingV2
    from tf_layoutmap.layout.layout_map import LayoutMap
    from tf_layoutmap.layout.visualize import visualize_layout
    from tf_layoutmap.mesh_scope import layout_map_scope
    from tf_layoutmap.planning.planner import plan
    from tf_layoutmap.serving.export import export
    from tf_layoutmap.sharded import (
        ShardedVariable,
        ShardedVariableMixin,
        ShardedVariableSpec,
    )
else:
    __getattr__, __dir__ = _lazy.exports(__name__, _HOMES)

__all__ = [
    "__version__",
    "ShardedVariable",
    "ShardedVariableMixin",
    "ShardedVariableSpec",
    "TPUEmbedding",
    "TPUEmbeddingV2",
    "pack",
    "export",
    "inspect_ids",
    "plan",
    "planning",
    "emulation",
    "deltas",
    "dtensor",
    "layers",
    "vocabulary",
    "optimizers",
    "ops",
    "partitioners",
    "serving",
    "ps",
    "LayoutMap",
    "distribution",
    "layout",
    "layout_map_scope",
    "visualize_layout",
    "process",
]
