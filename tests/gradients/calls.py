"""Ways in which a program calls a model and computes its gradients.

Each way trains a program of `subjects` for one step per batch, and returns the
losses.
With `first="evaluation"`, the program first calls the model without a tape.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.gradients.subjects import BATCH_SIZE, BATCHES, Program


def _loss(predictions: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the share of one replica in the mean over the batch."""
    errors = tf.square(tf.reshape(predictions, [-1]) - labels)
    return tf.reduce_sum(errors) / BATCH_SIZE


def _gradients(
    program: Program, forward: Callable, ids: tf.Tensor, labels: tf.Tensor
) -> tuple[tf.Tensor, Any]:
    with tf.GradientTape() as tape:
        loss = _loss(forward(ids), labels)
    return loss, tape.gradient(loss, program.weights())


def _step(
    program: Program,
    forward: Callable,
    ids: tf.Tensor,
    labels: tf.Tensor,
    gradients: Callable = _gradients,
) -> tf.Tensor:
    loss, found = gradients(program, forward, ids, labels)
    program.apply(found)
    return loss


def _train(
    program: Program,
    forward: Callable,
    first: str,
    *,
    traced: bool = False,
    gradients: Callable = _gradients,
) -> list[float]:
    step = functools.partial(_step, program, forward, gradients=gradients)

    def run(*batch: tf.Tensor) -> tf.Tensor:
        return program.run(step, *batch)

    if traced:
        run = tf.function(run)
    batches = [program.place(*batch) for batch in BATCHES]
    if first == "evaluation":
        program.run(forward, batches[0][0])
    return [float(run(*batch)) for batch in batches]


def eager(program: Program, first: str) -> list[float]:
    """Calls everything eagerly."""
    return _train(program, program.forward, first)


def step_in_function(program: Program, first: str) -> list[float]:
    """The step is a `tf.function` that contains the tape."""
    return _train(program, program.forward, first, traced=True)


def forward_in_function(program: Program, first: str) -> list[float]:
    """The forward pass is a `tf.function`, and the tape is outside."""
    return _train(program, tf.function(program.forward), first)


def both_in_functions(program: Program, first: str) -> list[float]:
    """The step is a `tf.function` that calls a `tf.function`."""
    return _train(program, tf.function(program.forward), first, traced=True)


def forward_in_nested_functions(program: Program, first: str) -> list[float]:
    """The forward pass is a `tf.function` in a `tf.function`."""
    inner = tf.function(program.forward)
    return _train(program, tf.function(lambda ids: inner(ids)), first)


def vectorized_map(program: Program, first: str) -> list[float]:
    """The model is called for each sample of a batch."""

    def forward(ids: tf.Tensor) -> tf.Tensor:
        return tf.vectorized_map(
            lambda one: program.forward(one[tf.newaxis])[0], ids
        )

    return _train(program, forward, first, traced=True)


def recompute_grad(program: Program, first: str) -> list[float]:
    """The forward pass is computed again for the gradients."""
    return _train(program, tf.recompute_grad(program.forward), first)


def recompute_grad_in_function(program: Program, first: str) -> list[float]:
    """The same in a `tf.function`, which returns the gradients.

    In stock Keras, an optimizer in the same function can write a variable
    before the forward pass is computed again.
    """
    forward = tf.recompute_grad(program.forward)
    gradients = tf.function(functools.partial(_gradients, program, forward))
    return _train(
        program,
        forward,
        first,
        gradients=lambda _program, _forward, *batch: gradients(*batch),
    )


def _penalized(
    program: Program, forward: Callable, ids: tf.Tensor, labels: tf.Tensor
) -> tuple[tf.Tensor, Any]:
    kernel = program.kernel()
    with tf.GradientTape() as outer:
        with tf.GradientTape() as inner:
            loss = _loss(forward(ids), labels)
        gradient = inner.gradient(loss, kernel)
        # The sum over replicas is linear.
        loss += tf.reduce_sum(gradient)
    return loss, outer.gradient(loss, program.weights())


def nested_tapes(program: Program, first: str) -> list[float]:
    """The loss contains a gradient."""
    return _train(program, program.forward, first, gradients=_penalized)


def nested_tapes_in_function(program: Program, first: str) -> list[float]:
    """The same in a `tf.function`."""
    return _train(
        program,
        program.forward,
        first,
        traced=True,
        gradients=_penalized,
    )


def fit(program: Program, first: str) -> list[float]:
    """Keras' loop trains a model in which a layer calls a `tf.function`."""
    return program.fit(first)


WAYS = {
    way.__name__: way
    for way in (
        eager,
        step_in_function,
        forward_in_function,
        both_in_functions,
        forward_in_nested_functions,
        vectorized_map,
        recompute_grad,
        recompute_grad_in_function,
        nested_tapes,
        nested_tapes_in_function,
        fit,
    )
}
