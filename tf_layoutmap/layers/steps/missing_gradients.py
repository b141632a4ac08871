"""Errors for tables that get no gradient, or no values, from Keras."""

from collections.abc import Sequence


def message(layer: str, tables: Sequence[str]) -> str:
    """Returns why a table got no gradient, and what to do about it.

    Keras only warns of a weight without a gradient, and trains the others.

    Args:
      layer: Name of the layer, or path of its weight.
      tables: Names of its tables; none if the layer is the table.
    """
    what = f"Layer {layer!r}" + (
        f" (tables {', '.join(map(repr, tables))})" if tables else ""
    )
    traced = " (call the layer there with training=True)" * bool(tables)
    return (
        f"{what} got no gradient in this training step, so its tables would "
        "not be trained. Likely causes: the layer was not called in this "
        "step, or outside of the `tf.GradientTape`; the loss does not depend "
        "on its output, or only through `tf.stop_gradient` or an operation "
        "without a gradient; or it was called in a `tf.function` that was "
        f"first called outside of the tape{traced}. For a step without this "
        "layer leave its weight out of what the optimizer is given; for tables "
        "that are not to be trained set `trainable = False` of the layer "
        "before `compile`."
    )


def tables_are_no_weights(layer: str) -> str:
    """Returns why `set_weights` is refused, and what to do instead."""
    return (
        f"The tables of layer {layer!r} are no weights of Keras: `get_weights` "
        "has not got them, so `set_weights`, and EarlyStopping with "
        "restore_best_weights=True, would leave them as they are. Use "
        "`save_weights` and `load_weights`, or ModelCheckpoint."
    )
