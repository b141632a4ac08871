"""The description of shared vocabularies in checkpoints.

If tables share a vocabulary, one table owns the vocabulary, and only this table
has the variables of the vocabulary. Checkpoints therefore contain an additional
variable, which describes the owner of the vocabulary of each other table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

# Attribute of an embedding for the variable. The variable exists only if tables
# share a vocabulary.
OWNERS = "_vocabulary_owners"


def encode_owners(owners: Mapping[str, str]) -> np.ndarray[Any, Any]:
    """Returns the value of the variable, a uint8 vector.

    >>> decode_owners(encode_owners({"wide": "deep"}))
    {'wide': 'deep'}

    Args:
      owners: Maps each table that uses the vocabulary of another table to the
        other table.
    """
    text = json.dumps(owners, sort_keys=True)
    return np.frombuffer(text.encode(), np.uint8)


def decode_owners(value: Any) -> dict[str, str]:
    """Returns the owners that `encode_owners` encoded."""
    return json.loads(np.asarray(value, np.uint8).tobytes())
