"""The error for a table that gets no gradient in a training step."""

from collections.abc import Sequence


def message(layer: str, tables: Sequence[str]) -> str:
    """Returns why a table got no gradient, and what to do about it.

    Keras only warns of a weight without a gradient, and trains the others.

    Args:
      layer: Name of the layer, or path of its weight.
      tables: Names of its tables; none if the layer is the table.
    """
    what = f"Layer {layer!r}" + (
        f" (tables {', '.join(map(repr, tables))})" if tables else "")
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
        "before `compile`.")
