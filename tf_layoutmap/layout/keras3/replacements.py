"""Replaced names of Keras 3, for models on a mesh."""

from tf_layoutmap._core import keras_private
from tf_layoutmap._core.patch_entry import KERAS, TENSORFLOW, Patch, Replacement
from tf_layoutmap.layout.keras3 import (
    backend_ops,
    embedding_rows,
    host_layers,
    sharded_rows,
    step,
    summary,
    variable,
)
from tf_layoutmap.layout.keras3 import optimizers as keras3_optimizers
from tf_layoutmap.layout.ops import corrections, gates, loops
from tf_layoutmap.layout.processes import checks

GROUP = "keras3"
_TESTS = "tests/layout/keras3/"


def _keras3_entry(
    owner: str, name: str, ours: Replacement, why: str, test: str
) -> Patch:
    return Patch(
        GROUP,
        owner,
        name,
        ours,
        why,
        KERAS,
        _TESTS + test,
    )


def _backend_entries(
    module: str, why: str, test: str, **functions: Replacement
) -> list[Patch]:
    """Returns the patches of functions in a backend module of Keras 3."""
    return [
        _keras3_entry(f"_core.keras_private:{module}", name, ours, why, test)
        for name, ours in functions.items()
    ]


_TRAINER = "_core.keras_private:TensorFlowTrainer"
_OPTIMIZER = "_core.keras_private:TFOptimizer"
_BASE_OPTIMIZER = "_core.keras_private:BaseOptimizer"

