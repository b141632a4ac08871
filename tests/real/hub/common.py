"""Inputs and heads for models of keras-hub."""

import math
from collections.abc import Callable

import keras
import numpy as np

from tests.real.models import ModelCase

VOCABULARY = 32
SAMPLES, LENGTH, CLASSES = 8, 8, 4


def inputs_of(backbone: keras.Model, **lengths: int):
    """Returns a batch that matches the names and dtypes of a model's inputs.

    Args:
      backbone: Model for which the batch is created.
      **lengths: Lengths of inputs, by name. The default length is `LENGTH`.
    """
    rng = np.random.default_rng(0)
    inputs = backbone.input
    if not isinstance(inputs, dict):
        inputs = {"images": inputs}
    inputs_by_name = {}
    for name, tensor in inputs.items():
        length = lengths.get(name, LENGTH)
        shape = (
            SAMPLES,
            *(length if size is None else size for size in tensor.shape[1:]),
        )
        if "mask" in name:
            mask = np.ones(shape, tensor.dtype)
            if len(shape) == 2:
                # Half of the samples end with two masked positions.
                mask[::2, -2:] = 0
            inputs_by_name[name] = mask
        elif "segment" in name:
            inputs_by_name[name] = rng.integers(0, 2, shape).astype(
                tensor.dtype
            )
        elif "int" in tensor.dtype:
            inputs_by_name[name] = rng.integers(1, VOCABULARY, shape).astype(
                tensor.dtype
            )
        else:
            inputs_by_name[name] = rng.normal(size=shape).astype(tensor.dtype)
    if not isinstance(backbone.input, dict):
        return inputs_by_name["images"]
    return inputs_by_name


def _inputs_like(backbone: keras.Model):
    return keras.tree.map_structure(
        lambda t: keras.Input(t.shape[1:], dtype=t.dtype, name=t.name),
        backbone.input,
    )


def classifier(
    backbone: keras.Model, outputs=(), rate: float = 1e-3
) -> keras.Model:
    """Returns a compiled classifier with four logits on the backbone's outputs.

    Args:
      backbone: Model below the classifier.
      outputs: Names of the backbone's outputs that the classifier uses; by
        default, all outputs.
      rate: Learning rate.
    """
    inputs = _inputs_like(backbone)
    found = backbone(inputs)
    features = []
    for output in keras.tree.flatten(
        [found[name] for name in outputs] if outputs else found
    ):
        middle = tuple(range(1, len(output.shape) - 1))
        features.append(keras.ops.mean(output, middle) if middle else output)
    x = (
        features[0]
        if len(features) == 1
        else (keras.ops.concatenate(features, -1))
    )
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="head")(x))
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def data_of_classifier(model: keras.Model):
    """Returns inputs and class labels."""
    return inputs_of(model), np.arange(SAMPLES) % CLASSES


def backbone_case(
    make: Callable[[], keras.Model], outputs=(), rate: float = 1e-3, **options
) -> ModelCase:
    """Returns the test case for a backbone that is trained as a classifier."""
    return ModelCase(
        lambda: classifier(make(), outputs, rate), data_of_classifier, **options
    )


def contrastive(backbone: keras.Model) -> keras.Model:
    """Returns a compiled model that matches texts with images."""
    inputs = _inputs_like(backbone)
    model = keras.Model(
        inputs,
        {
            name: keras.layers.Identity(name=name)(output)
            for name, output in backbone(inputs).items()
        },
    )
    model.compile(
        keras.optimizers.Adam(1e-3),
        {
            name: keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            for name in model.output
        },
    )
    return model


def data_of_contrastive(model: keras.Model):
    """Returns images and texts; each image matches the text at its index."""
    return inputs_of(model), {name: np.arange(SAMPLES) for name in model.output}


def contrastive_case(make: Callable[[], keras.Model], **options) -> ModelCase:
    """Returns the test case for a model that matches texts with images."""
    return ModelCase(
        lambda: contrastive(make()), data_of_contrastive, **options
    )


def language_model(task: type, backbone: keras.Model) -> keras.Model:
    """Returns a compiled language model without a tokenizer."""
    model = task(backbone=backbone, preprocessor=None)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        sampler="greedy",
    )
    return model


def data_of_language_model(model: keras.Model):
    """Returns tokens, and the next token at each position."""
    x = inputs_of(model)
    name = next(
        name for name in ("decoder_token_ids", "token_ids") if name in x
    )
    return x, np.roll(x[name], -1, axis=1)


def prompt_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Returns a prompt of three tokens per sample."""
    prompt = inputs_of(model)
    for name in prompt:
        if name.endswith("padding_mask") and not name.startswith("encoder"):
            prompt[name] = prompt[name] * (
                np.arange(math.prod(prompt[name].shape[1:])) < 3
            )
    return prompt


def generated(model: keras.Model) -> np.ndarray:
    """Returns the tokens that a model generates from a short prompt."""
    prompt = prompt_of(model)
    return model.generate(prompt, stop_token_ids=None)[
        "decoder_token_ids" if "decoder_token_ids" in prompt else "token_ids"
    ]


def language_case(
    task: type, make: Callable[[], keras.Model], **options
) -> ModelCase:
    """Returns the test case that trains a language model and generates text."""
    return ModelCase(
        lambda: language_model(task, make()),
        data_of_language_model,
        generate=generated,
        **options,
    )
