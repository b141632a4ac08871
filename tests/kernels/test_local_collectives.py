"""Tests the all-reduces between devices of one process.

The results must be bitwise identical to the results of TensorFlow's kernel,
which runs with the hint "auto".
"""

import functools
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import forked_process
from tf_layoutmap._core import ops

# The kernel of this package exists as soon as its library is loaded.
assert ops.native

DTYPES = (
    tf.float32,
    tf.float64,
    tf.float16,
    tf.bfloat16,
    tf.int32,
    tf.int64,
)
MERGE_OPS = ("Add", "Mul", "Max", "Min")
FINAL_OPS = ("Id", "Div")
OURS, STOCK = "", "auto"

# TensorFlow never forgets a group, so each group size has one key. Each
# collective has its own instance key.
_FIRST_GROUP_KEY = 700_000
_instances = itertools.count(1)


def all_reduce(
    inputs, *, hint=OURS, merge="Add", final="Id", instance=None, size=None
):
    """Returns the results of one collective, in the order of the devices."""
    size = size or len(inputs)
    instance = instance or next(_instances)
    results = []
    for rank, tensor in enumerate(inputs):
        with tf.device(f"CPU:{rank}"):
            results.append(
                tf.raw_ops.CollectiveReduceV2(
                    input=tensor,
                    group_size=tf.constant(size),
                    group_key=tf.constant(_FIRST_GROUP_KEY + size),
                    instance_key=tf.constant(instance),
                    ordering_token=[],
                    merge_op=merge,
                    final_op=final,
                    communication_hint=hint,
                    timeout_seconds=0.0,
                    is_stateless=False,
                    max_subdivs_per_device=16,
                    # Only ops of DTensor use the kernel of this package.
                    name="DTensorAllReduce",
                )
            )
    return results


def graph_of(function, *specs):
    """Returns a function without automatic control dependencies.

    With these dependencies, a device would wait until the previous device has
    completed the same collective.
    """
    return tf.compat.v1.wrap_function(function, specs)


@functools.cache
def all_kinds(dtype, size):
    """Returns a function that runs all kinds of all-reduces on both kernels.

    The outputs of a kernel have the shape [kinds, devices, elements].
    """

    def run(*inputs):
        return [
            tf.stack(
                [
                    all_reduce(inputs, hint=hint, merge=merge, final=final)
                    for merge in MERGE_OPS
                    for final in FINAL_OPS
                ]
            )
            for hint in (OURS, STOCK)
        ]

    return graph_of(run, *[tf.TensorSpec([None], dtype)] * size)


def same_bits(tensors):
    """Returns arrays that are equal if the tensors are bitwise equal.

    All NaN are equal, because the hardware selects their payloads.
    """
    return [
        np.where(
            np.isnan(tensor.astype(np.float64)),
            np.array(7777, f"u{tensor.itemsize}"),
            tensor.view(f"u{tensor.itemsize}"),
        )
        for tensor in map(np.asarray, tensors)
    ]


def values_of(dtype, shape, rng):
    """Returns random values with zeros, ties, overflows and NaN."""
    if dtype.is_integer:
        return rng.integers(-(2**31), 2**31, shape).astype(dtype.as_numpy_dtype)
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-9, 9, shape)
    special = rng.choice(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-40, -1e-7, 7e4],
        shape,
    )
    with np.errstate(over="ignore"):
        return np.where(rng.random(shape) < 0.1, special, values).astype(
            dtype.as_numpy_dtype
        )


@pytest.mark.parametrize(
    "dtype, size",
    [(dtype, size) for dtype in DTYPES for size in (2, 4)]
    + [(tf.float32, size) for size in (3, 5, 6, 7, 8)]
    + [(tf.bfloat16, 3), (tf.int32, 8)],
    ids=lambda value: getattr(value, "name", value),
)
def test_bitwise_identical_to_tensorflow(dtype, size):
    run = all_kinds(dtype, size)
    for length in (1, 15, 64, 1000):
        rng = np.random.default_rng([size, length])
        ours, stock = run(*values_of(dtype, (size, length), rng))
        np.testing.assert_array_equal(*same_bits((ours, stock)))


@given(
    st.sampled_from(((tf.float32, 4), (tf.bfloat16, 3), (tf.int32, 8))),
    st.integers(1, 3000),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=25, deadline=None)
def test_random_lengths(kind, length, seed):
    dtype, size = kind
    values = values_of(dtype, (size, length), np.random.default_rng(seed))
    np.testing.assert_array_equal(*same_bits(all_kinds(dtype, size)(*values)))


def test_sum_equals_numpy():
    values = np.arange(30, dtype=np.float32).reshape(5, 3, 2)

    @graph_of
    def run():
        return all_reduce(tf.unstack(tf.constant(values)))

    for result in run():
        np.testing.assert_array_equal(result, values.sum(0))


def test_large_tensors():
    # Above 4 MiB per device, TensorFlow's kernel is used.
    for length in (1 << 20, (2 << 20) + 5, 3 << 20):
        values = np.random.default_rng(0).normal(size=[2, length])

        def run(first, second):
            return [
                tf.stack(all_reduce([first, second], hint=hint))
                for hint in (OURS, STOCK)
            ]

        spec = tf.TensorSpec([length], tf.float32)
        ours, stock = graph_of(run, spec, spec)(*values.astype(np.float32))
        np.testing.assert_array_equal(*same_bits((ours, stock)))


