"""Find, convert, describe and load language models."""
