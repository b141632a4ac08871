"""TensorFlow's table and optimizer configs, read into frozen specs."""
