"""How long a test waits for a process or a thread that should end."""

from __future__ import annotations

PATIENCE_SECONDS = 1800
"""So that a test that hangs ends some day. A machine that is busy with other work takes ten times as long as a quiet
one, and no test says anything about speed."""
