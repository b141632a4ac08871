"""Other libraries, measured in processes of their own."""
