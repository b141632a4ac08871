"""Keeps the host copies and the TPU's tables equal around checkpoints."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.tpu.transfer import Transfer


class Sync:
    """Retrieves before a save and loads after a restore, once each.

    It watches all variables of an embedding (`HostCopy.watch`): whoever saves
    or restores them, by whatever class the file was written.
    """

    def __init__(self):
        self._transfer: Transfer | None = None
        self._is_stale = False
        # What a restore is about to write.
        self._expected: set[int] = set()

    def start(self, transfer: Transfer):
        """Sends the first values, and keeps up from now on."""
        self._transfer = transfer
        self.load()

    def load(self):
        """Sends the host copies to the TPU."""
        if transfer := self._usable():
            transfer.load()

    def retrieve(self):
        """Brings the host copies up to date."""
        if transfer := self._usable():
            transfer.retrieve()

    def note_walk(self):
        """A save, or a restore, begins: what is retrieved is old by now."""
        self._is_stale = True

    def note_restore(self):
        """A restore begins; another one may have failed half-way."""
        self._expected.clear()

    def before_save(self):
        """Of the variables of one save, the first to be read retrieves."""
        if self._is_stale and (transfer := self._usable()):
            self._is_stale = False
            transfer.retrieve()

    def before_restore(self, saveable: Any):
        """Notes what will be written."""
        self._expected.add(id(saveable))

    def after_restore(self, saveable: Any):
        """The last one to be written loads."""
        self._expected.discard(id(saveable))
        if not self._expected:
            self.load()

    def _usable(self) -> Transfer | None:
        # A graph that is exported restores where there is no TPU.
        if tf.executing_eagerly() or not _tf_private.in_save_context():
            return self._transfer
        return None
