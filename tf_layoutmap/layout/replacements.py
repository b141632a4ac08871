"""Replaced names of TensorFlow and DTensor, for tensors on a mesh."""

from typing import Any

from tf_layoutmap._core.patch_entry import (
    TENSORFLOW,
    Patch,
    Replacement,
    unwrapped,
)
from tf_layoutmap.layout.mesh import (
    collective_keys,
    errors,
    transfer,
    variable,
)
from tf_layoutmap.layout.ops import (
    batch_norms,
    branches,
    convolutions,
    corrections,
    independent_dims,
    loops,
    positions,
    random_ops,
    relayouts,
    simplifications,
    splits,
    strided_slices,
)
from tf_layoutmap.layout.replication import (
    captured_tensors,
    replicated_ops,
    retrace,
)

GROUP = "mesh"
_TESTS = "tests/layout/ops/"


def _operation_entries(
    module: str,
    name: str,
    raw: str,
    ours: Replacement,
    why: str,
    test: str,
    *public: str,
    always: bool = False,
) -> list[Patch]:
    """Returns the patches of an op: Python function, `tf.raw_ops` and `tf`.

    If `always` is true, the op is also replaced in replicated functions.
    """

    made = (f"_core.tf_private:{module}", name)
    common: dict[str, Any] = dict(
        group=GROUP,
        ours=ours,
        why=why,
        seen_in=TENSORFLOW,
        test=_TESTS + test,
        make=corrections.correct_always if always else corrections.correct,
    )
    return [
        Patch(owner=made[0], name=name, everywhere=True, **common),
        Patch(owner="tensorflow:raw_ops", name=raw, base=made, **common),
        *(
            Patch(
                owner="tensorflow" + (api + module and ":") + api + module,
                name=short,
                base=made,
                **common,
            )
            for public_name in public
            for *path, short in [public_name.split(".")]
            for module in ["".join(path)]
            for api in _apis(module)
        ),
    ]


def _apis(module: str) -> tuple[str, ...]:
    """Returns the prefixes under which TensorFlow exports a public module."""
    dot = "." if module else ""
    return "", f"compat.v2{dot}", f"compat.v1{dot}"


def _random_op_entries(
    module: str, ours: Replacement, why: str, **names: str
) -> list[Patch]:
    """Returns the patches of random ops: Python functions and `tf.raw_ops`."""

    entries: list[Patch] = []
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
        entries += [
            Patch(owner=made[0], name=name, **common),
            Patch(owner="tensorflow:raw_ops", name=raw, base=made, **common),
        ]
    return entries


_ARRAYS, _NN = "gen_array_ops", "gen_nn_ops"

