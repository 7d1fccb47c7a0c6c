"""Turn rows into token ids and loss spans, and read them back."""
