"""The smallest model of each family of `keras.applications`."""

import keras
import numpy as np

from tests.real.models import ModelCase

A = keras.applications

CLASSES = 10
# Batch normalization divides by the deviation of a few pixels, which makes
# more of a last bit in each of many layers.
NORMALIZED = dict(close=1e-4, reason="batch statistics amplify rounding")

# The smallest side that a family takes, and how much losses may differ.
FAMILIES = {
    "ConvNeXtTiny": (A.ConvNeXtTiny, 32, {}),
    "DenseNet121": (A.DenseNet121, 32, NORMALIZED),
    "EfficientNetB0": (A.EfficientNetB0, 32, NORMALIZED),
    "EfficientNetV2B0": (A.EfficientNetV2B0, 32, NORMALIZED),
    "InceptionResNetV2": (A.InceptionResNetV2, 75, NORMALIZED),
    "InceptionV3": (A.InceptionV3, 75, NORMALIZED),
    "MobileNet": (A.MobileNet, 32, NORMALIZED),
    "MobileNetV2": (A.MobileNetV2, 32, NORMALIZED),
    "MobileNetV3Small": (A.MobileNetV3Small, 32, NORMALIZED),
    "NASNetMobile": (A.NASNetMobile, 32, NORMALIZED),
    "ResNet50": (A.ResNet50, 32, NORMALIZED),
    "ResNet50V2": (A.ResNet50V2, 32, NORMALIZED),
    "VGG16": (A.VGG16, 32, {}),
    "Xception": (A.Xception, 71, NORMALIZED),
}

# Dropout of what they have by default is left out: `classes` and a pooling
# stand in for the head that has it.
SETTINGS = dict(weights=None, include_top=False, pooling="avg")


def make(family, side: int):
    """The family's smallest model as a classifier of small images."""
    def model() -> keras.Model:
        body = family(input_shape=(side, side, 3), **SETTINGS)
        made = keras.Sequential([
            keras.Input((side, side, 3)), body,
            keras.layers.Dense(CLASSES, name="head")])
        made.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made
    return model


def data(model: keras.Model):
    """Eight images and classes."""
    rng = np.random.default_rng(0)
    shape = (8, *model.input_shape[1:])
    return (rng.uniform(0, 255, shape).astype(np.float32),
            np.arange(8) % CLASSES)


CASES = {name: ModelCase(make(family, side), data, **options)
         for name, (family, side, options) in FAMILIES.items()}
