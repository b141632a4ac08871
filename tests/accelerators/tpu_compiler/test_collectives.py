"""Collectives of a function of one device become custom calls."""

import json

import pytest
import tensorflow as tf
from tensorflow.core.framework import function_pb2

from tests.accelerators.tpu_compiler import collectives, definitions, lowering

# Devices 0 and 2 form a group, and so do 1 and 3.
KEYS = [7, 8, 7, 8]


def reduced(x, device, *, merge="Add", final="Id", name="reduce"):
    """Returns an all-reduce whose group depends on the device."""
    with tf.name_scope(f"{name}/DTensorAllReduceOp/"):
        key = tf.gather(KEYS, tf.reshape(device, [1]), name="key")
        return tf.raw_ops.CollectiveReduceV2(
            input=x,
            group_size=2,
            group_key=tf.reshape(key, []),
            instance_key=1,
            ordering_token=[],
            merge_op=merge,
            final_op=final,
            name=name,
        )


def function_of(body, *specs):
    function = tf.function(body, autograph=False)
    return definitions.definition_of(function.get_concrete_function(*specs))


DEVICE, VALUES = tf.TensorSpec([], tf.int32), tf.TensorSpec([2, 3])


def node_of(function, op):
    (found,) = (node for node in function.node_def if node.op == op)
    return found


def replaced(function):
    groups = collectives.groups_of(function, 4)
    assert collectives.replace(function, groups) == len(groups)
    return function


def test_an_all_reduce_becomes_a_call_with_the_groups_of_devices():
    function = replaced(function_of(lambda d, x: reduced(x, d), DEVICE, VALUES))
    call = node_of(function, "XlaCustomCallV2")
    assert json.loads(call.attr["backend_config"].s) == {
        "merge": "Add",
        "groups": [[0, 2], [1, 3]],
    }
    assert call.input[0] == "x"
    (shape,) = call.attr["result_shapes"].list.shape
    assert tf.TensorShape(shape) == [2, 3]
    assert f"{call.name}:results:0" in [
        one for node in function.node_def for one in node.input
    ] + list(function.ret.values())


def test_a_mean_is_a_sum_that_is_divided_by_the_size_of_a_group():
    function = replaced(
        function_of(lambda d, x: reduced(x, d, final="Div"), DEVICE, VALUES)
    )
    mean = node_of(function, "RealDiv")
    divisor = mean.input[1].partition(":")[0]
    (count,) = (n for n in function.node_def if n.name == divisor)
    assert tf.make_ndarray(count.attr["value"].tensor) == 2
    # All users of the all-reduce use the mean.
    users = [
        node.op
        for node in function.node_def
        if any(
            "XlaCustomCall" in one or ":results:" in one for one in node.input
        )
    ]
    assert users == ["RealDiv"]


def test_int32_is_not_converted_to_int64():
    def body(device, x):
        with tf.name_scope("min/DTensorAllReduceOp/"):
            wide = tf.cast(x, tf.int64)
        return tf.cast(reduced(wide, device, merge="Min"), tf.int32)

    function = replaced(function_of(body, DEVICE, tf.TensorSpec([4], tf.int32)))
    call = node_of(function, "XlaCustomCallV2")
    assert call.attr["operand_dtypes"].list.type == [tf.int32.as_datatype_enum]
    assert json.loads(call.attr["backend_config"].s)["merge"] == "Min"


def test_int64_values_of_the_program_remain_int64():
    function = replaced(
        function_of(
            lambda d, x: reduced(x, d), DEVICE, tf.TensorSpec([4], tf.int64)
        )
    )
    call = node_of(function, "XlaCustomCallV2")
    assert call.attr["operand_dtypes"].list.type == [tf.int64.as_datatype_enum]


def test_a_cross_replica_sum_has_its_groups_in_a_constant():
    def body(x):
        return tf.raw_ops.CrossReplicaSum(
            input=x, group_assignment=[[0, 1], [2, 3]]
        )

    function = replaced(function_of(body, VALUES))
    call = node_of(function, "XlaCustomCallV2")
    assert json.loads(call.attr["backend_config"].s) == {
        "merge": "Add",
        "groups": [[0, 1], [2, 3]],
    }


def test_a_key_can_use_a_value_twice():
    def body(device, x):
        with tf.name_scope("sum/DTensorAllReduceOp/"):
            half = device // 2
            key = half + half
        return tf.raw_ops.CollectiveReduceV2(
            input=x,
            group_size=2,
            group_key=key,
            instance_key=1,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )

    function = function_of(body, DEVICE, VALUES)
    (groups,) = collectives.groups_of(function, 4).values()
    assert groups == [[0, 1], [2, 3]]


def test_other_collectives_raise():
    def body(device, x):
        del device
        return tf.raw_ops.CollectiveGatherV2(
            input=x,
            group_size=2,
            group_key=1,
            instance_key=1,
            ordering_token=[],
        )

    function = function_of(body, DEVICE, VALUES)
    with pytest.raises(NotImplementedError, match="CollectiveGatherV2"):
        collectives.replace(function, {})


@pytest.mark.parametrize("is_first", [True, False])
def test_the_index_of_the_device_becomes_the_index_of_the_replica(is_first):
    def body(*arguments):
        device, x = arguments if is_first else reversed(arguments)
        # The program can also have a scalar argument of this dtype.
        return reduced(x, device)

    specs = (DEVICE, VALUES) if is_first else (VALUES, DEVICE)
    function = function_of(body, *specs)
    assert collectives.device_argument(function) == (0 if is_first else 1)
    collectives.with_device_id(function)
    assert len(function.signature.input_arg) == 1
    (shape,) = function.arg_attr[0].attr["_output_shapes"].list.shape
    assert tf.TensorShape(shape) == [2, 3]
    assert node_of(function, "XlaReplicaId").name in str(function.node_def)


def test_a_function_without_collectives_has_no_index_of_a_device():
    function = function_of(
        lambda step, x: x + tf.cast(step, tf.float32), DEVICE, VALUES
    )
    assert collectives.device_argument(function) is None
    collectives.with_device_id(function)
    assert len(function.signature.input_arg) == 2


def test_an_update_at_a_computed_position_becomes_an_op_of_xla():
    def body(device, x):
        return tf.raw_ops.TensorStridedSliceUpdate(
            input=tf.zeros([4, 3]),
            begin=[2 * device, 0],
            end=[2 * device + 2, 3],
            strides=[1, 1],
            value=x,
        )

    function = function_of(body, DEVICE, VALUES)
    before = node_of(function, "TensorStridedSliceUpdate")
    value, begin, update = before.input[0], before.input[1], before.input[4]
    collectives.with_dynamic_updates(function)
    after = node_of(function, "XlaDynamicUpdateSlice")
    assert list(after.input) == [value, update, begin]


def test_xla_lowers_the_function():
    variable = tf.Variable(tf.ones([3, 5]))

    def body(device, x):
        y = reduced(x, device) @ variable
        variable.assign_add(tf.ones([3, 5]))
        return y

    function = function_of(body, DEVICE, VALUES)
    program, facts = lowering.lower(
        function_pb2.FunctionDefLibrary(function=[function]), 4
    )
    assert b"all_reduce" in program and b"groups" in program
    assert facts == {
        "nodes": len(function.node_def),
        "collectives": 1,
        "int64_collectives": 0,
        "variable_bytes": 4 * 3 * 5,
        "input_bytes": 4 * 2 * 3,
    }
