"""What a dataset asks of its tables, before it is trained on."""
