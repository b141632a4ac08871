"""Tests the shapes of slot variables for the bytes of a plan."""

import math

import keras
import pytest
import tensorflow as tf

from tf_layoutmap.planning.slot_variables import Slot, SlotVariables

FLOAT = 4
OPTIMIZERS = {
    "sgd": "sgd",
    "momentum": lambda: keras.optimizers.SGD(momentum=0.9),
    "adam": "adam",
    "averages": lambda: keras.optimizers.Adam(use_ema=True),
    "nadam": "nadam",
    "rmsprop": lambda: keras.optimizers.RMSprop(centered=True),
    "adagrad": "adagrad",
    "adadelta": "adadelta",
    "adafactor": "adafactor",
    "ftrl": "ftrl",
    "lion": "lion",
    "muon": "muon",
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam()
    ),
    "accumulated": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
}


def optimizer_of(name):
    made = OPTIMIZERS[name]
    return keras.optimizers.get(made() if callable(made) else made)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_are_the_bytes_of_a_built_optimizer(name):
    shapes = [(6, 10), (10,), (2, 3, 4), (), (6, 10)]
    optimizer = optimizer_of(name)
    slots = SlotVariables(optimizer_of(name))
    optimizer.build([keras.Variable(tf.zeros(shape)) for shape in shapes])
    found = slots.fixed_bytes + sum(
        slot.num_bytes(shape, shape)
        for shape in shapes
        for slot in slots.of_weight(len(shape), "float32")
    )
    assert found == sum(
        tf.as_dtype(v.dtype).size * math.prod(v.shape)
        for v in optimizer.variables
    )


def test_adam_has_two_slots_like_the_weight_and_two_counters():
    slots = SlotVariables("adam")
    like = Slot((0, 1), FLOAT)
    assert slots.of_weight(2, "float32") == (like, like)
    assert like.num_bytes((8, 6), (4, 6)) == FLOAT * 24
    # The learning rate and the number of steps, an int32 or int64.
    assert slots.fixed_bytes in (2 * FLOAT, FLOAT + 8)


def test_slots_of_another_shape_are_replicated():
    rows, columns = Slot((0,), FLOAT), Slot((1,), FLOAT)
    slots = SlotVariables("adafactor").of_weight(2, "float32")
    assert {rows, columns} < {*slots}
    assert rows.num_bytes((8, 6), (4, 6)) == FLOAT * 8
    assert columns.num_bytes((8, 6), (4, 6)) == FLOAT * 6


def test_16_bit_weights_have_16_bit_slots():
    assert SlotVariables("lion").of_weight(1, "bfloat16") == (Slot((0,), 2),)


def test_an_object_that_is_no_optimizer_raises():
    with pytest.raises(TypeError, match="`optimizer`.*its name.*'adamm'"):
        SlotVariables("adamm")
