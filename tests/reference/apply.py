"""Reference of a table update, which updates the rows one by one in place."""

import numpy as np

from tests.reference import lookup


def step(optimizer: str, row, slots, gradient, hyperparameters, squares=None):
    """Applies one optimizer step to views of a row and of its slot rows.

    `squares` is the sum of the squares of the gradients in `gradient`.
    """
    rate = np.float32(hyperparameters[0])
    if optimizer == "sgd":
        row -= rate * gradient
        return
    constants = [np.float32(one) for one in hyperparameters[1:]]
    one = np.float32(1)
    if not optimizer.endswith("_per_id"):
        squares = gradient * gradient
    rule = optimizer.removesuffix("_per_id")
    if rule == "adagrad":
        slots[0] += squares
        row -= rate * gradient / np.sqrt(slots[0])
    elif rule == "rmsprop":
        rho, epsilon = constants
        slots[0][:] = rho * slots[0] + (one - rho) * squares
        row -= rate * gradient / np.sqrt(slots[0] + epsilon)
    elif rule == "momentum":
        mu, use_nesterov = constants
        slots[0][:] = mu * slots[0] + rate * gradient
        row -= mu * slots[0] + rate * gradient if use_nesterov else slots[0]
    elif rule == "adam":
        beta_1, beta_2, epsilon, _, _ = constants
        slots[0][:] = beta_1 * slots[0] + (one - beta_1) * gradient
        slots[1][:] = beta_2 * slots[1] + (one - beta_2) * squares
        row -= rate * slots[0] / (np.sqrt(slots[1]) + epsilon)
    else:
        raise ValueError(optimizer)


def apply_row_gradients(
    table,
    slots,
    unique_rows,
    unique_splits,
    positions,
    row_splits,
    gains,
    gradients,
    *,
    optimizer: str,
    hyperparameters,
):
    """Updates `table` and `slots` in place."""
    samples = lookup.sample_of(row_splits)
    for u, row in enumerate(unique_rows):
        gradient = np.zeros(table.shape[1], np.float32)
        squares = np.zeros(table.shape[1], np.float32)
        for position in positions[unique_splits[u] : unique_splits[u + 1]]:
            one = gains[position] * gradients[samples[position]]
            gradient += one
            squares += one * one
        step(
            optimizer,
            table[row],
            [slot[row] for slot in slots],
            gradient,
            hyperparameters,
            squares,
        )
