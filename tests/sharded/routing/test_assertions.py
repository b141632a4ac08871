"""Checks whose eager errors are plain sentences."""

import pytest
import tensorflow as tf

from tf_layoutmap.sharded.routing import assertions


def test_an_eager_error_is_the_sentence():
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


def test_nothing_is_raised_or_waited_for_if_it_holds():
    assert assertions.require(tf.constant(True), "Ids must be even.") == []


def test_a_function_raises_when_it_runs():
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
