"""The step behind `fit`, `evaluate` and `predict`, for both Keras versions."""
