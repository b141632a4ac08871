"""Reference of the dot products of features, one product after the other."""

import numpy as np


def pairs(
    num_features: int, *, self_interaction: bool, skip_gather: bool
) -> list[tuple[int, int] | None]:
    """Returns the features of each product; None for a zero."""
    return [
        (i, j) if j < i + self_interaction else None
        for i in range(num_features)
        for j in range(num_features)
        if skip_gather or j < i + self_interaction
    ]


def products(features: list[np.ndarray], **options: bool) -> np.ndarray:
    """Returns the products `[num_samples, num_products]` of features."""
    found = np.zeros(
        [len(features[0]), len(pairs(len(features), **options))],
        features[0].dtype,
    )
    for k, pair in enumerate(pairs(len(features), **options)):
        if pair is not None:
            i, j = pair
            found[:, k] = (features[i] * features[j]).sum(axis=1)
    return found


def gradients(
    features: list[np.ndarray], of_products: np.ndarray, **options: bool
) -> list[np.ndarray]:
    """Returns the gradient of each feature."""
    found = [np.zeros_like(feature) for feature in features]
    for k, pair in enumerate(pairs(len(features), **options)):
        if pair is not None:
            i, j = pair
            found[i] += of_products[:, k : k + 1] * features[j]
            found[j] += of_products[:, k : k + 1] * features[i]
    return found
