"""What the layers are in both versions of Keras."""