PATCHES: tuple[Patch, ...] = (
    *(
        Patch(
            GROUP,
            "_core.tf_private:CollectiveKeys",
            name,
            ours,
            "DTensor and a MirroredStrategy use the same keys for their "
            "collectives, so TensorFlow aborts all later collectives.",
            TENSORFLOW,
            "tests/layout/mesh/test_collective_keys.py",
        )
        for name, ours in (
            ("_get_new_group_key", collective_keys.new_group_key),
            ("get_instance_key", collective_keys.new_instance_key),
        )
    ),
    *_operation_entries(
        _ARRAYS,
        "concat_v2",
        "ConcatV2",
        corrections.concat,
        "Each device concatenates its own shards, so the order of the "
        "elements is wrong.",
        "test_corrections.py",
    ),
    *(
        row
        for name, raw, ours in (
            ("split", "Split", splits.split),
            ("split_v", "SplitV", splits.split_v),
            ("unpack", "Unpack", splits.unpack),
        )
        for row in _operation_entries(
            _ARRAYS,
            name,
            raw,
            ours,
            "DTensor does not support a split along a sharded dimension.",
            "test_splits.py",
        )
    ),
    *_operation_entries(
        _ARRAYS,
        "_slice",
        "Slice",
        corrections.cut,
        "The gradient of the operation pads each shard as if the shard "
        "were the full tensor.",
        "test_corrections.py",
    ),
    *_operation_entries(
        _ARRAYS,
        "strided_slice",
        "StridedSlice",
        strided_slices.strided_slice,
        "Each device slices its shard as if it were the full tensor, and "
        "a slice with a new axis ends the process.",
        "test_strided_slices.py",
    ),
    *_operation_entries(
        _ARRAYS,
        "strided_slice_grad",
        "StridedSliceGrad",
        strided_slices.strided_slice_gradient,
        "DTensor uses each shard of the gradient as if the shard were the "
        "full gradient.",
        "test_strided_slices.py",
    ),
    *_operation_entries(
        _ARRAYS,
        "tensor_strided_slice_update",
        "TensorStridedSliceUpdate",
        strided_slices.strided_slice_update,
        "Each device writes the full update to its shard.",
        "test_strided_slices.py",
    ),
    *_operation_entries(
        "gen_linalg_ops",
        "einsum",
        "Einsum",
        corrections.einsum,
        "If an einsum sums over several sharded dimensions, DTensor adds "
        "up only one of them.",
        "test_corrections.py",
    ),
    *_operation_entries(
        "gen_math_ops",
        "select_v2",
        "SelectV2",
        corrections.select,
        "DTensor ends the process when it compiles the operation with a "
        "scalar condition.",
        "test_corrections.py",
    ),
    *_operation_entries(
        "gen_math_ops",
        "batch_mat_mul_v3",
        "BatchMatMulV3",
        corrections.batch_mat_mul,
        "DTensor has no rule for the operation, which quantized layers use.",
        "../keras3/test_transformers.py",
    ),
    *_operation_entries(
        _NN,
        "bias_add",
        "BiasAdd",
        corrections.bias_add,
        "Even if the channels are not the last dimension, DTensor uses "
        "the last dimension as channels.",
        "test_corrections.py",
    ),
    *_operation_entries(
        _NN,
        "fused_batch_norm_v3",
        "FusedBatchNormV3",
        batch_norms.fused_batch_norm,
        "DTensor ends the process when it compiles the operation.",
        "test_corrections.py",
        always=True,
    ),
    *(
        row
        for name, raw in (
            ("_fused_batch_norm", "FusedBatchNorm"),
            ("fused_batch_norm_v2", "FusedBatchNormV2"),
        )
        for row in _operation_entries(
            _NN,
            name,
            raw,
            batch_norms.fused_batch_norm_v1,
            "DTensor ends the process when it compiles the operation, or "
            "replicates it.",
            "test_corrections.py",
            always=True,
        )
    ),
    *_operation_entries(
        _NN,
        "sparse_softmax_cross_entropy_with_logits",
        "SparseSoftmaxCrossEntropyWithLogits",
        corrections.sparse_cross_entropy,
        "If a label is out of range, DTensor returns a finite loss "
        "without an error.",
        "test_corrections.py",
    ),
    *_operation_entries(
        "gen_math_ops",
        "dense_bincount",
        "DenseBincount",
        corrections.dense_bincount,
        "DTensor does not know the number of bins, which CategoryEncoding "
        "limits to one number.",
        "test_corrections.py",
    ),
    *_operation_entries(
        _ARRAYS,
        "scatter_nd",
        "ScatterNd",
        positions.scatter_nd,
        "DTensor uses indices into the full tensor as indices into a shard.",
        "test_positions.py",
        "scatter_nd",
    ),
    *_operation_entries(
        _ARRAYS,
        "reverse_v2",
        "ReverseV2",
        positions.reverse,
        "DTensor does not support the operation.",
        "test_positions.py",
        "reverse",
    ),
    *_operation_entries(
        _ARRAYS,
        "where",
        "Where",
        positions.where,
        "Each device returns indices into its shard of the condition "
        "instead of indices into the full condition.",
        "test_positions.py",
    ),
    *_operation_entries(
        _ARRAYS,
        "gather_v2",
        "GatherV2",
        positions.gather,
        "If `batch_dims` is set, DTensor cannot infer the shape of the "
        "gradient.",
        "test_positions.py",
    ),
    *_operation_entries(
        _ARRAYS,
        "placeholder_with_default",
        "PlaceholderWithDefault",
        positions.placeholder_with_default,
        "This package uses the operation to read local shards, so DTensor "
        "does not gather its input.",
        "test_convolutions.py",
    ),
    *_operation_entries(
        _ARRAYS,
        "scatter_nd_non_aliasing_add",
        "ScatterNdNonAliasingAdd",
        positions.scatter_nd_non_aliasing_add,
        "On a mesh of GPUs, this package uses the operation to read local "
        "shards, so DTensor does not gather its inputs.",
        "test_convolutions.py",
    ),
    *_operation_entries(
        "gen_math_ops",
        "unsorted_segment_prod",
        "UnsortedSegmentProd",
        positions.unsorted_segment_prod,
        "On a mesh of TPUs, this package uses the operation to read local "
        "shards, so DTensor does not gather its inputs.",
        "test_convolutions.py",
        "math.unsorted_segment_prod",
    ),
    *_operation_entries(
        "gen_state_ops",
        "resource_scatter_nd_update",
        "ResourceScatterNdUpdate",
        positions.resource_scatter_nd_update,
        "On a mesh of GPUs or TPUs, this package uses the operation on each "
        "shard of a variable, so DTensor would use global indices there.",
        "test_positions.py",
    ),
    Patch(
        GROUP,
        "_core.tf_private:gradients_util",
        "_GradientsHelper",
        simplifications.symbolic_gradients,
        "Products on a mesh read a matrix instead of its transpose, so "
        "tf.gradients would not find them.",
        TENSORFLOW,
        _TESTS + "test_simplifications.py",
    ),
    *(
        row
        for module, name, raw, ours, why in (
            (
                "gen_math_ops",
                "mat_mul",
                "MatMul",
                simplifications.matmul,
                "Each device copies the transpose of a matrix, because "
                "Grappler is disabled.",
            ),
            (
                _ARRAYS,
                "transpose",
                "Transpose",
                simplifications.transposed,
                "Each device transposes a matrix twice, because Grappler "
                "is disabled.",
            ),
            (
                "gen_math_ops",
                "_pow",
                "Pow",
                simplifications.power,
                "Each device computes squares and cubes with the general "
                "power function, because Grappler is disabled.",
            ),
            (
                "gen_math_ops",
                "arg_max",
                "ArgMax",
                simplifications.argmax_of_shards,
                "DTensor gathers all classes for an accuracy metric.",
            ),
        )
        for row in _operation_entries(
            module, name, raw, ours, why, "test_simplifications.py"
        )
    ),
    *(
        row
        for name, raw, ours in (
            ("conv2d", "Conv2D", convolutions.convolution),
            ("conv3d", "Conv3D", convolutions.convolution),
            (
                "depthwise_conv2d_native",
                "DepthwiseConv2dNative",
                convolutions.depthwise_convolution,
            ),
            (
                "conv2d_backprop_input",
                "Conv2DBackpropInput",
                convolutions.transposed_convolution,
            ),
            (
                "conv3d_backprop_input_v2",
                "Conv3DBackpropInputV2",
                convolutions.transposed_convolution,
            ),
        )
        for row in _operation_entries(
            _NN,
            name,
            raw,
            ours,
            "DTensor does not support a kernel that is sharded by channels.",
            "test_convolutions.py",
        )
    ),
    *(
        Patch(
            GROUP,
            f"_core.tf_private:{module}",
            name,
            ours,
            "With dilations, TensorFlow rearranges samples with ops for "
            "which DTensor has no rule.",
            TENSORFLOW,
            _TESTS + "test_convolutions.py",
            make=corrections.correct,
        )
        for module, name, ours in (
            (
                "nn_ops",
                "convolution_internal",
                convolutions.dilated_convolution,
            ),
            (
                "nn_impl",
                "depthwise_conv2d",
                convolutions.dilated_depthwise_convolution,
            ),
        )
    ),
    *(
        row
        for name, rule in independent_dims.RULES.items()
        for row in _operation_entries(
            rule.module,
            name,
            rule.op,
            independent_dims.run,
            "DTensor has no rule for the operation, or its rule does not "
            "support all layouts that can stay sharded.",
            "test_independent_dims.py",
            *rule.public,
        )
    ),
    *_random_op_entries(
        "gen_random_ops",
        random_ops.seeded,
        "If the operation has no seed, the devices draw different values "
        "for the same replicated tensor.",
        random_standard_normal="RandomStandardNormal",
        truncated_normal="TruncatedNormal",
        random_gamma="RandomGamma",
        random_poisson_v2="RandomPoissonV2",
        multinomial="Multinomial",
        random_shuffle="RandomShuffle",
        parameterized_truncated_normal="ParameterizedTruncatedNormal",
    ),
    *_random_op_entries(
        "gen_random_ops",
        random_ops.uniform,
        "DTensor raises an error for the operation.",
        random_uniform="RandomUniform",
        random_uniform_int="RandomUniformInt",
    ),
    *_random_op_entries(
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
        "_core.tf_private:gen_dtensor_ops",
        "relayout_like",
        relayouts.relayout_like,
        "DTensor raises an error if a later operation shards the result "
        "further, for example the gradient of a relayout.",
        TENSORFLOW,
        _TESTS + "test_relayouts.py",
        make=corrections.correct,
    ),
    Patch(
        GROUP,
        "_core.tf_private:while_v2",
        "while_loop",
        loops.while_loop,
        "DTensor does not support the tensor lists that a loop creates.",
        TENSORFLOW,
        _TESTS + "test_loops.py",
    ),
    *(
        Patch(
            GROUP,
            f"_core.tf_private:{module}",
            name,
            ours,
            why,
            TENSORFLOW,
            _TESTS + "test_branches.py",
        )
        for module, name, ours, why in (
            (
                "switch_case",
                "_indexed_case_helper",
                branches.switch_case,
                "DTensor does not support the operation of tf.switch_case.",
            ),
            (
                "eager_context",
                "optionals_in_gradients_enabled",
                branches.uses_optionals,
                "DTensor does not support optionals, which the gradient of "
                "tf.cond uses.",
            ),
            (
                "cond_v2",
                "_create_fakeparams",
                branches.missing_values,
                "DTensor does not support the operation that represents "
                "values of another branch.",
            ),
        )
    ),
    Patch(
        GROUP,
        "_core.tf_private:tensor_array_ops",
        "_GraphTensorArrayV2",
        loops.UnrolledArray,
        "DTensor does not support the tensor list that a TensorArray creates.",
        TENSORFLOW,
        _TESTS + "test_loops.py",
        make=loops.array_for_graphs,
    ),
    Patch(
        GROUP,
        "_core.tf_private:FuncGraph",
        "_create_op_internal",
        replicated_ops.create,
        "DTensor supports some operations only for certain layouts, and "
        "raises an error for other layouts.",
        TENSORFLOW,
        "tests/layout/replication/test_replicated_ops.py",
    ),
    Patch(
        GROUP,
        "_core.tf_private:Function",
        "__call__",
        retrace.call,
        "DTensor raises an error if user code calls a function such as "
        "`generate` outside of `fit`.",
        TENSORFLOW,
        "tests/layout/replication/test_user_functions.py",
    ),
    *(
        Patch(
            GROUP,
            "_core.tf_private:pywrap_tfe",
            name,
            ours,
            "DTensor raises an error if a layer or loss uses a host tensor.",
            TENSORFLOW,
            "tests/layout/replication/test_captured_tensors.py",
            make=unwrapped,
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
        "DTensor raises an error if user code reads the value of a "
        "sharded tensor.",
        TENSORFLOW,
        "tests/layout/mesh/test_transfer.py",
    ),
    Patch(
        GROUP,
        "_core.tf_private:gen_resource_variable_ops",
        "var_handle_op",
        variable.make,
        "DTensor compiles the operation separately for each variable name.",
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
        "After a failed step, errors remain in the queues of the devices "
        "and can end the process.",
        TENSORFLOW,
        "tests/layout/mesh/test_errors.py",
    ),
    Patch(
        GROUP,
        "_core.tf_private:error_interpolation",
        "parse_message",
        errors.parse_message,
        "After an error of DTensor's compiler, TensorFlow searches the message "
        "for hours.",
        TENSORFLOW,
        "tests/layout/mesh/test_long_errors.py",
    ),
    Patch(
        GROUP,
        "tensorflow:experimental.dtensor",
        "copy_to_mesh",
        errors.copy_to_mesh,
        "After a failed step, every later copy to the mesh fails.",
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
        "After a dataset has ended, all later operations on the mesh fail.",
        TENSORFLOW,
        "tests/layout/mesh/test_datasets.py",
    ),
)
