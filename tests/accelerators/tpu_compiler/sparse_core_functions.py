"""Converts TensorFlow's ops that run on SparseCores to StableHLO.

    PYTHON sparse_core_functions.py FOLDER CORES_PER_CHIP NUM_CHIPS

PYTHON is an interpreter of an environment with tensorflow-tpu. TensorFlow for
CPUs has no XLA kernels of these ops. The program writes the same files as
`lowering`, and `case.json` with the names of the ops.
"""

import ctypes
import json
import os
import pathlib
import sys

# Without this variable, libtpu waits for the metadata server of a TPU VM.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"

import libtpu
import tensorflow as tf

# Sizes of one chip: ids, samples, and rows of the table.
NUM_IDS, NUM_SAMPLES, NUM_ROWS, DIM = 512, 64, 4096, 32
PREFIX = "XlaSparseDenseMatmul"

# The slot variables and the attributes of each update op.
UPDATES = {
    "Sgd": ([], {}),
    "Adagrad": (["accumulator"], {}),
    "AdagradMomentum": (
        ["accumulator", "momenta"],
        dict(
            use_nesterov=True, exponent=2.0, beta1=0.9, beta2=1.0, epsilon=1e-8
        ),
    ),
    "Adam": (
        ["momenta", "velocity"],
        dict(use_sum_inside_sqrt=True, beta1=0.9, beta2=0.999, epsilon=1e-8),
    ),
    "Ftrl": (
        ["accumulator", "linear"],
        dict(
            multiply_linear_by_learning_rate=False,
            beta=0.0,
            learning_rate_power=-0.5,
            l1_regularization_strength=0.0,
            l2_regularization_strength=0.0,
        ),
    ),
}


# A `TpuCoreTypeEnum` and the address of the `absl::StatusOr<int>` that the
# function returns.
_CountFunction = ctypes.CFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
)
_COUNT = "TpuTopology_MaybeAvailableSparseCoresPerLogicalDevice"
# Number of functions in TensorFlow's table of functions of libtpu, or less.
_NUM_FUNCTIONS = 100


def replace_topology(cores_per_chip):
    """Replaces libtpu's function that counts the SparseCores of a chip.

    Without a TPU, the function of libtpu returns an error, and releasing this
    error ends the process, because TensorFlow and libtpu contain different
    versions of absl.

    Returns:
      An object that the caller must keep while kernels are created.
    """

    @_CountFunction
    def count(result, kind):
        del kind
        # The code of `absl::OkStatus()`, and the value.
        ctypes.c_uint64.from_address(result).value = 1
        ctypes.c_int.from_address(result + 8).value = cores_per_chip
        return result

    framework = ctypes.CDLL(
        str(pathlib.Path(tf.__file__).with_name("libtensorflow_cc.so.2"))
    )
    of_libtpu = ctypes.CDLL(
        str(pathlib.Path(libtpu.__file__).with_name("libtpu.so"))
    )
    get_table = framework._ZN15stream_executor3tpu8OpsApiFnEv
    get_table.restype = ctypes.c_void_p
    table = (ctypes.c_void_p * _NUM_FUNCTIONS).from_address(get_table())
    address = ctypes.cast(getattr(of_libtpu, _COUNT), ctypes.c_void_p).value
    table[list(table).index(address)] = ctypes.cast(
        count, ctypes.c_void_p
    ).value
    return count


def functions(cores_per_chip, num_chips):
    """Returns the specs of the inputs and the attributes of each op."""
    # The buffers of a SparseCore have a multiple of 8 pointers.
    num_pointers = cores_per_chip * -(-cores_per_chip * num_chips // 8) * 8
    ids = {
        "row_pointers": tf.TensorSpec([num_pointers], tf.int32),
        "sorted_sample_ids": tf.TensorSpec([NUM_IDS], tf.int32),
        "sorted_token_ids": tf.TensorSpec([NUM_IDS], tf.int32),
        "sorted_gains": tf.TensorSpec([NUM_IDS], tf.float32),
        "num_minibatches_per_physical_sparse_core": tf.TensorSpec([], tf.int32),
    }
    table = tf.TensorSpec([NUM_ROWS, DIM], tf.float32)
    settings = dict(
        max_ids_per_sparse_core=256,
        max_unique_ids_per_sparse_core=256,
        table_name="table",
        num_sparsecores_per_device=cores_per_chip,
    )
    found = {
        f"{PREFIX}WithStaticBufferSize": (
            {**ids, "embedding_table": table},
            dict(
                input_size=NUM_SAMPLES,
                quantization_config_low=0.0,
                quantization_config_high=0.0,
                quantization_config_num_buckets=0,
                **settings,
            ),
        )
    }
    for optimizer, (slots, attributes) in UPDATES.items():
        found[f"{PREFIX}GradWith{optimizer}AndStaticBufferSize"] = (
            {
                **ids,
                "activation_gradients": tf.TensorSpec([NUM_SAMPLES, DIM]),
                "learning_rate": tf.TensorSpec([]),
                **dict.fromkeys(["embedding_table", *slots], table),
            },
            {**settings, **attributes},
        )
    return found


def lower(op, specs, attributes):
    """Returns the StableHLO of an op."""

    @tf.function(jit_compile=True, autograph=False)
    def run(*arguments):
        inputs = dict(zip(specs, arguments, strict=True))
        return getattr(tf.raw_ops, op)(**inputs, **attributes)

    arguments = [tf.zeros(one.shape, one.dtype) for one in specs.values()]
    return run.experimental_get_compiler_ir(*arguments)(
        stage="stablehlo_serialized", platform_name="TPU"
    )


def main():
    folder = pathlib.Path(sys.argv[1])
    cores_per_chip, num_chips = map(int, sys.argv[2:])
    count = replace_topology(cores_per_chip)
    ops = functions(cores_per_chip, num_chips)
    for number, (op, (specs, attributes)) in enumerate(ops.items()):
        facts = {}
        try:
            program = lower(op, specs, attributes)
            folder.joinpath(f"{number}.mlir.bc").write_bytes(program)
        except Exception as error:
            facts["error"] = f"{type(error).__name__}: {error}"[:3000]
        folder.joinpath(f"{number}.json").write_text(json.dumps(facts))
    case = {"functions": [*ops], "memory": {}, "choices": {}}
    folder.joinpath("case.json").write_text(json.dumps(case))
    del count


if __name__ == "__main__":
    main()
