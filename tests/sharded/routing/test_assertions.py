"""Tests assertions whose eager errors contain only the message."""

import pytest
import tensorflow as tf

from tf_layoutmap.sharded.routing import assertions


def test_an_eager_error_contains_only_the_message():
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        assertions.require(
            tf.constant(False),
            "Ids must be even. Received: ",
            tf.constant([1, 3, 5, 7]),
            " of ",
            tf.constant(9),
        )
    assert str(caught.value) == (
        "Ids must be even. Received: [1, 3, 5, ...] of 9"
    )


def test_a_satisfied_assertion_neither_raises_nor_adds_control_dependencies():
    assert assertions.require(tf.constant(True), "Ids must be even.") == []


def test_a_traced_assertion_raises_at_run_time():
    @tf.function
    def checked(value):
        with tf.control_dependencies(
            assertions.require(
                value > 0, "A value must be positive. Received: ", value
            )
        ):
            return tf.identity(value)

    assert checked(tf.constant(2)).numpy() == 2
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"A value must be positive.*\[-2\]",
    ):
        checked(tf.constant(-2))
