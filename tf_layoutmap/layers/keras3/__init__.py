"""The layers of `tlm.layers` for Keras 3."""
