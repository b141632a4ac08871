"""Replaced names of tf_keras, for the layers of `tlm.layers`."""

from tf_layoutmap._core.patch_entry import TF_KERAS, Patch, Replacement
from tf_layoutmap.layers import evaluation
from tf_layoutmap.layers.base import construction
from tf_layoutmap.layers.tf_keras import patches

TF_KERAS_EMBEDDINGS = "tf_keras_embedding_creation"
TF_KERAS_LAYERS = "tf_keras_self_training"
TF_KERAS_EVALUATION = "tf_keras_evaluation"
_LAYER_TESTS = "tests/layers/"


def _tf_keras_layer_entry(
    owner: str, name: str, ours: Replacement, why: str
) -> Patch:
    return Patch(
        TF_KERAS_LAYERS,
        f"_core.tf_keras_private:{owner}",
        name,
        ours,
        why,
        TF_KERAS,
        _LAYER_TESTS + "tf_keras/test_sharded_embedding.py",
    )


PATCHES: tuple[Patch, ...] = (
    *evaluation.patches_of_steps(
        TF_KERAS_EVALUATION, "tf_keras:Model", TF_KERAS
    ),
    _tf_keras_layer_entry(
        "Optimizer",
        "add_variable_from_reference",
        patches.add_variable,
        "tf_keras creates slot variables that are as large as the table.",
    ),
    _tf_keras_layer_entry(
        "Optimizer",
        "apply_gradients",
        patches.apply_gradients,
        "The optimizer of the model updates all rows of a table instead "
        "of the rows of the batch.",
    ),
    _tf_keras_layer_entry(
        "BaseOptimizer",
        "finalize_variable_values",
        patches.finalize,
        "tf_keras reads the moving averages of a table, but a table has "
        "no moving averages.",
    ),
    _tf_keras_layer_entry(
        "BaseOptimizer",
        "save_own_variables",
        patches.save_own_variables,
        "A stock model cannot read the optimizer of a weight file.",
    ),
    _tf_keras_layer_entry(
        "BaseOptimizer",
        "load_own_variables",
        patches.load_own_variables,
        "A weight file of a stock model raises an error.",
    ),
    _tf_keras_layer_entry(
        "LegacyOptimizer",
        "apply_gradients",
        patches.legacy_apply_gradients,
        "The optimizer of the model updates all rows of a table instead "
        "of the rows of the batch.",
    ),
    _tf_keras_layer_entry(
        "LegacyOptimizer",
        "_create_all_weights",
        patches.legacy_create,
        "tf_keras creates slot variables that are as large as the table.",
    ),
    _tf_keras_layer_entry(
        "HDF5_FORMAT",
        "_legacy_weights",
        patches.legacy_weights,
        "Legacy .h5 files omit tables with an open vocabulary, and saving a "
        "table with an optimizer raises an error.",
    ),
    construction.patch_of_creation(
        TF_KERAS_EMBEDDINGS, "tf_keras.layers", TF_KERAS
    ),
)
