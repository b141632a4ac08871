"""Checks that layers whose gradients have no DTensor rule match one device."""

import pytest

from tests.layout import pairs
from tests.layout.keras3 import test_agreement, test_layers
from tests.layout.keras3.test_agreement import CLOSE, EXPLORE, MESHES

L = test_agreement.L
stack, HEAD = test_layers.stack, test_layers.HEAD

LAYERS = {
    "SeparableConv2D": (
        stack((8, 8, 3), lambda: L.SeparableConv2D(4, 3)),
        pairs.IMAGES,
        HEAD,
    ),
    # The layer has a layer before it, so this case also covers the gradient of
    # the inputs.
    "DepthwiseConv2D": (
        stack(
            (8, 8, 3),
            lambda: L.Conv2D(2, 3),
            lambda: L.DepthwiseConv2D(3, depth_multiplier=2),
        ),
        pairs.IMAGES,
        HEAD,
    ),
    "SeparableConv1D": (
        stack((6, 8), lambda: L.SeparableConv1D(4, 3)),
        pairs.SERIES,
        HEAD,
    ),
    "AveragePooling2D": (
        stack((8, 8, 3), lambda: L.Conv2D(4, 3), lambda: L.AveragePooling2D(2)),
        pairs.IMAGES,
        HEAD,
    ),
    "AveragePooling3D": (
        stack(
            (8, 8, 3),
            lambda: L.Reshape((8, 8, 3, 1)),
            lambda: L.Conv3D(2, 2),
            lambda: L.AveragePooling3D((2, 2, 1)),
        ),
        pairs.IMAGES,
        HEAD,
    ),
}
SETTINGS = (
    "Adam",
    "SGD weight decay",
    "Adam clipnorm",
    "RMSprop",
    "Adam global_clipnorm",
)


def cases():
    """Yields the first layer on each mesh, and each other layer on one mesh."""
    for index, layer in enumerate(LAYERS):
        for place, sizes in enumerate(MESHES):
            if EXPLORE or index in (0, len(MESHES) - place):
                yield layer, SETTINGS[place], sizes


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:To ")
@pytest.mark.parametrize(
    "layer, setting, sizes",
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{len(case[2])}")
        for case in cases()
    ],
)
def test_losses_agree(layer, setting, sizes, monkeypatch):
    monkeypatch.setitem(test_agreement.LAYERS, layer, LAYERS[layer])
    test_agreement.compare(layer, setting, sizes, CLOSE)
