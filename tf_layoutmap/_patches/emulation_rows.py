"""Names of TensorFlow's TPU API, replaced for the emulation of a TPU."""

from tf_layoutmap._patches.rows import TENSORFLOW, Patch

GROUP = "emulation"
ENUM = "tpu_optimizer_enum"

_STOCK = "tensorflow:tpu.experimental.embedding.TPUEmbedding"
_PROGRAMS = "tests/emulation/test_programs.py"


def _row(owner: str, name: str, ours: str, why: str) -> Patch:
    return Patch(
        GROUP,
        owner,
        name,
        f"emulation.tpu_answers:{ours}",
        why,
        TENSORFLOW,
        _PROGRAMS,
    )


ROWS = [
    Patch(
        ENUM,
        "_tf_private:TPUOptimizer",
        "_set_optimization_parameters",
        "emulation.enum_patch:write",
        "It writes a bool into an enum, which protobuf 7.34 refuses.",
        TENSORFLOW,
        "tests/emulation/test_enum_patch.py",
    ),
    _row(
        "_tf_private:device_util",
        "get_host_for_device",
        "host_of",
        "All cores are said to be on one host.",
    ),
    _row(
        "_tf_private:tpu_replication",
        "outside_compilation",
        "outside_compilation",
        "It needs the control flow context of a TPU program.",
    ),
    _row(
        _STOCK,
        "_raise_error_for_incorrect_control_flow_context",
        "is_in_program",
        "It looks for the control flow context of a TPU program.",
    ),
    _row(
        _STOCK,
        "_raise_error_for_inputs_not_on_cpu",
        "check_on_host",
        "It looks for the names of TPUs, and cores are CPUs here.",
    ),
    _row(
        _STOCK,
        "enqueue",
        "enqueue",
        "It takes the names of TPUs only, and cores are CPUs here.",
    ),
]
