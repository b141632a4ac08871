"""Names of both Keras' optimizers, replaced for the layers of `tlm.layers`."""

from tf_layoutmap._patches.rows import KERAS, TF_KERAS, Patch

SELF_TRAINING = "keras3_self_training"
SHARD_SLOTS = "keras3_shard_slots"
TF_KERAS_LAYERS = "tf_keras_self_training"

_BASE = "_keras_private:BaseOptimizer"
_OPTIMIZER = "_keras_private:TFOptimizer"
_SCALED = "_keras_private:LossScaleOptimizer"
_TESTS = "tests/layers/"


def _trained(owner: str, name: str, ours: str, why: str, test: str) -> Patch:
    return Patch(
        SELF_TRAINING,
        owner,
        name,
        f"layers.keras3.self_training:{ours}",
        why,
        KERAS,
        f"{_TESTS}keras3/{test}",
    )


def _slots(owner: str, name: str, ours: str, why: str) -> Patch:
    return Patch(
        SHARD_SLOTS,
        owner,
        name,
        f"layers.keras3.shard_slots:{ours}",
        why,
        KERAS,
        _TESTS + "keras3/test_shard_slots.py",
    )


def _tf_keras(owner: str, name: str, ours: str, why: str) -> Patch:
    return Patch(
        TF_KERAS_LAYERS,
        f"_tf_keras_private:{owner}",
        name,
        f"layers.tf_keras.patches:{ours}",
        why,
        TF_KERAS,
        _TESTS + "tf_keras/test_sharded_embedding.py",
    )


ROWS = [
    _trained(
        _SCALED,
        "_overwrite_variable_with_gradient",
        "overwrites",
        "The loss scale stays in the gradient of a table.",
        "test_model_optimizers.py",
    ),
    _trained(
        _SCALED,
        "check_finite",
        "check_finite",
        "It looks for NaN in every element of a table.",
        "test_model_optimizers.py",
    ),
    _trained(
        _OPTIMIZER,
        "add_variable_from_reference",
        "add_variable",
        "An accumulator as large as the table is made.",
        "test_model_optimizers.py",
    ),
    _trained(
        _BASE,
        "_overwrite_variables_directly_with_gradients",
        "overwrite_or_accumulate",
        "Of several gradients the largest is kept, not their sum.",
        "test_model_optimizers.py",
    ),
    _trained(
        _BASE,
        "_filter_empty_gradients",
        "filter_empty",
        "A table without a gradient is left out with a warning.",
        "test_tpu_embedding_training.py",
    ),
    _slots(
        _BASE,
        "build",
        "build",
        "Slot variables do not know which shard they belong to.",
    ),
    _slots(
        _OPTIMIZER,
        "add_variable_from_reference",
        "add_variable",
        "Slot variables do not know which shard they belong to.",
    ),
    _slots(
        _BASE,
        "_track_variable",
        "track_variable",
        "A checkpoint restores into the wrong slot variables.",
    ),
    _slots(
        _OPTIMIZER,
        "_trackable_children",
        "trackable_children",
        "A checkpoint depends on the number of shards.",
    ),
    _slots(
        _BASE,
        "save_own_variables",
        "save_own_variables",
        "A file of weights depends on the number of shards.",
    ),
    _slots(
        _BASE,
        "load_own_variables",
        "load_own_variables",
        "A file of weights depends on the number of shards.",
    ),
    _tf_keras(
        "Optimizer",
        "add_variable_from_reference",
        "add_variable",
        "Slot variables as large as the table are made.",
    ),
    _tf_keras(
        "Optimizer",
        "apply_gradients",
        "apply_gradients",
        "The optimizer updates all rows of a table.",
    ),
    _tf_keras(
        "BaseOptimizer",
        "finalize_variable_values",
        "finalize",
        "Averages of a table are asked for, which are not kept.",
    ),
    _tf_keras(
        "LegacyOptimizer",
        "apply_gradients",
        "legacy_apply_gradients",
        "The optimizer updates all rows of a table.",
    ),
    _tf_keras(
        "LegacyOptimizer",
        "_create_all_weights",
        "legacy_create",
        "Slot variables as large as the table are made.",
    ),
    _tf_keras(
        "HDF5_FORMAT",
        "_legacy_weights",
        "legacy_weights",
        "An .h5 file of old leaves tables with keys out.",
    ),
]
