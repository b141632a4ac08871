"""Replaced names of tf_keras, for models on a mesh."""

from tf_layoutmap._core.patch_entry import (
    TENSORFLOW,
    TF_KERAS,
    Patch,
    Replacement,
)
from tf_layoutmap.layout.ops import gates, loops
from tf_layoutmap.layout.processes import checks
from tf_layoutmap.layout.tf_keras import (
    calls,
    optimizers,
    patches,
    step,
    summary,
)

GROUP = "tf_keras"
_PRIVATE = "_core.tf_keras_private:"


def _tf_keras_entry(
    owner: str,
    name: str,
    ours: Replacement,
    why: str,
    test: str = "test_models.py",
) -> Patch:
    return Patch(
        GROUP,
        owner,
        name,
        ours,
        why,
        TF_KERAS,
        f"tests/layout/tf_keras/{test}",
    )


_LAYER, _MODEL = "tf_keras:layers.Layer", "tf_keras:Model"
_STEP = "The step of `fit` does not run on the mesh of the weights."

PATCHES: tuple[Patch, ...] = (
    _tf_keras_entry(
        _LAYER,
        "add_weight",
        patches.add_weight,
        "tf_keras initializes a weight before its layout is known.",
    ),
    _tf_keras_entry(
        _MODEL,
        "__init__",
        patches.init_model,
        "tf_keras does not record the layout map of a new model.",
    ),
    _tf_keras_entry(
        _LAYER,
        "__call__",
        calls.call_layer,
        "DTensor shards dimensions of a sample, such as the width of an "
        "image, but convolutions require unsharded samples.",
    ),
    Patch(
        GROUP,
        "_core.tf_private:Function",
        "__call__",
        calls.call_function,
        "If the `call` method of a layer is a tf.function, it reads "
        "variables that are not on the mesh.",
        TENSORFLOW,
        "tests/layout/tf_keras/test_calls.py",
    ),
    _tf_keras_entry(
        _MODEL,
        "__call__",
        calls.call_model,
        "The inputs of a layer are on the host, but its weights are on a mesh.",
    ),
    _tf_keras_entry(
        _MODEL,
        "build",
        calls.build_from_shapes,
        "The weights of a model have no value after `build`.",
    ),
    _tf_keras_entry(
        _MODEL,
        "summary",
        summary.summary,
        "The summary of a model does not contain the layouts of its weights.",
        "test_summary.py",
    ),
    _tf_keras_entry(
        _MODEL,
        "compile",
        optimizers.compile_model,
        "The counters of the optimizer are not on the mesh of the weights.",
    ),
    *(
        _tf_keras_entry(_MODEL, f"make_{verb}_function", ours, _STEP)
        for verb, ours in (
            ("train", step.make_train_function),
            ("test", step.make_test_function),
            ("predict", step.make_predict_function),
        )
    ),
    _tf_keras_entry(
        _PRIVATE + "DataHandler",
        "catch_stop_iteration",
        checks.epoch_scope,
        "After one process has ended its epoch, the other processes wait "
        "for it forever.",
    ),
    _tf_keras_entry(
        _PRIVATE + "DataHandler",
        "_configure_dataset_and_inferred_steps",
        step.make_data,
        "If autotuning is enabled, deleting the iterator of a dataset can "
        "take a minute.",
    ),
    _tf_keras_entry(
        _PRIVATE + "LayerNormalization",
        "_fused_can_be_used",
        patches.can_be_fused,
        "DTensor does not support the fused operation of layer normalization.",
    ),
    _tf_keras_entry(
        _PRIVATE + "Optimizer",
        "add_variable_from_reference",
        optimizers.add_slot,
        "Slot variables are replicated instead of sharded.",
    ),
    _tf_keras_entry(
        _PRIVATE + "Optimizer",
        "apply_gradients",
        optimizers.apply_gradients,
        "If a step fails, it may already have updated some of the weights.",
    ),
    _tf_keras_entry(
        _PRIVATE + "Optimizer",
        "_deduplicate_sparse_grad",
        optimizers.deduplicate,
        "DTensor does not support the operations with which tf_keras sums "
        "repeated rows of a gradient.",
    ),
    _tf_keras_entry(
        _PRIVATE + "Optimizer",
        "_internal_apply_gradients",
        optimizers.update,
        "tf_keras can update moving averages only under a distribution "
        "strategy, but a mesh does not use a strategy.",
    ),
    _tf_keras_entry(
        _PRIVATE + "backend",
        "_assign_value_to_variable",
        patches.assign_value,
        "An assigned value is on the host, but the variable is on a mesh.",
    ),
    _tf_keras_entry(
        _PRIVATE + "backend",
        "rnn",
        loops.rnn,
        "DTensor's compiler ends the process if a recurrent layer "
        "contains a loop over time steps.",
    ),
    _tf_keras_entry(
        _PRIVATE + "RandomGenerator",
        "make_legacy_seed",
        patches.make_legacy_seed,
        "A step on a mesh is traced more or less often than on one device, "
        "so a seeded layer draws different numbers.",
    ),
    *(
        _tf_keras_entry(
            _PRIVATE + "DropoutRNNCellMixin",
            name,
            patches.dropout_mask,
            "A loop draws new dropout masks in each step, but an unrolled "
            "loop draws them once.",
        )
        for name in (
            "get_dropout_mask_for_cell",
            "get_recurrent_dropout_mask_for_cell",
        )
    ),
    *(
        _tf_keras_entry(
            _PRIVATE + owner,
            "call",
            ours,
            "DTensor cannot split the sharded weights of a recurrent cell "
            "into gates.",
        )
        for owner, ours in (
            ("LSTM_MODULE.LSTMCell", gates.lstm),
            ("GRU_MODULE.GRUCell", gates.gru),
            ("ConvLSTMCell", gates.conv_lstm),
        )
    ),
    *(
        _tf_keras_entry(
            f"{_PRIVATE}{kind.upper()}_MODULE",
            f"{kind}_with_backend_selection",
            ours,
            "tf_keras creates functions for the CPU and the GPU, and "
            "DTensor's compiler ends the process when it compiles them.",
        )
        for kind, ours in (
            ("lstm", patches.choose_lstm),
            ("gru", patches.choose_gru),
        )
    ),
    *(
        _tf_keras_entry(
            _PRIVATE + "LAYOUT_MODULE",
            name,
            patches.map_model,
            "tf_keras supports only its own layout maps.",
        )
        for name in (
            "_map_functional_model_variable",
            "_map_subclass_model_variable",
        )
    ),
)
