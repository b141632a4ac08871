"""Tests tf_layoutmap.embedding.configs.optimizer_specs."""

import functools
import math

import keras
import pytest
import tensorflow as tf

from tf_layoutmap.embedding.configs import optimizer_specs

tpu = tf.tpu.experimental.embedding


def read(optimizer):
    return optimizer_specs.read_optimizer(optimizer, table="words")


def test_sgd_has_a_learning_rate_and_no_slots():
    assert read(tpu.SGD(0.25)) == optimizer_specs.OptimizerSpec("sgd", 0.25)


def test_adagrad_has_accumulators_with_an_initial_value():
    spec = read(tpu.Adagrad(0.5, initial_accumulator_value=0.25))
    assert spec.name == "adagrad"
    assert spec.learning_rate == 0.5
    assert spec.slots == (optimizer_specs.SlotSpec("accumulators", 0.25),)


def test_none_is_returned_for_no_optimizer():
    assert read(None) is None


def test_dynamic_learning_rate_is_stored_as_the_callable():
    rate = functools.partial(max, 0.1, 0.2)
    spec = read(tpu.SGD(rate))
    assert spec.has_dynamic_rate
    assert spec.learning_rate is rate


def test_memory_packing_option_is_ignored():
    assert read(tpu.SGD(0.5, low_dimensional_packing_status=True)) == (
        read(tpu.SGD(0.5))
    )


@pytest.mark.parametrize(
    "rate", [math.nan, math.inf, -math.inf, -0.1, True, "0.1", None]
)
def test_invalid_learning_rate_raises(rate):
    with pytest.raises(ValueError, match=r"learning rate must be .*'words'"):
        read(tpu.SGD(rate))


def test_schedule_with_a_step_argument_raises():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    with pytest.raises(ValueError, match="without arguments; wrap"):
        read(tpu.SGD(schedule))


def test_constants_are_in_the_order_of_the_engine():
    spec = read(
        tpu.Adam(0.1, beta_1=0.5, beta_2=0.75, epsilon=0.25, lazy_adam=False)
    )
    assert spec.name == "adam"
    assert spec.constants == (0.5, 0.75, 0.25, 1.0, 0.0)
    assert [one.name for one in spec.slots] == ["momenta", "velocities"]
    spec = read(
        tpu.AdagradMomentum(
            0.1,
            momentum=0.5,
            use_nesterov=True,
            exponent=3,
            beta2=0.75,
            epsilon=0.25,
        )
    )
    assert spec.name == "adagrad_momentum"
    assert spec.constants == (0.5, 1.0, 3.0, 0.75, 0.25)
    assert [one.name for one in spec.slots] == ["accumulators", "momenta"]
    assert [one.initial_value for one in spec.slots] == [0, 0]
    spec = read(
        tpu.FTRL(
            0.1,
            learning_rate_power=-0.25,
            l1_regularization_strength=0.5,
            l2_regularization_strength=0.75,
            beta=2,
            initial_accumulator_value=0.125,
            multiply_linear_by_learning_rate=True,
        )
    )
    assert spec.name == "ftrl"
    assert spec.constants == (-0.25, 0.5, 0.75, 2.0, 1.0)
    assert [one.name for one in spec.slots] == ["accumulators", "linears"]
    assert [one.initial_value for one in spec.slots] == [0.125, 0]


class MySGD(tpu.SGD):
    """Subclass of an optimizer, which could implement another update rule."""


def test_optimizer_subclass_raises():
    with pytest.raises(ValueError, match="MySGD"):
        read(MySGD(0.1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: "sgd",
        lambda: 0.1,
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adagrad(0.1),
    ],
)
def test_other_objects_raise(make):
    with pytest.raises(ValueError, match="must be an object of tf.tpu.exp"):
        read(make())


