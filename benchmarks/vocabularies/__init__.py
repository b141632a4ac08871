"""What open vocabularies cost and gain, compared with other ways."""
