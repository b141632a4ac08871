"""tf_layoutmap.embedding.optimizers: TPU optimizer objects become specs."""

import functools
import math

import keras
import pytest
import tensorflow as tf

from tf_layoutmap.embedding import optimizers

tpu = tf.tpu.experimental.embedding


def read(optimizer):
    return optimizers.read_optimizer(optimizer, table="words")


def test_sgd_has_a_learning_rate_and_no_slot():
    assert read(tpu.SGD(0.25)) == optimizers.OptimizerSpec("sgd", 0.25)


def test_adagrad_has_accumulators_with_its_initial_value():
    spec = read(tpu.Adagrad(0.5, initial_accumulator_value=0.25))
    assert spec.name == "adagrad"
    assert spec.learning_rate == 0.5
    assert spec.slots == (optimizers.SlotSpec("accumulators", 0.25),)


def test_no_optimizer_stays_none():
    assert read(None) is None


def test_dynamic_learning_rate_is_kept_as_the_callable():
    rate = functools.partial(max, 0.1, 0.2)
    spec = read(tpu.SGD(rate))
    assert spec.has_dynamic_rate
    assert spec.learning_rate is rate


def test_memory_packing_of_the_tpu_changes_nothing():
    assert read(tpu.SGD(0.5, low_dimensional_packing_status=True)) == (
        read(tpu.SGD(0.5)))


@pytest.mark.parametrize(
    "rate", [math.nan, math.inf, -math.inf, -0.1, True, "0.1", None])
def test_learning_rate_that_is_no_finite_number_is_refused(rate):
    with pytest.raises(ValueError, match=r"learning rate must be .*'words'"):
        read(tpu.SGD(rate))


def test_schedule_that_wants_a_step_is_refused_with_the_remedy():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(ValueError, match="without arguments; wrap"):
        read(tpu.SGD(schedule))


@pytest.mark.parametrize("optimizer", [
    tpu.Adam(0.1), tpu.FTRL(0.1), tpu.AdagradMomentum(0.1, momentum=0.9)])
def test_optimizers_not_carried_out_are_refused_by_name(optimizer):
    with pytest.raises(ValueError, match=type(optimizer).__name__):
        read(optimizer)


class MySGD(tpu.SGD):
    """A subclass may mean another rule."""


def test_subclass_is_refused():
    with pytest.raises(ValueError, match="MySGD"):
        read(MySGD(0.1))


@pytest.mark.parametrize("make", [
    lambda: "sgd", lambda: 0.1, lambda: keras.optimizers.SGD(0.1),
    lambda: keras.optimizers.Adagrad(0.1)])
def test_other_objects_are_unsupported_optimizer_classes(make):
    with pytest.raises(ValueError, match="unsupported optimizer class"):
        read(make())


@pytest.mark.parametrize("setting", [
    {"use_gradient_accumulation": False},
    {"clip_weight_min": -1.0},
    {"clip_weight_max": 1.0},
    {"weight_decay_factor": 0.1},
    {"clipvalue": 1.0},
    {"clipvalue": (None, 1.0)},
])
@pytest.mark.parametrize("kind", [tpu.SGD, tpu.Adagrad])
def test_each_setting_not_carried_out_is_refused_by_name(kind, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        read(kind(0.1, **setting))


def test_custom_slot_creation_is_refused():
    with pytest.raises(ValueError, match="slot_variable_creation_fn"):
        read(tpu.Adagrad(0.1, slot_variable_creation_fn=lambda *_: {}))
