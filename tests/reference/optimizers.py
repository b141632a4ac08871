"""The optimizers in float64, following their published formulas.

A function takes rows, slot rows and gradients, and returns the new rows and
slot rows. Hyperparameters are first rounded to float32, as in the engine,
because the rounding of 0.999 to 0.99900001 would otherwise change the results.
"""

import math

import numpy as np


def sgd(p, slots, g, *, lr):
    return p - lr * g, slots


def adagrad(p, slots, g, *, lr):
    a = slots["accumulators"] + g**2
    return p - lr * g / np.sqrt(a), {"accumulators": a}


def adagrad_momentum(
    p,
    slots,
    g,
    *,
    lr,
    momentum=0.0,
    use_nesterov=False,
    exponent=2.0,
    beta2=1.0,
    epsilon=1e-10,
):
    a = slots["accumulators"]
    a = a + g**2 if beta2 == 1 else beta2 * a + (1 - beta2) * g**2
    scaled = g * (a + epsilon) ** (-1 / exponent)
    m = momentum * slots["momenta"] + scaled
    step = momentum * m + scaled if use_nesterov else m
    return p - lr * step, {"accumulators": a, "momenta": m}


def adam(
    p,
    slots,
    g,
    *,
    lr,
    beta_1=0.9,
    beta_2=0.999,
    epsilon=1e-7,
    sum_inside_sqrt=True,
):
    m = beta_1 * slots["momenta"] + (1 - beta_1) * g
    v = beta_2 * slots["velocities"] + (1 - beta_2) * g**2
    root = np.sqrt(v + epsilon**2) if sum_inside_sqrt else np.sqrt(v) + epsilon
    return p - lr * m / root, {"momenta": m, "velocities": v}


def ftrl(
    p,
    slots,
    g,
    *,
    lr,
    learning_rate_power=-0.5,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
    beta=0.0,
    multiply_linear_by_learning_rate=False,
):
    old, linear = slots["accumulators"], slots["linears"]
    a = old + g**2
    sigma = a**-learning_rate_power - old**-learning_rate_power
    # The published formula divides by the learning rate, which may be 0. All
    # terms are therefore multiplied by the learning rate.
    linear = linear * (1 if multiply_linear_by_learning_rate else lr)
    linear = linear + lr * g - sigma * p
    quotient = (
        a**-learning_rate_power + beta + 2 * lr * l2_regularization_strength
    )
    threshold = lr * l1_regularization_strength
    p = np.where(
        np.abs(linear) > threshold,
        (np.sign(linear) * threshold - linear) / quotient,
        0.0,
    )
    if not multiply_linear_by_learning_rate:
        linear = linear / lr
    return p, {"accumulators": a, "linears": linear}


def rowwise_adagrad(p, slots, g, *, lr, epsilon=1e-8):
    a = slots["accumulators"] + np.mean(g**2, axis=1, keepdims=True)
    return p - lr * g / (np.sqrt(a) + epsilon), {"accumulators": a}


def lamb(
    p, slots, g, *, lr, beta_1=0.9, beta_2=0.999, epsilon=1e-6, weight_decay=0.0
):
    t = slots["steps"] + 1
    m = beta_1 * slots["momenta"] + (1 - beta_1) * g
    v = beta_2 * slots["velocities"] + (1 - beta_2) * g**2
    m_hat, v_hat = m / (1 - beta_1**t), v / (1 - beta_2**t)
    r = m_hat / (np.sqrt(v_hat) + epsilon) + weight_decay * p
    of_p, of_r = (np.linalg.norm(one, axis=1, keepdims=True) for one in (p, r))
    is_set = (of_p > 0) & (of_r > 0)
    ratio = np.where(is_set, of_p / np.where(is_set, of_r, 1), 1)
    return p - lr * ratio * r, {"momenta": m, "velocities": v, "steps": t}


RULES = {
    "SGD": sgd,
    "Adagrad": adagrad,
    "AdagradMomentum": adagrad_momentum,
    "Adam": adam,
    "FTRL": ftrl,
    "RowwiseAdagrad": rowwise_adagrad,
    "LAMB": lamb,
}
SLOTS = {
    "SGD": (),
    "Adagrad": ("accumulators",),
    "AdagradMomentum": ("accumulators", "momenta"),
    "Adam": ("momenta", "velocities"),
    "FTRL": ("accumulators", "linears"),
    "RowwiseAdagrad": ("accumulators",),
    "LAMB": ("momenta", "velocities", "steps"),
}
# Slot variables that have only one value per row.
PER_ROW = {("RowwiseAdagrad", "accumulators"), ("LAMB", "steps")}


def rounded(value):
    """Rounds a float to float32 and returns other values unchanged."""
    if isinstance(value, float) and math.isfinite(value):
        return float(np.float32(value))
    return value


class Table:
    """Rows and slots in float64, trained step by step.

    `settings` are the arguments of TensorFlow's optimizer of the same name.
    """

    def __init__(self, rows, kind, learning_rate, **settings):
        self.rows = np.asarray(rows, np.float64)
        self._kind = kind
        settings = {
            name: rounded(one)
            for name, one in {
                **(RULES[kind].__kwdefaults__ or {}),
                **settings,
            }.items()
        }
        initial = settings.pop(
            "initial_accumulator_value",
            {"Adagrad": 0.1, "FTRL": 0.1}.get(kind, 0.0),
        )
        self.slots = {
            name: np.full(
                [len(self.rows), 1]
                if (kind, name) in PER_ROW
                else self.rows.shape,
                rounded(initial) if name == "accumulators" else 0.0,
            )
            for name in SLOTS[kind]
        }
        self.learning_rate = learning_rate
        self._lazy = settings.pop("lazy_adam", True)
        self._accumulate = settings.pop("use_gradient_accumulation", True)
        self._clip_gradient = settings.pop("clipvalue", None)
        self._decay = settings.pop("weight_decay_factor", None) or 0.0
        self._decay_by_rate = settings.pop(
            "multiply_weight_decay_factor_by_learning_rate", False
        )
        self._clip_weights = (
            settings.pop("clip_weight_min", None),
            settings.pop("clip_weight_max", None),
        )
        self._settings = settings

    def train(self, contributions):
        """Runs one step on (row, gradient) pairs, in list order."""
        if not self._accumulate:
            for row, gradient in contributions:
                self._update([row], np.asarray(gradient)[np.newaxis])
            return
        sums = {}
        for row, gradient in contributions:
            sums[row] = sums.get(row, 0) + np.asarray(gradient, np.float64)
        if not self._lazy:
            for row in range(len(self.rows)):
                sums.setdefault(row, np.zeros(self.rows.shape[1]))
        if sums:
            self._update(list(sums), np.stack(list(sums.values())))

    def _update(self, rows, gradients):
        lr = rounded(float(self.learning_rate))
        if self._clip_gradient is not None:
            limit = self._clip_gradient
            low, high = limit if isinstance(limit, tuple) else (-limit, limit)
            gradients = np.clip(gradients, rounded(low), rounded(high))
        found, slots = RULES[self._kind](
            self.rows[rows],
            {name: slot[rows] for name, slot in self.slots.items()},
            gradients,
            lr=lr,
            **self._settings,
        )
        found = found - found * self._decay * (lr if self._decay_by_rate else 1)
        if self._clip_weights != (None, None):
            found = np.clip(found, *self._clip_weights)
        self.rows[rows] = found
        for name, slot in slots.items():
            self.slots[name][rows] = slot
