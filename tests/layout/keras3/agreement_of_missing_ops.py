"""Run by test_agreement: layers that train once missing ops are enabled."""

from tests.layout import pairs
from tests.layout.keras3 import test_agreement, test_layers
from tests.layout.keras3.test_agreement import CLOSE, EXPLORE, MESHES
from tf_layoutmap import dtensor as tlm_dtensor

L = test_agreement.L
stack, HEAD = test_layers.stack, test_layers.HEAD

LAYERS = {
    "SeparableConv2D": (stack((8, 8, 3), lambda: L.SeparableConv2D(4, 3)),
                        pairs.IMAGES, HEAD),
    # The gradient of its inputs, too.
    "DepthwiseConv2D": (
        stack((8, 8, 3), lambda: L.Conv2D(2, 3),
              lambda: L.DepthwiseConv2D(3, depth_multiplier=2)),
        pairs.IMAGES, HEAD),
    "SeparableConv1D": (stack((6, 8), lambda: L.SeparableConv1D(4, 3)),
                        pairs.SERIES, HEAD),
    "AveragePooling2D": (
        stack((8, 8, 3), lambda: L.Conv2D(4, 3),
              lambda: L.AveragePooling2D(2)), pairs.IMAGES, HEAD),
    "AveragePooling3D": (
        stack((8, 8, 3), lambda: L.Reshape((8, 8, 3, 1)),
              lambda: L.Conv3D(2, 2), lambda: L.AveragePooling3D((2, 2, 1))),
        pairs.IMAGES, HEAD),
}
SETTINGS = ("Adam", "SGD weight decay", "Adam clipnorm", "RMSprop",
            "Adam global_clipnorm")


def cases():
    """Yields the first layer on each mesh, the others on one each."""
    for index, layer in enumerate(LAYERS):
        for place, sizes in enumerate(MESHES):
            if EXPLORE or index in (0, len(MESHES) - place):
                yield layer, SETTINGS[place], sizes


def main():
    tlm_dtensor.enable_missing_ops()
    test_agreement.LAYERS.update(LAYERS)
    for layer, setting, sizes in cases():
        test_agreement.compare(layer, setting, sizes, CLOSE)
        print(f"agrees: {layer}, {setting} on {sizes}", flush=True)


if __name__ == "__main__":
    main()
