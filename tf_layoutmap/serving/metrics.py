"""The metrics of a model, and those of what was exported of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap.serving.report import ExportReport


def check_model(model: Any) -> None:
    """Refuses what has no metrics.

    Raises:
      ValueError: If it is no compiled model.
    """
    if not getattr(model, "compiled", getattr(model, "_is_compiled", False)):
        raise ValueError(
            "Argument `dataset` must be None but for a compiled model, which "
            f"has metrics. Received: a dataset, with {model!r}."
        )


def compared(report: ExportReport, model: Any, dataset: Any) -> ExportReport:
    """Returns the report with the metrics before and after."""
    served = tf.saved_model.load(report.path)
    return dataclasses.replace(
        report,
        metrics_before=_metrics(
            model, dataset, lambda x: model(x, training=False)
        ),
        metrics_after=_metrics(
            model, dataset, lambda x: _as_specified(served.serve, x)
        ),
    )


def _as_specified(served: Any, x: Any) -> Any:
    """Calls an exported function with inputs of the types that it takes."""
    args, _ = served.concrete_functions[0].structured_input_signature
    return served(
        tf.nest.map_structure(
            lambda spec, one: tf.cast(one, spec.dtype), args[0], x
        )
    )


def _metrics(
    model: Any, dataset: Any, predict: Callable[[Any], Any]
) -> dict[str, float]:
    """The metrics of `compile`, and the mean loss of all samples."""
    model.reset_metrics()
    total, num_samples = 0.0, 0
    found: dict[str, Any] = {}
    for batch in dataset:
        x, y, sample_weight = (*batch, None)[:3]
        outputs = predict(x)
        loss = model.compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=sample_weight
        )
        size = int(tf.shape(tf.nest.flatten(y)[0])[0])
        total += float(loss) * size
        num_samples += size
        found = model.compute_metrics(x, y, outputs, sample_weight)
    model.reset_metrics()
    if not num_samples:
        raise ValueError("Argument `dataset` must not be empty.")
    return {
        **{name: float(value) for name, value in found.items()},
        "loss": total / num_samples,
    }
