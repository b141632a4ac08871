"""Replaced names of TensorFlow, for the emulation of TPUs."""

from tf_layoutmap._core.patch_entry import TENSORFLOW, Patch, Replacement
from tf_layoutmap.emulation import tpu_answers

EMULATION_GROUP = "emulation"
ENUM = "tpu_optimizer_enum"
_STOCK = "_core.tf_private:TPUEmbedding"
_STOCK_V2 = "_core.tf_private:TPUEmbeddingV2"
_SHARDED = "_core.tf_private:TPUEmbeddingShardedVariable"
_ONLY_IN_PROGRAM = (
    "TensorFlow requires the control flow context of a TPU program to access "
    "the shard of a core."
)
_TPU_NAMES = (
    "TensorFlow accepts only TPU device names, but emulated cores are CPUs."
)
_PACKED = (
    "TensorFlow requires packed variables, which exist only on TPUs, to access "
    "the shard of a device."
)
_PROGRAMS = "tests/emulation/test_programs.py"


def _emulation_entry(
    owner: str, name: str, ours: Replacement, why: str
) -> Patch:
    return Patch(
        EMULATION_GROUP,
        owner,
        name,
        ours,
        why,
        TENSORFLOW,
        _PROGRAMS,
    )


PATCHES: tuple[Patch, ...] = (
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
    _emulation_entry(
        "_core.tf_private:device_util",
        "get_host_for_device",
        tpu_answers.host_of,
        "TensorFlow returns the same host for all emulated cores.",
    ),
    _emulation_entry(
        "_core.tf_private:tpu_replication",
        "outside_compilation",
        tpu_answers.outside_compilation,
        "TensorFlow requires the control flow context of a TPU program, "
        "which does not exist in the emulation.",
    ),
    _emulation_entry(
        _STOCK,
        "_raise_error_for_incorrect_control_flow_context",
        tpu_answers.is_in_program,
        "TensorFlow checks for the control flow context of a TPU program, "
        "which does not exist in the emulation.",
    ),
    _emulation_entry(
        _STOCK_V2,
        "_raise_error_for_incorrect_control_flow_context",
        tpu_answers.is_in_program,
        "TensorFlow checks for the control flow context of a TPU program, "
        "which does not exist in the emulation.",
    ),
    _emulation_entry(
        _SHARDED, "read_value", tpu_answers.read_sharded, _ONLY_IN_PROGRAM
    ),
    _emulation_entry(
        _SHARDED,
        "_dense_var_to_tensor",
        tpu_answers.sharded_to_tensor,
        _ONLY_IN_PROGRAM,
    ),
    _emulation_entry(
        _SHARDED, "assign", tpu_answers.assign_sharded, _ONLY_IN_PROGRAM
    ),
    _emulation_entry(
        "_core.tf_private:MirroredVariable",
        "_dense_var_to_tensor",
        tpu_answers.mirrored_to_tensor,
        "In a TPU program, TensorFlow converts a variable to the dtype of the "
        "other operand, but only in the control flow context of the program.",
    ),
    _emulation_entry(
        _SHARDED, "read_from_device", tpu_answers.read_shard, _PACKED
    ),
    _emulation_entry(
        _SHARDED, "assign_on_device", tpu_answers.assign_shard, _PACKED
    ),
    _emulation_entry(
        _STOCK,
        "_raise_error_for_inputs_not_on_cpu",
        tpu_answers.check_on_host,
        "TensorFlow checks for TPU device names, but emulated cores are CPUs.",
    ),
    _emulation_entry(
        _STOCK,
        "enqueue",
        tpu_answers.enqueue,
        _TPU_NAMES,
    ),
    _emulation_entry(
        _STOCK_V2, "enqueue", tpu_answers.enqueue_sparse_cores, _TPU_NAMES
    ),
)
