"""Carries the steps of a `TPUEmbedding` out with divided tables."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from tf_layoutmap.embedding.divided import collectives, engine
from tf_layoutmap.embedding.divided import tables as divided_tables
from tf_layoutmap.embedding.host.backend import HostBackend
from tf_layoutmap.embedding.spec import config
from tf_layoutmap.embedding.step import replicas


class DividedBackend(HostBackend):
    """A `HostBackend` whose process has a part of each table."""

    is_divided: ClassVar[bool] = True

    def __init__(
        self,
        feature_config: Any,
        spec: config.EmbeddingSpec,
        strategy_replicas: replicas.Replicas,
        *,
        partitioner: Any,
        is_pipelined: bool,
        out_of_range: str,
        rounding_seed: int,
        order: str,
    ):
        """Takes the checked arguments of `TPUEmbedding`.

        Raises:
          NotImplementedError: If updates are to wait for the next step, a
            table takes ids as they come, or a process has several devices.
          ValueError: If there is a partitioner.
        """
        if spec.has_open_tables:
            raise NotImplementedError(
                "Argument `vocabularies` must be None with over_processes="
                '"divided": keys have no owners yet. Received: '
                f"{[one.name for one in spec.tables if one.vocabulary]}."
            )
        if is_pipelined:
            raise NotImplementedError(
                "Argument `pipeline_execution_with_tensor_core` must be False "
                'with over_processes="divided". Received: True.'
            )
        if partitioner is not None:
            raise ValueError(
                "Argument `partitioner` must be None with over_processes="
                '"divided", where each process has one shard of a table. '
                f"Received: {partitioner!r}."
            )
        super().__init__(
            feature_config,
            spec,
            strategy_replicas,
            partitioner=None,
            is_pipelined=False,
            out_of_range=out_of_range,
            rounding_seed=rounding_seed,
        )
        self._order = order
        self._group = collectives.Group(strategy_replicas.strategy)
        self._tables = divided_tables.DividedTables(
            self._group, strategy_replicas.strategy
        )

    def create_tables(self) -> dict[str, dict[str, Any]]:
        """Creates the variables of this process."""
        return self._tables.create(self._spec)

    def start(self, variables: dict[str, dict[str, Any]]) -> None:
        """Creates the engine over the variables."""
        self._variables = variables
        self.engine = engine.DividedEngine(
            self._shapes.fix_spec(),
            variables,
            self._group,
            out_of_range=self._out_of_range,
            rounding_seed=self._rounding_seed,
            order=self._order,
        )

    def look_up(self, features: Any, weights: Any) -> list[tf.Tensor]:
        """Returns activations that nothing follows, one per feature."""
        self._replicas.require_current("call")
        assert isinstance(self.engine, engine.DividedEngine)
        return self._shapes.shape_all_activations(
            self.engine.look_up_only(
                self._reader.read_features(features, weights)
            )
        )

    def note_restore(self) -> None:
        """Counts a restore, which all processes must make."""
        assert isinstance(self.engine, engine.DividedEngine)
        self.engine.restores.add_one()
