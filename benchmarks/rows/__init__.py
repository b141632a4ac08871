"""What rows of tables cost the core, measured without TensorFlow."""
