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
    elif optimizer in ("adagrad", "adagrad_per_id"):
        slots[0] += gradient * gradient if optimizer == "adagrad" else squares
        row -= rate * gradient / np.sqrt(slots[0])
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
