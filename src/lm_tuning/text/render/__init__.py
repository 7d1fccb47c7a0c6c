"""What an example looks like as text, by a chat template or plain, and which characters are supervised.

Knows no token ids beyond control tokens. Entries: ``chat.ChatRenderer``, ``plain.render_plain``.
"""
