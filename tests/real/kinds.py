"""The kinds of cases, and where they are listed."""

import importlib
from typing import Any

# A module is imported when its cases are asked for: keras-hub is needed by
# its own cases only.
KINDS = {
    "keras-hub, its own layout maps": "tests.real.hub.own_maps",
    "keras-hub, language models": "tests.real.hub.language",
    "keras-hub, encoders of text": "tests.real.hub.encoders",
    "keras-hub, images": "tests.real.hub.images",
    "keras-hub, several kinds of data": "tests.real.hub.mixed",
    "keras.applications": "tests.real.library.applications",
    "tf_keras, layers": "tests.real.library.tf_keras_layers",
    "recommenders": "tests.real.library.recommenders",
    "programs": "tests.real.programs",
}
# What the processes of a kind are started with.
ENVIRONMENT = {"recommenders": {"TF_USE_LEGACY_KERAS": "1"}}
SELF_TEST = {"self test": "tests.real.self_test"}


def cases(kind: str) -> dict[str, Any]:
    """The cases of a kind by their names; each has a method `run`."""
    return importlib.import_module({**KINDS, **SELF_TEST}[kind]).CASES
