"""What all distributions have in common, as keras.distribution has it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap import _keras_private
from tf_layoutmap.distribution import state
from tf_layoutmap.layout.mesh.device_mesh import AnyMesh, check_mesh

dtensor = tf.experimental.dtensor


class Distribution(_keras_private.Distribution):
    """A mesh, and what is placed on it: the base of both distributions.

    It places nothing itself.

    ```python
    distribution = tlm.distribution.Distribution(device_mesh)
    with distribution.scope():
        assert tlm.distribution.distribution() is distribution
    ```
    """

    def __init__(
        self,
        device_mesh: AnyMesh,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
    ):
        """Makes the distribution.

        Args:
          device_mesh: `DeviceMesh`, ours or Keras', or `dtensor.Mesh`.
          batch_dim_name: Mesh axis along which batches are cut.
          auto_shard_dataset: True: with several processes, each is fed whole
            batches and takes its part of them.

        Raises:
          TypeError: `device_mesh` is no mesh.
          ValueError: Several processes are to be fed parts of batches.
        """
        check_mesh("device_mesh", device_mesh)
        self._check_feeding(auto_shard_dataset)
        _keras_private.Distribution.__init__(
            self, device_mesh, batch_dim_name, bool(auto_shard_dataset)
        )
        self._num_processes = dtensor.num_clients()
        self._process_id = dtensor.client_id()
        self._is_multi_process = self._num_processes > 1

    @staticmethod
    def _check_feeding(auto_shard_dataset: bool) -> None:
        if not auto_shard_dataset and dtensor.num_clients() > 1:
            raise ValueError(
                "Argument `auto_shard_dataset` must be True with several "
                "processes: each is fed whole batches and takes its part. "
                f"Received: False, in one of {dtensor.num_clients()}."
            )

    @property
    def device_mesh(self) -> Any:
        """The mesh, as given."""
        return self._device_mesh

    @property
    def batch_dim_name(self) -> str | None:
        """The mesh axis along which batches are cut."""
        return self._batch_dim_name

    @property
    def auto_shard_dataset(self) -> bool:
        """As given; see `__init__`."""
        return self._auto_shard_dataset

    @auto_shard_dataset.setter
    def auto_shard_dataset(self, value: bool) -> None:
        self._check_feeding(value)
        self._auto_shard_dataset = bool(value)

    @property
    def num_processes(self) -> int:
        """Processes of this program."""
        return self._num_processes

    @property
    def num_model_replicas(self) -> int:
        """Parts into which a batch is cut."""
        raise NotImplementedError

    def get_data_layout(self, data_shape: Sequence[int]) -> Any:
        """Returns the layout of a batch of this shape."""
        raise NotImplementedError

    def get_variable_layout(self, variable: Any) -> Any:
        """Returns the layout of a variable, or the one it would get here."""
        raise NotImplementedError

    def get_tensor_layout(self, path: str) -> Any:
        """Returns what the layout map has for a name, or None."""
        raise NotImplementedError

    def distribute_dataset(self, dataset: Any) -> Any:
        """Returns `dataset`: processes take their part of each batch."""
        return dataset

    def context(self) -> Any:
        """Returns what new models belong to, for `set_distribution`.

        Raises:
          TypeError: A class of the program's own says where variables go.
        """
        if type(self).get_variable_layout is not (
            Distribution.get_variable_layout
        ):
            raise TypeError(
                "A Distribution with layouts of its own must be a "
                "ModelParallel: layouts are read from its layout map. "
                f"Received: {type(self).__name__}."
            )

    def _place_new_models(self) -> contextlib.AbstractContextManager:
        """Returns the scope that places what is made in it."""
        self.context()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def scope(self) -> Iterator[Any]:
        """The scope under which models are made."""
        before = state.noted()
        with self._place_new_models() as layout_map:
            state.note(self)
            try:
                yield layout_map
            finally:
                state.note(before)
