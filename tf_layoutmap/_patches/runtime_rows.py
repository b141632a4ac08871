"""Patch table entries for parameter servers, emulation and sharded tables.

The replacement functions of a group are imported when the group is first used.
"""

from tf_layoutmap._patches.rows import (
    KERAS,
    TENSORFLOW,
    TF_KERAS,
    Patch,
    Replacement,
)

KERAS3_PS_GROUP = "keras3_ps"
TF_KERAS_PS_GROUP = "tf_keras_ps"
# Group that is installed when a process of the cluster stops responding.
EXIT_GROUP = "ps_exit"

_EARLY_EPOCH_END = "tf_keras ends an epoch when one worker's dataset ends."
_LOST_COUNTS = (
    "Keras 3 reads and writes a count in two operations. An increment by "
    "another worker between these operations is lost."
)


def keras3_ps_rows() -> list[Patch]:
    """Returns the patches of Keras 3 for training with parameter servers."""
    from tf_layoutmap.ps import (
        fit_accumulation,
        fit_keras3,
        keras3_variables,
    )

    return [
        *(
            Patch(
                KERAS3_PS_GROUP,
                "_core.keras_private:TensorFlowTrainer",
                verb,
                ours,
                "Keras 3 raises an error under a ParameterServerStrategy.",
                KERAS,
                "tests/ps/fit/test_fit.py",
            )
            for verb, ours in (
                ("fit", fit_keras3.fit),
                ("evaluate", fit_keras3.evaluate),
                ("predict", fit_keras3.predict),
            )
        ),
        Patch(
            KERAS3_PS_GROUP,
            "keras:Model",
            "save_weights",
            fit_keras3.save_weights,
            "If a server fails while a backup is written, an incomplete file "
            "replaces the previous backup.",
            KERAS,
            "tests/ps/fit/test_fit.py",
        ),
        *(
            Patch(
                KERAS3_PS_GROUP,
                "keras:Variable",
                verb,
                ours,
                _LOST_COUNTS,
                KERAS,
                "tests/ps/test_keras3_counts.py",
            )
            for verb, ours in (
                ("assign", keras3_variables.assign),
                ("assign_add", keras3_variables.assign_add),
                ("assign_sub", keras3_variables.assign_sub),
            )
        ),
        Patch(
            KERAS3_PS_GROUP,
            "_core.keras_private:BaseOptimizer",
            "_backend_apply_gradients",
            fit_accumulation.apply_gradients,
            "Keras 3 accumulates gradients in a `tf.cond`, in which TensorFlow "
            "does not update variables on parameter servers.",
            KERAS,
            "tests/ps/fit/test_fit.py",
        ),
    ]


def tf_keras_ps_rows() -> list[Patch]:
    """Returns the patches of tf_keras for training with parameter servers."""
    from tf_layoutmap.ps import fit_tf_keras

    return [
        Patch(
            TF_KERAS_PS_GROUP,
            "tf_keras:Model",
            verb,
            ours,
            _EARLY_EPOCH_END,
            TF_KERAS,
            "tests/ps/fit/test_fit.py",
        )
        for verb, ours in (
            ("fit", fit_tf_keras.fit),
            ("evaluate", fit_tf_keras.evaluate),
            ("predict", fit_tf_keras.predict),
        )
    ]


def exit_rows() -> list[Patch]:
    """Returns the patches for a process whose cluster has failed."""
    from tf_layoutmap.ps import exits

    return [
        Patch(
            EXIT_GROUP,
            owner,
            name,
            exits.remove,
            "A destructor waits for all servers and workers without a "
            "timeout, so the process cannot end if one of them has stopped "
            "responding.",
            TENSORFLOW,
            "tests/ps/test_faults.py",
        )
        for owner, name in [
            ("_core.tf_private:EagerContext", "remove_function"),
            ("_core.tf_private:EagerResourceDeleter", "__del__"),
            ("_core.tf_private:CapturableResource", "__del__"),
        ]
    ]


SHARDED_TABLES_GROUP = "sharded_tables"


def sharded_tables_rows() -> list[Patch]:
    """Returns the patches for tables that are sharded over processes."""
    from tf_layoutmap.embedding.divided import tables

    return [
        Patch(
            SHARDED_TABLES_GROUP,
            "_core.tf_private:TrackableSaver",
            "save",
            tables.save,
            "TensorFlow gathers all tables in memory before it writes the "
            "first table.",
            TENSORFLOW,
            "tests/embedding/divided/test_divided.py",
        ),
    ]


