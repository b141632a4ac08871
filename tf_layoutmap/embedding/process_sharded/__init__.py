"""The backend that runs `TPUEmbedding` with tables sharded over processes.

Start with `backend.py`, which implements the steps of `TPUEmbedding`. Then read
`step_exchange.py`, which defines the messages of a step.
"""
