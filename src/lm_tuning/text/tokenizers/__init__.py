"""The tokenizers package."""
