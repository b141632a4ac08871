"""Test cases for the smallest model of each family of `keras.applications`."""

import keras
import numpy as np

from tests.real.models import ModelCase

A = keras.applications

CLASSES = 10

# The batch statistics of this model are computed from few numbers. With a
# learning rate of 1e-5, they amplify rounding errors to 2e-3, also without a
# mesh.
RATES = {"ResNet50V2": 1e-6}

# Smallest model of each family, and its minimum image size.
FAMILIES = {
    "ConvNeXtTiny": (A.ConvNeXtTiny, 32),
    "DenseNet121": (A.DenseNet121, 32),
    "EfficientNetB0": (A.EfficientNetB0, 32),
    "EfficientNetV2B0": (A.EfficientNetV2B0, 32),
    "InceptionResNetV2": (A.InceptionResNetV2, 75),
    "InceptionV3": (A.InceptionV3, 75),
    "MobileNet": (A.MobileNet, 32),
    "MobileNetV2": (A.MobileNetV2, 32),
    "MobileNetV3Small": (A.MobileNetV3Small, 32),
    "NASNetMobile": (A.NASNetMobile, 32),
    "ResNet50": (A.ResNet50, 32),
    "ResNet50V2": (A.ResNet50V2, 96),
    "VGG16": (A.VGG16, 32),
    "Xception": (A.Xception, 71),
}

# The head of the models is omitted, because it contains dropout.
SETTINGS = dict(weights=None, include_top=False, pooling="avg")


def make(family, side: int, rate: float):
    """Returns a function that creates a classifier of the family."""

    def model() -> keras.Model:
        body = family(input_shape=(side, side, 3), **SETTINGS)
        classifier = keras.Sequential(
            [
                keras.Input((side, side, 3)),
                body,
                keras.layers.Dense(CLASSES, name="head"),
            ]
        )
        classifier.compile(
            keras.optimizers.SGD(rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        return classifier

    return model


def data(model: keras.Model):
    """Returns eight images and their classes."""
    rng = np.random.default_rng(0)
    shape = (8, *model.input_shape[1:])
    return (
        rng.uniform(-1, 1, shape).astype(np.float32),
        np.arange(8) % CLASSES,
    )


CASES = {
    name: ModelCase(make(family, side, RATES.get(name, 1e-3)), data)
    for name, (family, side) in FAMILIES.items()
}
