"""`fit` and `evaluate` of both Keras over parameter servers."""
