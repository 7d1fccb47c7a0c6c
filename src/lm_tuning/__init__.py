"""Fine-tune causal language models inside Kedro."""

__version__ = "0.2.0"
