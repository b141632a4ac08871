"""Replaced names of Keras 3, for `keras.distribution` on a mesh."""

from tf_layoutmap._core import keras_private
from tf_layoutmap._core.patch_entry import KERAS, Patch, Replacement
from tf_layoutmap.distribution import keras_backend

GROUP = "keras_distribution"
_TESTS = "tests/distribution/test_keras_backend.py"


def _backend_entry(
    name: str, ours: Replacement, why: str, *, is_missing: bool = False
) -> Patch:
    return Patch(
        GROUP,
        "_core.keras_private:distribution_backend",
        name,
        ours,
        why,
        KERAS,
        _TESTS,
        is_missing=is_missing,
    )


_ENTRIES: tuple[Patch, ...] = (
    Patch(
        GROUP,
        "_core.keras_private:Distribution",
        "_context_if_set_in_keras",
        keras_backend.context_if_set,
        "Keras creates unsharded weights while a distribution is set.",
        KERAS,
        _TESTS,
        make=keras_backend.as_property,
        is_missing=True,
    ),
    Patch(
        GROUP,
        "_core.keras_private:Distribution",
        "auto_shard_dataset",
        keras_backend.set_auto_shard_dataset,
        "A process would train on a part of its own samples only, and no "
        "error would be raised.",
        KERAS,
        _TESTS,
        make=keras_backend.with_checked_setter,
    ),
    _backend_entry(
        "list_devices",
        keras_backend.list_devices,
        "The list contains devices of several types on a TPU host.",
    ),
    _backend_entry(
        "_to_backend_mesh",
        keras_backend.to_backend_mesh,
        "Keras' function fails if DTensor is not initialized.",
    ),
    _backend_entry(
        "_to_backend_layout",
        keras_backend.to_backend_layout,
        "DTensor's error for a repeated axis does not contain the layout.",
    ),
    *(
        _backend_entry(
            name,
            ours,
            "The TensorFlow backend of Keras does not have this function.",
            is_missing=True,
        )
        for name, ours in (
            ("distribute_tensor", keras_backend.distribute_tensor),
            ("get_device_count", keras_backend.get_device_count),
            ("initialize", keras_backend.initialize),
            ("num_processes", keras_backend.num_processes),
            ("process_id", keras_backend.process_id),
        )
    ),
    Patch(
        GROUP,
        "_core.keras_private:TFDatasetAdapter",
        "__init__",
        keras_backend.init_dataset_adapter,
        "Keras shards a dataset over processes, but a step on a mesh "
        "requires the full batch in each process.",
        KERAS,
        _TESTS,
    ),
    Patch(
        GROUP,
        "_core.keras_private:PyDatasetAdapter",
        "__init__",
        keras_backend.init_py_dataset_adapter,
        "Keras shards the batches over processes, but a step on a mesh "
        "requires the full batch in each process.",
        KERAS,
        _TESTS,
    ),
)

PATCHES: tuple[Patch, ...] = tuple(
    entry
    for entry in _ENTRIES
    if keras_private.is_needed(entry.owner.partition(":")[2], entry.name)
)
