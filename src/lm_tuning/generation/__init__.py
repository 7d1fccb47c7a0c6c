"""Answer prompts with a model, in padded batches.

Promises an answer to every prompt, in the order of the prompts. May import ``batching`` and what lies below. Entry:
``generate.generate_answers``.
"""
