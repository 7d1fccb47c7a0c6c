"""Ask a tuned model, or its base: a file of prompts, or a person at the terminal.

Promises that prompts are written in the very wording that the model was tuned on, and that work which was stopped goes
on. May import ``evaluation``, ``generation`` and what lies below. Entries: ``run.answer_prompts``, ``chat.open_chat``.
"""