PATCHES: tuple[Patch, ...] = (
    _keras3_entry(
        "keras:Variable",
        "__init__",
        variable.init_variable,
        "Keras creates the full value of a variable on the host before "
        "the layout of the variable is known.",
        "test_variable.py",
    ),
    _keras3_entry(
        "keras:layers.Layer",
        "__new__",
        variable.new_layer,
        "Keras does not record the layout map of a new layer.",
        "test_layers.py",
    ),
    _keras3_entry(
        "keras:layers.Layer",
        "__call__",
        step.call,
        "The inputs of a layer are on the host, but its weights are on a mesh.",
        "test_layer_calls.py",
    ),
    _keras3_entry(
        "keras:Model",
        "summary",
        summary.summary,
        "The summary of a model does not contain the layouts of its weights.",
        "test_summary.py",
    ),
    _keras3_entry(
        "_core.keras_private:Functional",
        "_run_through_graph",
        host_layers.run_through_graph,
        "The devices of a mesh cannot look up strings, so layers that "
        "look up strings must run on the host.",
        "test_host_layers.py",
    ),
    _keras3_entry(
        "keras:layers.Embedding",
        "call",
        embedding_rows.embedding_call,
        "Each device uses ids of the full table as row indices of its shard.",
        "test_embedding_rows.py",
    ),
    Patch(
        GROUP,
        "_core.tf_private:gen_math_ops",
        "unsorted_segment_sum",
        sharded_rows.segment_sum_of_table,
        "Each device computes the dense form of a sparse gradient for the "
        "full table.",
        TENSORFLOW,
        _TESTS + "test_sharded_rows.py",
        make=corrections.correct,
    ),
    *(
        _keras3_entry(
            f"keras:{layer}",
            name,
            variable.merged_lora_weight,
            "If a weight is sharded, Keras cannot write the sum of the "
            "weight and its LoRA matrices to a file.",
            "test_lora_saving.py",
        )
        for layer, name in keras_private.MERGED_LORA.items()
    ),
    *(
        _keras3_entry(
            _TRAINER,
            f"make_{verb}_function",
            ours,
            "The step of `fit` does not run on the mesh of the weights.",
            "test_step.py",
        )
        for verb, ours in (
            ("train", step.make_train_function),
            ("test", step.make_test_function),
            ("predict", step.make_predict_function),
        )
    ),
    _keras3_entry(
        "_core.keras_private:BaseTrainer",
        "get_metrics_result",
        step.get_metrics_result,
        "The results of metrics are on a mesh, and Keras cannot read "
        "their values.",
        "test_step.py",
    ),
    Patch(
        GROUP,
        "_core.keras_private:TFEpochIterator",
        "catch_stop_iteration",
        checks.epoch_scope,
        "After one process has ended its epoch, the other processes wait "
        "for it forever.",
        KERAS,
        "tests/layout/processes/test_checks.py",
    ),
    Patch(
        GROUP,
        "_core.tf_private:Function",
        "__call__",
        step.call_function,
        "If the `call` method of a layer is a tf.function, the layer is "
        "never trained.",
        TENSORFLOW,
        _TESTS + "test_layer_functions.py",
    ),
    Patch(
        GROUP,
        "_core.tf_private:Function",
        "get_concrete_function",
        step.get_concrete_function,
        "A concrete function that a layer creates in its first call reads "
        "no weights, so the layer is never trained.",
        TENSORFLOW,
        _TESTS + "test_layer_functions.py",
    ),
    _keras3_entry(
        "_core.keras_private:TFEpochIterator",
        "_get_iterator",
        step.data_of_epoch,
        "If autotuning is enabled, deleting the iterator of a dataset can "
        "take a minute.",
        "test_step.py",
    ),
    _keras3_entry(
        _BASE_OPTIMIZER,
        "build",
        keras3_optimizers.build,
        "Slot variables are replicated instead of sharded.",
        "test_optimizers.py",
    ),
    # `LossScaleOptimizer` calls this function to check all gradients before
    # it applies them.
    *(
        _keras3_entry(
            f"_core.keras_private:{kind}",
            "apply",
            keras3_optimizers.apply,
            "If a step fails, it may already have updated some of the weights.",
            "test_optimizers.py",
        )
        for kind in ("BaseOptimizer", "LossScaleOptimizer")
    ),
    _keras3_entry(
        "keras:optimizers.Adagrad",
        "update_step",
        keras3_optimizers.adagrad_step,
        "Keras computes with the full accumulator, although a sparse "
        "gradient contains only some rows.",
        "test_optimizers.py",
    ),
    *(
        _keras3_entry(
            _OPTIMIZER,
            name,
            ours,
            "Each device writes all rows of a sparse update to its shard, "
            "even rows that belong to other shards.",
            "test_optimizers.py",
        )
        for name, ours in (
            ("assign", keras3_optimizers.assign),
            ("assign_add", keras3_optimizers.assign_add),
            ("assign_sub", keras3_optimizers.assign_sub),
        )
    ),
    *_backend_entries(
        "backend_numpy",
        "Keras divides or multiplies a sparse gradient by the full slot "
        "variable.",
        "test_optimizers.py",
        multiply=keras3_optimizers.multiply,
        divide=keras3_optimizers.divide,
        true_divide=keras3_optimizers.divide,
    ),
    *_backend_entries(
        "backend_numpy",
        "Keras uses operations that DTensor cannot partition.",
        "test_layer_calls.py",
        einsum=backend_ops.einsum,
        add=backend_ops.add,
        eye=backend_ops.eye,
        repeat=backend_ops.repeat,
    ),
    *_backend_entries(
        "backend_numpy",
        "DTensor gathers all dimensions except the first one.",
        "../replication/test_generate.py",
        stack=backend_ops.stack,
        take_along_axis=backend_ops.take_along_axis,
    ),
    *_backend_entries(
        "backend_numpy",
        "DTensor gathers the logits of all tokens.",
        "../replication/test_generate.py",
        argmax=backend_ops.argmax,
    ),
    Patch(
        GROUP,
        "_core.keras_private:rnn_loop",
        "rnn",
        loops.rnn,
        "DTensor's compiler ends the process if a recurrent layer "
        "contains a loop over time steps.",
        KERAS,
        _TESTS + "test_layers.py",
    ),
    Patch(
        GROUP,
        "_core.keras_private:backend_rnn",
        "cudnn_ok",
        backend_ops.cudnn_ok,
        "On a machine with a GPU, recurrent layers call cuDNN, which DTensor "
        "does not support.",
        KERAS,
        "tests/accelerators/test_gpu_mesh.py",
    ),
    *(
        Patch(
            GROUP,
            owner,
            "call",
            ours,
            "DTensor cannot split the sharded weights of a recurrent cell "
            "into gates.",
            KERAS,
            "tests/layout/ops/test_gates.py",
        )
        for owner, ours in (
            ("keras:layers.LSTMCell", gates.lstm),
            ("keras:layers.GRUCell", gates.gru),
            ("_core.keras_private:ConvLSTMCell", gates.conv_lstm),
        )
    ),
    _keras3_entry(
        "keras:Variable",
        "_direct_assign",
        keras3_optimizers.assign_host_variable,
        "Every device writes a seed that was created outside the scope, "
        "such as the seed of a sampler.",
        "../replication/test_generate.py",
    ),
    _keras3_entry(
        "_core.keras_private:CompileMetrics",
        "update_state",
        step.update_state,
        "Metrics count only the samples of one device.",
        "test_metrics.py",
    ),
    *_backend_entries(
        "backend_numpy",
        "DTensor does not support the operation.",
        "test_metrics.py",
        flip=step.flip,
        diag=step.diag,
    ),
    *_backend_entries(
        "backend_core",
        "DTensor uses indices into the full tensor as indices into a shard.",
        "test_metrics.py",
        scatter=step.scatter,
    ),
    *_backend_entries(
        "backend_core",
        "DTensor gathers the tensor on every device.",
        "../replication/test_generate.py",
        slice_update=backend_ops.slice_update,
    ),
    *_backend_entries(
        "backend_nn",
        "The probabilities of tokens differ in the last bit from one device.",
        "../replication/test_generate.py",
        softmax=backend_ops.softmax,
    ),
    *_backend_entries(
        "backend_nn",
        "DTensor shards the classes of a sample, but the operation "
        "requires all classes on one device.",
        "test_metrics.py",
        ctc_loss=step.ctc_loss,
        one_hot=step.one_hot,
    ),
)
