"""Patch table entries for replaced names of TensorFlow and DTensor.

The replacement functions of a group are imported when the group is first used.
"""

from typing import Any

from tf_layoutmap._patches.rows import TENSORFLOW, Patch, Replacement

GROUP = "mesh"
CHECKPOINTS_GROUP = "checkpoints"
_TESTS = "tests/layout/ops/"


def _operation_rows(
    module: str,
    name: str,
    raw: str,
    ours: Replacement,
    why: str,
    test: str,
    *public: str,
) -> list[Patch]:
    """Returns the patches of an op: Python function, `tf.raw_ops` and `tf`."""
    from tf_layoutmap.layout.ops import corrections

    made = (f"_core.tf_private:{module}", name)
    common: dict[str, Any] = dict(
        group=GROUP,
        ours=ours,
        why=why,
        seen_in=TENSORFLOW,
        test=_TESTS + test,
        make=corrections.correct,
    )
    return [
        Patch(owner=made[0], name=name, everywhere=True, **common),
        Patch(owner="tensorflow:raw_ops", name=raw, base=made, **common),
        *(
            Patch(owner=api, name=short, base=made, **common)
            for short in public
            for api in (
                "tensorflow",
                "tensorflow:compat.v2",
                "tensorflow:compat.v1",
            )
        ),
    ]


def _random_op_rows(
    module: str, ours: Replacement, why: str, **names: str
) -> list[Patch]:
    """Returns the patches of random ops: Python functions and `tf.raw_ops`."""
    from tf_layoutmap.layout.ops import random_ops

    rows: list[Patch] = []
    for name, raw in names.items():
        made = (f"_core.tf_private:{module}", name)
        common: dict[str, Any] = dict(
            group=GROUP,
            ours=ours,
            why=why,
            seen_in=TENSORFLOW,
            test=_TESTS + "test_random_ops.py",
            make=random_ops.correct_on_all_meshes
            if ours is random_ops.seeded
            else random_ops.correct,
        )
        rows += [
            Patch(owner=made[0], name=name, **common),
            Patch(owner="tensorflow:raw_ops", name=raw, base=made, **common),
        ]
    return rows


_ARRAYS, _NN = "gen_array_ops", "gen_nn_ops"