EMULATION_GROUP = "emulation"
ENUM = "tpu_optimizer_enum"

_STOCK = "tensorflow:tpu.experimental.embedding.TPUEmbedding"
_PROGRAMS = "tests/emulation/test_programs.py"


def _emulation_row(owner: str, name: str, ours: Replacement, why: str) -> Patch:
    return Patch(
        EMULATION_GROUP,
        owner,
        name,
        ours,
        why,
        TENSORFLOW,
        _PROGRAMS,
    )


def enum_rows() -> list[Patch]:
    """Returns the patch of the enum that lists TensorFlow's TPU optimizers."""
    from tf_layoutmap.emulation import tpu_answers

    return [
        Patch(
            ENUM,
            "_core.tf_private:TPUOptimizer",
            "_set_optimization_parameters",
            tpu_answers.write,
            "TensorFlow assigns a bool to an enum field, which protobuf 7.34 "
            "rejects.",
            TENSORFLOW,
            "tests/emulation/test_enum_patch.py",
        ),
    ]


def emulation_rows() -> list[Patch]:
    """Returns the patches of TensorFlow's TPU API for the emulation."""
    from tf_layoutmap.emulation import tpu_answers

    return [
        _emulation_row(
            "_core.tf_private:device_util",
            "get_host_for_device",
            tpu_answers.host_of,
            "TensorFlow returns the same host for all emulated cores.",
        ),
        _emulation_row(
            "_core.tf_private:tpu_replication",
            "outside_compilation",
            tpu_answers.outside_compilation,
            "TensorFlow requires the control flow context of a TPU program, "
            "which does not exist in the emulation.",
        ),
        _emulation_row(
            _STOCK,
            "_raise_error_for_incorrect_control_flow_context",
            tpu_answers.is_in_program,
            "TensorFlow checks for the control flow context of a TPU program, "
            "which does not exist in the emulation.",
        ),
        _emulation_row(
            _STOCK,
            "_raise_error_for_inputs_not_on_cpu",
            tpu_answers.check_on_host,
            "TensorFlow checks for TPU device names, but emulated cores are "
            "CPUs.",
        ),
        _emulation_row(
            _STOCK,
            "enqueue",
            tpu_answers.enqueue,
            "TensorFlow accepts only TPU device names, but emulated cores are "
            "CPUs.",
        ),
    ]


MEMORY_GROUP = "memory"


def memory_rows() -> list[Patch]:
    """Returns the patches that free memory that TensorFlow never frees."""
    from tf_layoutmap._patches import freed_gradients

    return [
        Patch(
            MEMORY_GROUP,
            "_core.tf_private:custom_gradient",
            "_graph_mode_decorator",
            freed_gradients.record,
            "After a model was trained with `fit`, the model and its "
            "variables are never freed.",
            TENSORFLOW,
            "tests/freed/test_gradients.py",
        ),
    ]


GRADIENTS_GROUP = "table_gradients"


def gradient_rows() -> list[Patch]:
    """Returns the patch for gradients with respect to a sharded table."""
    from tf_layoutmap.sharded import gradient

    return [
        Patch(
            GRADIENTS_GROUP,
            "_core.tf_private:imperative_grad",
            "imperative_grad",
            gradient.with_source_of_each_shard,
            "With `unconnected_gradients=ZERO`, the zeros of a variable after "
            "a sharded table have the shape of another variable, or the "
            "process ends with a segmentation fault.",
            TENSORFLOW,
            "tests/sharded/test_gradient.py",
        ),
    ]


FUNCTION_TRACES_GROUP = "function_traces"


def function_trace_rows() -> list[Patch]:
    """Returns the patches for functions whose traces depend on the call."""
    from tf_layoutmap._core import function_traces

    why = (
        "A `tf.function` that was first called without a tape, or by a "
        "symbolic call of Keras, does not train tables."
    )
    return [
        Patch(
            FUNCTION_TRACES_GROUP,
            f"_core.tf_private:{module}",
            name,
            ours,
            why,
            TENSORFLOW,
            "tests/test_function_traces.py",
        )
        for module, name, ours in [
            (
                "tracing_compilation",
                "_maybe_define_function",
                function_traces.define_function,
            ),
            (
                "function_context",
                "make_function_context",
                function_traces.function_context,
            ),
        ]
    ]