UNLIMITED = (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("setting", "modifiers"),
    [
        (
            {"use_gradient_accumulation": False},
            (*UNLIMITED, 0, 0, *UNLIMITED, 0),
        ),
        ({"clip_weight_min": -1.0}, (*UNLIMITED, 0, 0, -1, math.inf, 1)),
        ({"clip_weight_max": 2}, (*UNLIMITED, 0, 0, -math.inf, 2, 1)),
        ({"weight_decay_factor": 0.5}, (*UNLIMITED, 0.5, 0, *UNLIMITED, 1)),
        (
            {
                "weight_decay_factor": 0.5,
                "multiply_weight_decay_factor_by_learning_rate": True,
            },
            (*UNLIMITED, 0.5, 1, *UNLIMITED, 1),
        ),
        ({"clipvalue": 1.0}, (-1, 1, 0, 0, *UNLIMITED, 1)),
        ({"clipvalue": (None, 3.0)}, (-math.inf, 3, 0, 0, *UNLIMITED, 1)),
    ],
)
@pytest.mark.parametrize(
    "kind", [tpu.SGD, tpu.Adagrad, tpu.AdagradMomentum, tpu.Adam, tpu.FTRL]
)
def test_modifiers_follow_the_constants_of_the_rule(kind, setting, modifiers):
    plain = read(kind(0.1))
    assert read(kind(0.1, **setting)).constants == (
        *plain.constants,
        *modifiers,
    )


def changed(optimizer, **attributes):
    """Sets attributes of an optimizer after it was constructed."""
    vars(optimizer).update(attributes)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (tpu.AdagradMomentum(0.1, momentum=-0.5), "momentum"),
        (tpu.AdagradMomentum(0.1, beta2=1.5), "beta2"),
        (tpu.AdagradMomentum(0.1, exponent=math.inf), "exponent"),
        (tpu.AdagradMomentum(0.1, use_nesterov=2), "use_nesterov"),
        (changed(tpu.Adam(0.1), beta_1=1.0), "beta_1"),
        (changed(tpu.Adam(0.1), beta_2=-1.0), "beta_2"),
        (tpu.Adam(0.1, epsilon=math.nan), "epsilon"),
        (
            changed(
                tpu.Adam(0.1, lazy_adam=False), use_gradient_accumulation=False
            ),
            "lazy_adam=False",
        ),
        (tpu.FTRL(0.1, learning_rate_power=0.5), "at most 0"),
        (tpu.FTRL(0.1, l1_regularization_strength=-1.0), "l1_regularization"),
        (tpu.FTRL(0.1, l2_regularization_strength=-1.0), "l2_regularization"),
        (tpu.FTRL(0.1, beta=-1.0), "`beta`"),
        (changed(tpu.FTRL(0.1), initial_accumulator_value=0.0), "above 0"),
        (tpu.FTRL(0.0), "divides by its learning rate"),
        (
            tpu.SGD(0.1, clip_weight_min=1.0, clip_weight_max=0.0),
            "`clip_weight_min` of SGD must not be above",
        ),
        (tpu.SGD(0.1, clipvalue=(1.0, 0.0)), "clip_gradient_min"),
        (tpu.SGD(0.1, clip_weight_max=math.nan), "clip_weight_max"),
        (tpu.SGD(0.1, clip_weight_max=True), "clip_weight_max"),
        (tpu.SGD(0.1, weight_decay_factor=-0.1), "weight_decay_factor"),
        (
            changed(
                tpu.SGD(0.1, clipvalue=1.0), use_gradient_accumulation=False
            ),
            "never formed",
        ),
    ],
)
def test_invalid_settings_raise_with_their_name(optimizer, words):
    with pytest.raises(ValueError, match=rf"{words}.*\(table 'words'\)"):
        read(optimizer)


def test_ftrl_allows_a_zero_rate_if_it_does_not_divide_by_it():
    optimizer = tpu.FTRL(0.0, multiply_linear_by_learning_rate=True)
    assert read(optimizer).learning_rate == 0


def test_ftrl_allows_zero_accumulators_if_configured():
    optimizer = changed(
        tpu.FTRL(0.1, allow_zero_accumulator=True),
        initial_accumulator_value=0.0,
    )
    assert read(optimizer).slots[0].initial_value == 0


def test_custom_slot_creation_raises():
    with pytest.raises(ValueError, match="slot_variable_creation_fn"):
        read(tpu.Adagrad(0.1, slot_variable_creation_fn=lambda *_: {}))


class CustomOptimizer:
    learning_rate = use_gradient_accumulation = clip_weight_min = None
    clip_gradient_min = weight_decay_factor = None


def test_custom_optimizer_raises_with_its_class_name():
    with pytest.raises(ValueError, match=r"'FTRL'.*CustomOptimizer"):
        read(CustomOptimizer())


@pytest.mark.parametrize("name", ["adam", "Adam", "adamm", "adagrad_momentum"])
def test_the_name_of_an_optimizer_suggests_its_class(name):
    kind = "AdagradMomentum" if "_" in name else "Adam"
    with pytest.raises(ValueError, match=rf"embedding\.{kind}\(.*{name!r}"):
        read(name)
