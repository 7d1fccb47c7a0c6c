"""Answer prompts with a model, in padded batches.

May import ``batching`` and what lies below. Entry: ``generate.generate_answers``.
"""