def test_scalars_and_empty_tensors():
    @graph_of
    def run():
        return all_reduce([tf.constant(3.0), tf.constant(4.0)]), all_reduce(
            [tf.zeros([0, 2]), tf.zeros([0, 2])]
        )

    scalars, empty = run()
    assert [float(scalar) for scalar in scalars] == [7, 7]
    assert all(tensor.shape == [0, 2] for tensor in empty)


def test_collective_in_a_loop():
    """Iterations have the same instance key, and may run at the same time."""

    @graph_of
    def run():
        return tf.while_loop(
            lambda i, *_: i < 50,
            lambda i, a, b: [
                i + 1,
                *(tensor / 2 for tensor in all_reduce([a, b + 2])),
            ],
            [0, tf.zeros([100]), tf.zeros([100])],
        )

    _, first, second = run()
    np.testing.assert_array_equal(first, np.full([100], 50.0))
    np.testing.assert_array_equal(second, np.full([100], 50.0))


def test_inputs_are_not_changed():
    first, second = tf.Variable([1.0, 2.0]), tf.Variable([10.0, 20.0])

    @graph_of
    def run():
        inputs = [first.read_value(), second.read_value()]
        sums = all_reduce(inputs)
        with tf.control_dependencies(sums):
            return [tf.identity(tensor) for tensor in inputs], sums

    inputs, sums = run()
    np.testing.assert_array_equal(inputs, [[1, 2], [10, 20]])
    np.testing.assert_array_equal(sums, [[11, 22], [11, 22]])


def test_variables_that_receive_a_result_are_independent():
    """Both variables get the same buffer until one of them is written."""
    first, second = tf.Variable([0.0, 0.0]), tf.Variable([0.0, 0.0])

    @graph_of
    def run():
        sums = all_reduce([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])])
        for variable, value in zip((first, second), sums):
            variable.assign(value)

    run()
    first.assign_add([100.0, 100.0])
    second.scatter_sub(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0])))
    np.testing.assert_array_equal(first, [104, 106])
    np.testing.assert_array_equal(second, [3, 6])


# Programs that abort TensorFlow's collectives, or configure TensorFlow's
# threads, run in separate processes.
SETUP = """
import tensorflow as tf

import tf_layoutmap as tlm
from tests import strategies
from tests.kernels.test_local_collectives import *



def error_of(function):
    try:
        function()
    except tf.errors.OpError as error:
        return f"{type(error).__name__}: {error.message}"
    return "no error"
"""


def output_of(program, **variables):
    return forked_process.run_code(
        SETUP + program, seconds=60, env={**os.environ, **variables}
    ).stdout


MISMATCH = """
@graph_of
def run():
    return all_reduce([tf.zeros([2]), tf.zeros([3])])

print(error_of(run))
"""


def test_shapes_must_be_equal():
    text = output_of(
        MISMATCH
        + """
@graph_of
def run():
    return all_reduce([tf.ones([2]), tf.ones([2])])

print(run()[0].numpy())
"""
    )
    assert "must have the same shape and dtype" in text
    assert "[2. 2.]" in text


def test_switch():
    text = output_of(MISMATCH, TF_LAYOUTMAP_LOCAL_COLLECTIVES="0")
    assert "Error" in text
    assert "must have the same shape and dtype" not in text


def test_device_that_fails_cancels_the_others():
    text = output_of(
        """
def run(fails):
    inputs = [tf.ones([2]) for _ in range(3)]
    with tf.device("CPU:1"):
        inputs[1] = tf.debugging.check_numerics(
            tf.where(fails, tf.constant([np.nan, 1]), 1.0), "not a number"
        )
    return all_reduce(inputs)

run = graph_of(run, tf.TensorSpec([], tf.bool))
run(False)
for _ in range(20):
    print(error_of(lambda: run(True)).partition(":")[0])
    print(run(False)[2].numpy())
"""
    )
    assert text == "InvalidArgumentError\n[3. 3.]\n" * 20


def test_abort_of_the_collectives():
    text = output_of(
        """
import threading
import time

from tf_layoutmap._core import tf_private

@graph_of
def run():
    return all_reduce([tf.ones([2])], size=2)

@graph_of
def pair():
    return all_reduce([tf.ones([2]), tf.ones([2])])

pair()
thread = threading.Thread(target=lambda: print(error_of(run)))
thread.start()
time.sleep(0.2)
tf_private._context().abort_collective_ops(tf.errors.UNAVAILABLE, "a reason")
thread.join(20)
print(thread.is_alive())
print(error_of(pair))
"""
    )
    # The device that waits, and a later operation, get the error.
    assert text.count("UnavailableError") == 2
    assert text.count("a reason") >= 2
    assert "\nFalse\n" in text


def test_two_steps_at_the_same_time_raise_an_error():
    text = output_of(
        """
import threading

@graph_of
def run():
    return all_reduce([tf.ones([2])], size=2, instance=77)

@graph_of
def pair():
    return all_reduce([tf.ones([2]), tf.ones([2])])

pair()
threads = [
    threading.Thread(target=lambda: print(error_of(run)))
    for _ in range(2)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(pair()[0].numpy())
"""
    )
    assert text.count("must run the same step") == 2
    assert "[2. 2.]" in text


def test_one_thread_for_all_devices():
    text = output_of(
        """
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.config.threading.set_intra_op_parallelism_threads(1)

@graph_of
def run():
    values = [tf.ones([9000])] * 4
    for _ in range(10):
        values = [tensor / 4 for tensor in all_reduce(values)]
    return values

print(run()[3].numpy().mean())
"""
    )
    assert float(text) == 1
