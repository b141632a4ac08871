"""What is read, and what the model sees of it."""
