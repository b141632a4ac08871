"""Functions, signatures and metrics of an exported model.

`make_endpoints` traces the model with replaced table lookups.
`compared_metrics` evaluates the model before and after the export.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from tf_layoutmap._core import keras_private, placeholders
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase
from tf_layoutmap.layers.base.tpu_embedding import TPUEmbeddingCore
from tf_layoutmap.serving import (
    feature_lookup,
    signatures,
    sources,
    stored_tables,
    subjects,
)
from tf_layoutmap.serving.report import ExportReport
from tf_layoutmap.serving.stored_tables import StoredTable
from tf_layoutmap.serving.stored_variable import StoredVariable


class Exported(tf.Module):
    """The module to export: a function, and all variables that it reads.

    Attributes:
      serve: The function that runs the model.
      tables: Variables that hold tables.
      keys: Variables that hold the keys of tables with open vocabularies.
      variables_of_model: All other variables of the model.
      resources: Lookup tables of the model's layers.
    """

    def __init__(self, serve: Any, subject: Any, tables: Sequence[StoredTable]):
        """Collects the variables.

        Args:
          serve: The function.
          subject: The model, layer or embedding.
          tables: The stored tables.
        """
        super().__init__()
        self.serve = serve
        # Tables can share variables and keys.
        self.tables: Sequence[StoredVariable] = list(
            dict.fromkeys(stored.variable for stored in tables)
        )
        self.keys: Sequence[tf.Variable] = [
            keys.variable
            for keys in dict.fromkeys(stored.keys for stored in tables)
            if keys is not None
        ]
        self.variables_of_model: Sequence[Any] = subjects.other_variables(
            subject
        )
        self.resources: Sequence[Any] = subjects.resources_of(subject)


def make_endpoints(
    subject: Any,
    input_signature: Sequence[Any] | None,
    tables: Sequence[StoredTable],
) -> tuple[Exported, dict[str, Any]]:
    """Returns a module with a function `serve`, and its signatures.

    Args:
      subject: A model, a layer or an embedding.
      input_signature: A structure of specs for each argument. None selects the
        specs of the model's inputs.
      tables: The stored tables. The function reads them instead of the tables
        of `subject`.

    Raises:
      TypeError: If `input_signature` is not a list of structures of specs.
      ValueError: If `input_signature` is None and the inputs are not known, or
        the function reads a table directly.
    """
    is_embedding = isinstance(subject, EmbeddingBase | TPUEmbeddingCore)
    specs = _specs_of(subject) if input_signature is None else input_signature
    if not isinstance(specs, list | tuple):
        raise TypeError(
            "Argument `input_signature` must be a list that contains a "
            "structure of specs for each argument. Received: "
            f"{input_signature!r}."
        )
    specs = cast(
        "list[Any]", keras.tree.map_structure(_as_tensor_spec, list(specs))
    )
    call = _inference_call(subject)
    lookups = feature_lookup.lookups_of(tables)

    def called(*inputs: Any) -> Any:
        with placeholders.placeholders_in_place(lookups):
            outputs = call(*inputs)
        _check_no_direct_reads(tables)
        return outputs

    # Like Keras, this function uses AutoGraph only for tf_keras models. Keras 3
    # exports models without AutoGraph.
    serve = tf.function(
        called,
        input_signature=list(specs),
        autograph=subjects.is_tf_keras(subject),
    )
    signature = serve
    if is_embedding or signatures.has_composites(specs):
        signature = signatures.of_tensors(
            serve, specs, ("", "weights") if is_embedding else ()
        )
    return Exported(serve, subject, tables), {
        "serve": signature,
        "serving_default": signature,
    }


def _check_no_direct_reads(tables: Sequence[StoredTable]) -> None:
    """Checks that the traced function reads tables only through lookups.

    Raises:
      ValueError: If the function captures the variable of a table.
    """
    captured = [
        external for external, _ in tf.compat.v1.get_default_graph().captures
    ]
    for table in (stored.table for stored in tables):
        handles = sources.handles_of(table)
        if any(tensor is handle for tensor in captured for handle in handles):
            raise ValueError(
                f"Table {table.name!r} must not be read other than by "
                "calling its layer, because it is exported as rows for "
                "lookups. For a model with tied weights, use a "
                "tlm.layers.ShardedEmbedding without an open vocabulary, or "
                "use `model.export`."
            )


def _inference_call(subject: Any) -> Callable[..., Any]:
    if not subjects.is_layer(subject):
        return subject
    return lambda *inputs: subject(*inputs, training=False)


def _specs_of(subject: Any) -> list[Any]:
    """Returns the input specs of a model or an embedding.

    Raises:
      ValueError: If the inputs are not known.
    """
    if isinstance(subject, TPUEmbeddingCore):
        subject = subject.embedding
    if isinstance(subject, EmbeddingBase):
        access = LayerAccess(subject)
        vocabularies = subject.vocabularies
        dtypes = [
            stored_tables.id_type(vocabularies[table.name])
            if table.vocabulary is not None
            else tf.int64
            for table in access.spec.tables
        ]
        return [
            tf.nest.pack_sequence_as(
                access.feature_config,
                [
                    tf.RaggedTensorSpec([None, None], dtypes[feature.table])
                    for feature in access.spec.features
                ],
            )
        ]
    if subjects.is_tf_keras(subject):
        known = subject.save_spec() if hasattr(subject, "save_spec") else None
        return _required(known and list(known[0]), subject)
    if isinstance(subject, keras.Sequential) and subject.built:
        return list(subject.inputs)
    if isinstance(subject, keras_private.Functional):
        return [subject.input]
    if isinstance(subject, keras.Model):
        return keras_private.get_input_signature(subject)
    return _required(None, subject)


def _required(specs: list[Any] | None, subject: Any) -> list[Any]:
    if specs is None:
        raise ValueError(
            "Argument `input_signature` must be given for a layer, and for a "
            "model that was never called. Received: None (layer "
            f"{subject.name!r})."
        )
    return specs


def _as_tensor_spec(spec: Any) -> Any:
    """Converts a Keras spec to a TensorFlow spec."""
    if isinstance(
        spec, tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec
    ):
        return spec
    if not isinstance(spec, keras.KerasTensor | keras.InputSpec):
        raise TypeError(
            "Argument `input_signature` must contain tf.TensorSpec, "
            "tf.RaggedTensorSpec and tf.SparseTensorSpec. Received: "
            f"{spec!r}."
        )
    assert spec.shape is not None and spec.dtype is not None
    shape, dtype = [None, *spec.shape[1:]], tf.as_dtype(spec.dtype)
    if getattr(spec, "ragged", False):
        return tf.RaggedTensorSpec([None, *[None for _ in shape[1:]]], dtype)
    if getattr(spec, "sparse", False):
        return tf.SparseTensorSpec(shape, dtype)
    return tf.TensorSpec(shape, dtype, spec.name)


def check_model_for_metrics(model: Any) -> None:
    """Checks that the metrics of `model` can be computed.

    Raises:
      ValueError: If `model` is not a compiled model.
    """
    if not getattr(model, "compiled", getattr(model, "_is_compiled", False)):
        raise ValueError(
            "Argument `dataset` must be None unless the model is compiled and "
            f"has metrics. Received: a dataset, with {model!r}."
        )


def compared_metrics(
    report: ExportReport, model: Any, dataset: Any
) -> ExportReport:
    """Returns `report` with metrics of the model and of the SavedModel."""
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
    """Calls an exported function with inputs cast to its input dtypes."""
    args, _ = served.concrete_functions[0].structured_input_signature
    return served(
        tf.nest.map_structure(
            lambda spec, value: tf.cast(value, spec.dtype), args[0], x
        )
    )


def _metrics(
    model: Any, dataset: Any, predict: Callable[[Any], Any]
) -> dict[str, float]:
    """Returns the metrics passed to `compile`, and the mean loss per sample."""
    model.reset_metrics()
    total, num_samples = 0.0, 0
    metrics: dict[str, Any] = {}
    for batch in dataset:
        x, y, sample_weight = (*batch, None)[:3]
        outputs = predict(x)
        loss = model.compute_loss(
            x=x, y=y, y_pred=outputs, sample_weight=sample_weight
        )
        size = int(tf.shape(tf.nest.flatten(y)[0])[0])
        total += float(loss) * size
        num_samples += size
        metrics = model.compute_metrics(x, y, outputs, sample_weight)
    model.reset_metrics()
    if not num_samples:
        raise ValueError("Argument `dataset` must not be empty.")
    return {
        **{name: float(value) for name, value in metrics.items()},
        "loss": total / num_samples,
    }
