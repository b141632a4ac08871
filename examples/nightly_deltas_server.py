"""The serving process of `nightly_deltas.py`.

    python nightly_deltas_server.py MODEL

Requires TensorFlow, NumPy and a copy of `tf_layoutmap/deltas/served` in the
folder of this file. Reads one request per line from the standard input, and
writes one answer per line. Requests and answers are JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf


def answer(served: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer to a request.

    Args:
      served: The `ServedModel`.
      request: A dict with `deltas`, the folder of deltas to apply; with
        `loaded`, the name of a module; or with `users`, `cities` and `viewed`,
        one string per view, and `candidates`, the items to recommend.
    """
    if "loaded" in request:
        return {"is_loaded": request["loaded"] in sys.modules}
    if "deltas" in request:
        start = time.monotonic()
        sequence = served.apply(request["deltas"])
        return {"sequence": sequence, "seconds": time.monotonic() - start}
    with served.lookups():
        users = served.model.user_vectors(
            tf.constant(request["users"]), tf.constant(request["cities"])
        )
        items = served.model.item_vectors(tf.constant(request["candidates"]))
    scores = users.numpy() @ items.numpy().T
    # Items without a row have the score 0 and are not recommended.
    scores[:, ~items.numpy().any(axis=1)] = -np.inf
    best = np.argsort(-scores, axis=1)[:, : request["at"]]
    recommended = np.array(request["candidates"])[best]
    is_found = recommended == np.array(request["viewed"])[:, np.newaxis]
    return {"recall": float(is_found.any(axis=1).mean())}


def main(model: str) -> None:
    """Answers requests until the standard input ends."""
    import served_deltas

    served = served_deltas.ServedModel(model)
    for line in sys.stdin:
        print(json.dumps(answer(served, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
