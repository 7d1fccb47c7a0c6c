"""The types of what was read from JSON and is not ours to declare: a foreign ``config.json``, a user's nested cell.

What this project writes has records of its own, beside the code that makes it.
"""

from __future__ import annotations

from typing import TypeAlias, Union

#: Any value that JSON can hold.
JsonValue: TypeAlias = Union[str, int, float, bool, "list[JsonValue]", "dict[str, JsonValue]", None]

#: A mapping of JSON, with keys that nobody here chose.
JsonObject: TypeAlias = dict[str, JsonValue]
