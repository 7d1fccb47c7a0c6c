"""Fine-tune causal language models inside Kedro."""

__version__ = "0.1.0"