def rows() -> list[Patch]:
    """Returns the patches of TensorFlow for tensors on a mesh."""
    from tf_layoutmap.layout.mesh import errors, transfer, variable
    from tf_layoutmap.layout.ops import (
        corrections,
        loops,
        random_ops,
        strided_slices,
    )
    from tf_layoutmap.layout.replication import (
        captured_tensors,
        replicated_ops,
        retrace,
    )

    return [
        *_operation_rows(
            _ARRAYS,
            "concat_v2",
            "ConcatV2",
            corrections.concat,
            "DTensor concatenates the shards of each device, in the wrong "
            "order.",
            "test_corrections.py",
        ),
        *_operation_rows(
            _ARRAYS,
            "_slice",
            "Slice",
            corrections.cut,
            "Its gradient uses Pad, which uses each shard as the full tensor.",
            "test_corrections.py",
        ),
        *_operation_rows(
            _ARRAYS,
            "strided_slice",
            "StridedSlice",
            strided_slices.strided_slice,
            "Each device slices its shard; a new axis ends the process.",
            "test_strided_slices.py",
        ),
        *_operation_rows(
            _ARRAYS,
            "strided_slice_grad",
            "StridedSliceGrad",
            strided_slices.strided_slice_gradient,
            "DTensor uses each shard of a gradient as the full gradient.",
            "test_strided_slices.py",
        ),
        *_operation_rows(
            _ARRAYS,
            "tensor_strided_slice_update",
            "TensorStridedSliceUpdate",
            strided_slices.strided_slice_update,
            "Each device writes the full update to its shard.",
            "test_strided_slices.py",
        ),
        *_operation_rows(
            "gen_linalg_ops",
            "einsum",
            "Einsum",
            corrections.einsum,
            "A sum over several sharded dimensions adds up only one of them.",
            "test_corrections.py",
        ),
        *_operation_rows(
            _NN,
            "bias_add",
            "BiasAdd",
            corrections.bias_add,
            "With channels first, DTensor uses the last dimension as the "
            "channels.",
            "test_corrections.py",
        ),
        *_operation_rows(
            _NN,
            "sparse_softmax_cross_entropy_with_logits",
            "SparseSoftmaxCrossEntropyWithLogits",
            corrections.sparse_cross_entropy,
            "A label outside all shards is counted as a valid loss.",
            "test_corrections.py",
        ),
        *_operation_rows(
            _ARRAYS,
            "scatter_nd",
            "ScatterNd",
            corrections.scatter_nd,
            "DTensor uses indices into the full tensor as indices into a "
            "shard.",
            "test_positions.py",
            "scatter_nd",
        ),
        *_operation_rows(
            _ARRAYS,
            "reverse_v2",
            "ReverseV2",
            corrections.reverse,
            "DTensor does not support the operation.",
            "test_positions.py",
            "reverse",
        ),
        *_operation_rows(
            _ARRAYS,
            "where",
            "Where",
            corrections.where,
            "Each device returns indices into its shard of the condition.",
            "test_positions.py",
        ),
        *_operation_rows(
            _ARRAYS,
            "gather_v2",
            "GatherV2",
            corrections.gather,
            "With batch_dims, DTensor cannot infer the shape of the gradient.",
            "test_positions.py",
        ),
        *_random_op_rows(
            "gen_random_ops",
            random_ops.seeded,
            "Without a seed, devices draw different values for one replicated "
            "tensor.",
            random_standard_normal="RandomStandardNormal",
            truncated_normal="TruncatedNormal",
            random_gamma="RandomGamma",
            random_poisson_v2="RandomPoissonV2",
            multinomial="Multinomial",
            random_shuffle="RandomShuffle",
            parameterized_truncated_normal="ParameterizedTruncatedNormal",
        ),
        *_random_op_rows(
            "gen_random_ops",
            random_ops.uniform,
            "DTensor raises an error for the operation.",
            random_uniform="RandomUniform",
            random_uniform_int="RandomUniformInt",
        ),
        *_random_op_rows(
            "gen_stateless_random_ops_v2",
            random_ops.stateless,
            "Each device draws its shard with a different seed.",
            stateless_random_normal_v2="StatelessRandomNormalV2",
            stateless_truncated_normal_v2="StatelessTruncatedNormalV2",
            stateless_random_uniform_v2="StatelessRandomUniformV2",
            stateless_random_uniform_int_v2="StatelessRandomUniformIntV2",
            stateless_random_uniform_full_int_v2="StatelessRandomUniformFullIntV2",
        ),
        Patch(
            GROUP,
            "_core.tf_private:while_v2",
            "while_loop",
            loops.while_loop,
            "DTensor does not support the tensor lists of a loop.",
            TENSORFLOW,
            _TESTS + "test_loops.py",
        ),
        Patch(
            GROUP,
            "_core.tf_private:tensor_array_ops",
            "_GraphTensorArrayV2",
            loops.UnrolledArray,
            "DTensor does not support the tensor list of a TensorArray.",
            TENSORFLOW,
            _TESTS + "test_loops.py",
            make=loops.array_for_graphs,
        ),
        Patch(
            GROUP,
            "_core.tf_private:FuncGraph",
            "_create_op_internal",
            replicated_ops.create,
            "DTensor rejects some layouts of operations that it supports.",
            TENSORFLOW,
            "tests/layout/replication/test_replicated_ops.py",
        ),
        Patch(
            GROUP,
            "_core.tf_private:Function",
            "__call__",
            retrace.call,
            "DTensor raises an error for functions outside `fit`, such as "
            "`generate`.",
            TENSORFLOW,
            "tests/layout/replication/test_user_functions.py",
        ),
        *(
            Patch(
                GROUP,
                "_core.tf_private:pywrap_tfe",
                name,
                ours,
                "DTensor raises an error for host tensors that a layer or "
                "loss holds.",
                TENSORFLOW,
                "tests/layout/replication/test_captured_tensors.py",
                make=captured_tensors.unwrapped,
            )
            for name, ours in (
                ("TFE_Py_FastPathExecute", captured_tensors.run_fast),
                ("TFE_Py_Execute", captured_tensors.run),
            )
        ),
        Patch(
            GROUP,
            "_core.tf_private:EagerTensor",
            "_numpy",
            transfer.numpy_of,
            "The value of a sharded tensor cannot be read.",
            TENSORFLOW,
            "tests/layout/mesh/test_transfer.py",
        ),
        Patch(
            GROUP,
            "_core.tf_private:gen_resource_variable_ops",
            "var_handle_op",
            variable.make,
            "DTensor compiles an operation for each variable name.",
            TENSORFLOW,
            "tests/layout/mesh/test_handles.py",
        ),
        *(
            Patch(
                GROUP,
                "_core.tf_private:ResourceVariable",
                name,
                variable.write_host_variable,
                "Each device of a mesh writes to the same host variable.",
                TENSORFLOW,
                "tests/layout/mesh/test_host_variables.py",
                make=variable.host_write_method,
            )
            for name in ("assign", "assign_add", "assign_sub")
        ),
        *(
            Patch(
                GROUP,
                owner,
                name,
                variable.add_to_host_variable,
                "Each device of a mesh adds to the same host variable.",
                TENSORFLOW,
                "tests/layout/mesh/test_host_variables.py",
                base=("_core.tf_private:gen_resource_variable_ops", made),
            )
            for made, raw in (
                ("assign_add_variable_op", "AssignAddVariableOp"),
                ("assign_sub_variable_op", "AssignSubVariableOp"),
            )
            for owner, name in (
                ("_core.tf_private:gen_resource_variable_ops", made),
                ("tensorflow:raw_ops", raw),
            )
        ),
        Patch(
            GROUP,
            "_core.tf_private:dtensor_api",
            "reset_dtensor_device",
            errors.reset_device,
            "Errors stay in the queues of devices and can end the process.",
            TENSORFLOW,
            "tests/layout/mesh/test_errors.py",
        ),
        Patch(
            GROUP,
            "tensorflow:experimental.dtensor",
            "copy_to_mesh",
            errors.copy_to_mesh,
            "After a failed step, each later copy to the mesh fails.",
            TENSORFLOW,
            "tests/layout/mesh/test_errors.py",
        ),
        Patch(
            GROUP,
            "tensorflow:experimental.dtensor.DTensorDataset",
            "__iter__",
            transfer.iterate,
            "Each device iterates over different batches, so some batches are "
            "not used.",
            TENSORFLOW,
            "tests/layout/mesh/test_datasets.py",
        ),
        Patch(
            GROUP,
            "_core.tf_private:DTensorIterator",
            "__next__",
            transfer.get_next,
            "The mesh is unusable after the end of the data.",
            TENSORFLOW,
            "tests/layout/mesh/test_datasets.py",
        ),
    ]


def checkpoint_rows() -> list[Patch]:
    """Returns the patches of TensorFlow for checkpoints of mesh variables."""
    from tf_layoutmap.layout.mesh import variable

    return [
        *(
            Patch(
                CHECKPOINTS_GROUP,
                owner,
                name,
                ours,
                "DTensor's device for files supports only tensors on a mesh.",
                TENSORFLOW,
                "tests/layout/mesh/test_checkpoint_files.py",
            )
            for owner, name, ours in (
                ("_core.tf_private:TrackableSaver", "save", variable.save),
                (
                    "_core.tf_private:TrackableSaver",
                    "restore",
                    variable.restore,
                ),
                (
                    "_core.tf_private:DTrackableSaver",
                    "restore",
                    variable.restore,
                ),
            )
        ),
        Patch(
            CHECKPOINTS_GROUP,
            "tensorflow:experimental.dtensor.DVariable",
            "_gather_saveables_for_checkpoint",
            variable.saveables,
            "A checkpoint cannot hold both mesh tensors and host tensors.",
            TENSORFLOW,
            "tests/layout/mesh/test_checkpoint_files.py",
        ),
    ]
