"""Names of tf_keras, replaced for models made under a layout map."""

from tf_layoutmap._patches.rows import TF_KERAS, Patch

GROUP = "tf_keras"
_CODE = "layout.tf_keras."
_PRIVATE = "_tf_keras_private:"


def _row(owner: str, name: str, ours: str, why: str) -> Patch:
    return Patch(
        GROUP,
        owner,
        name,
        ours if "." in ours else _CODE + ours,
        why,
        TF_KERAS,
        "tests/layout/tf_keras/test_models.py",
    )


_LAYER, _MODEL = "tf_keras:layers.Layer", "tf_keras:Model"
_STEP = "The step of `fit` does not run on the mesh of the weights."

ROWS = [
    _row(
        _LAYER,
        "add_weight",
        "patches:add_weight",
        "A weight gets its value before its layout is known.",
    ),
    _row(
        _MODEL,
        "__init__",
        "patches:init_model",
        "A model does not know the layout map that it was made under.",
    ),
    _row(
        _LAYER,
        "__call__",
        "calls:call_layer",
        "DTensor divides images and series inside of samples.",
    ),
    _row(
        _MODEL,
        "__call__",
        "calls:call_model",
        "Tensors from the host are not on the mesh of the weights.",
    ),
    _row(
        _MODEL,
        "build",
        "calls:build_model",
        "Weights have no value after `build`.",
    ),
    _row(
        _MODEL,
        "compile",
        "optimizers:compile_model",
        "The optimizer's counters are not on the mesh of the weights.",
    ),
    *(
        _row(
            _MODEL, f"make_{verb}_function", f"step:make_{verb}_function", _STEP
        )
        for verb in ("train", "test", "predict")
    ),
    _row(
        _PRIVATE + "DataHandler",
        "catch_stop_iteration",
        "layout.processes.epoch:of_epoch",
        "Other processes wait for a batch that does not come.",
    ),
    _row(
        _PRIVATE + "DataHandler",
        "_configure_dataset_and_inferred_steps",
        "step:make_data",
        "The end of data that autotunes can take a minute.",
    ),
    _row(
        _PRIVATE + "LayerNormalization",
        "_fused_can_be_used",
        "patches:can_be_fused",
        "DTensor lacks the fused operation.",
    ),
    _row(
        _PRIVATE + "Optimizer",
        "add_variable_from_reference",
        "optimizers:add_slot",
        "Slot variables are whole on every device.",
    ),
    _row(
        _PRIVATE + "Optimizer",
        "apply_gradients",
        "optimizers:apply_gradients",
        "A step that fails has written some of the weights.",
    ),
    _row(
        _PRIVATE + "Optimizer",
        "_deduplicate_sparse_grad",
        "optimizers:deduplicate",
        "DTensor lacks the operations that join equal rows.",
    ),
    _row(
        _PRIVATE + "Optimizer",
        "_internal_apply_gradients",
        "optimizers:update",
        "tf_keras asks for a strategy, which a mesh does not have.",
    ),
    _row(
        _PRIVATE + "backend",
        "_assign_value_to_variable",
        "patches:assign_value",
        "Values from the host are not on the mesh of the variable.",
    ),
    _row(
        _PRIVATE + "backend",
        "rnn",
        "layout.tf_ops.recurrent:rnn",
        "A loop over time ends the process in DTensor's compiler.",
    ),
    *(
        _row(
            f"{_PRIVATE}{kind.upper()}_MODULE",
            f"{kind}_with_backend_selection",
            f"patches:choose_{kind}",
            "A choice between functions for CPUs and GPUs ends the process in "
            "DTensor's compiler.",
        )
        for kind in ("lstm", "gru")
    ),
    *(
        _row(
            _PRIVATE + "LAYOUT_MODULE",
            name,
            "patches:map_model",
            "tf_keras looks each name up in a map of its own kind.",
        )
        for name in (
            "_map_functional_model_variable",
            "_map_subclass_model_variable",
        )
    ),
]
