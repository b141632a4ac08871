"""The backend that runs `TPUEmbedding` with tables sharded over processes.

Start with `backend.py`, which implements the steps of `TPUEmbedding`, and
`step_exchange.py`, which contains the messages of a step.
"""
