"""The backend that runs `TPUEmbedding` on parameter servers.

Start with `backend.py`, which implements the steps of `TPUEmbedding`. Then read
`step_ops.py`, which calls the ops of a step, and `lookups.py`, which stores the
lookups of layers until their gradients are applied.
"""
