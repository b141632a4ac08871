"""The backend that runs `TPUEmbedding` on the host engine of this package.

Start with `backend.py`, which implements the steps of `TPUEmbedding`. Then read
`engine.py`, which calls the ops of the engine.
"""
