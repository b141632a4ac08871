"""Maps the kinds of test cases to the modules that define the cases."""

import importlib
from typing import Any

# `cases` imports a module on demand, because only the cases of keras-hub
# require keras-hub.
KINDS = {
    "keras-hub, its own layout maps": "tests.real.hub.own_maps",
    "keras-hub, language models": "tests.real.hub.language",
    "keras-hub, encoders of text": "tests.real.hub.encoders",
    "keras-hub, images": "tests.real.hub.images",
    "keras-hub, several kinds of data": "tests.real.hub.mixed",
    "keras-hub, planned layout maps": "tests.real.hub.planned",
    "keras.applications": "tests.real.library.applications",
    "tf_keras, layers": "tests.real.library.tf_keras_layers",
    "recommenders": "tests.real.library.recommenders",
    "replaced embeddings": "tests.real.library.replaced_embeddings",
    "replaced embeddings, tf_keras": "tests.real.library.replaced_tf_keras",
    "programs": "tests.real.programs",
}
# Environment variables for the processes of a kind.
ENVIRONMENT = {
    "recommenders": {"TF_USE_LEGACY_KERAS": "1"},
    "replaced embeddings, tf_keras": {"TF_USE_LEGACY_KERAS": "1"},
}
SELF_TEST = {"self test": "tests.real.self_test"}


def cases(kind: str) -> dict[str, Any]:
    """Returns the test cases of a kind, by name. Cases have a method `run`."""
    return importlib.import_module({**KINDS, **SELF_TEST}[kind]).CASES
