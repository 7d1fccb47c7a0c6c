"""Keep passwords, tokens and keys out of everything that is printed or stored.

One function, `mask`, is used wherever a text leaves the process: log records, messages, tracebacks, tags and parameters
of a run, reports, lock files. What a user has to give, such as ``http://name:password@host/rows.jsonl``, is still used
as it was given: `mask_address` writes an address without its secrets for a file, and `reveal_address` finds the real
one again in the process that knows it.

A known text is found in whatever form it was written: as it is, or escaped for code, pages, addresses or a shell.
"""

from __future__ import annotations

import html
import os
import re
import threading
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any
from urllib.parse import unquote

# A letter or digit before a text makes it part of another word, unless it ends an escape, as the n of "\n" does.
_BEFORE = r"(?:(?<![A-Za-z0-9])|(?<=%[0-9A-Fa-f]{2})|(?<=\\[abfnrtv])|(?<=\\x[0-9A-Fa-f]{2})|(?<=\\u[0-9A-Fa-f]{4}))"
_AFTER = r"(?![A-Za-z0-9])"
# What the forms of a character begin with that is no letter or digit, beside the character itself.
_STARTS = "\\%&+' ↵"
# Each level of quoting doubles the backslashes before a character.
_BACKSLASHES = 8
_SHORT = {"\n": "n", "\r": "r", "\t": "t"}


def find_forms(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds these texts, escaped or not, where they stand by themselves; None without any.

    Args:
        texts: none of them empty.
    """
    longest_first = sorted(set(texts), key=len, reverse=True)
    if not longest_first:
        return None
    starts = {text[0] for text in longest_first}
    if not all(map(_is_plain, starts)):
        starts.update(_STARTS)
    first = "".join(map(re.escape, sorted(starts)))
    patterns = ("".join(_forms_of(one, len(list(run))) for one, run in groupby(text)) for text in longest_first)
    return re.compile(f"(?=[{first}]){_BEFORE}(?:{'|'.join(patterns)}){_AFTER}")


def _is_plain(character: str) -> bool:
    return character.isascii() and character.isalnum()


def _forms_of(character: str, count: int) -> str:
    """Return a pattern for a character that stands ``count`` times in a row."""
    if _is_plain(character):
        return character * count
    if character == "\\":  # as a run, since each level of quoting doubles all of it
        return rf"(?:\\{{{count},{count * _BACKSLASHES}}}|(?:%5[Cc]){{{count}}})"
    code, escape = ord(character), rf"\\{{1,{_BACKSLASHES}}}"
    units = character.encode("utf-16-be", "surrogatepass")
    forms = [
        rf"\\{{0,{_BACKSLASHES}}}{re.escape(character)}",
        "".join(f"{escape}u(?i:{units[at : at + 2].hex()})" for at in range(0, len(units), 2)),
        f"{escape}U(?i:{code:08x})",
        "".join(f"%(?i:{byte:02x})" for byte in character.encode("utf-8", "surrogatepass")),
        f"&#(?:0*{code}|[xX]0*(?i:{code:x}));",
        re.escape(html.escape(character)),
    ]
    if code < 256:
        forms.append(f"{escape}x(?i:{code:02x})")
    if character in _SHORT:
        forms.append(f"{escape}{_SHORT[character]}")
    if character == "\n":
        forms.append(r" ?↵[ \n]")  # as reports show it
    if character == " ":
        forms.append(r"\+")
    if character == "'":
        forms.append("'\"'\"'")  # as a shell quotes it
    repeated = f"{{{count}}}" if count > 1 else ""
    return f"(?:{'|'.join(forms)}){repeated}"


#: What stands in place of a secret.
MASK = "***"

# Parts of a name, between its underscores, that say that the value is secret.
_SECRET_PARTS = frozenset(
    "apikey auth authorization cookie cookies credential credentials key keys passcode passphrase passwd password "
    "pass passwords pat pw pwd sas secret secrets sig signature token jwt".split()
)
# Names with such a part whose values are no secrets; PWD is a shell's working folder.
_HARMLESS = re.compile(r"(?i)(?:^|_)(?:public_key|key_file|token_type)|_(?:file|path|dir|url|sock)$|^PWD$")
# Names of settings, such as split.key, are words in small letters; variables are written like this.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
# Words that are written together with others in names of variables, such as PGPASSWORD and MYSECRETKEY.
_JOINED = re.compile(
    r"(?:PASSWORD|PASSWD|PASSPHRASE|SSHPASS|SECRET|SECRETKEY|ENCRYPTIONKEY|APIKEY|TOKEN|ACCESSKEY|CONNECTION_STRING"
    r"|DSN)S?(?:$|_)"
)
# Whoever knows its address may use it.
_HOOK = re.compile(r"WEBHOOK(?:_URL)?$")
_NAME_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# user:password@ before a host. The second form is for passwords with signs that should have been percent-encoded.
_USER_INFO = re.compile(
    r"(?P<scheme>(?<![A-Za-z0-9+.-])[A-Za-z0-9+.-]+://)"
    r"(?:[^\s/?#'\"<>]+@|[^\s/?#'\"<>:@]+:(?!\d+(?:[/?#'\"\s]|$))(?:(?!://)[^\s'\"<>@])*@)"
)
_QUERY_VALUE = re.compile(r"(?P<start>[?&;](?P<name>[A-Za-z0-9_.\-]+)=)(?P<value>[^&;#\s'\"<>]+)")
# A value is quoted, or goes to the next space, comma or quote; a colon at its end belongs to the sentence.
_VALUE = r"(?P<value>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|(?:[^\s,'\":]|:(?=[^\s,'\"]))+)"
# NAME=value anywhere; NAME: value where YAML or a printed mapping has it, not in the middle of a sentence.
_ASSIGNMENT = re.compile(
    r"(?m)(?P<start>(?<![A-Za-z0-9_])(?P<name>[A-Z][A-Z0-9_]*)=|^[ \t]*(?P<line>[A-Z][A-Z0-9_]*):[ ]"
    r"|(?P<mark>['\"])(?P<quoted>[A-Z][A-Z0-9_]*)(?P=mark):[ ]?)" + _VALUE
)
_SETTING = re.compile(
    r"(?P<start>(?<![A-Za-z0-9_])environment\.variables\.(?P<name>[A-Za-z0-9_]+)(?: ?= ?|: ?))" + _VALUE
)
# A name in small letters that can mean nothing else, as in a mistyped parameter.
_PLAIN_NAME = re.compile(
    r"(?P<start>(?<![A-Za-z0-9_])[a-z0-9_]*"
    r"(?:password|passwd|passphrase|secret|api_?key|(?:access|auth|bearer|hub|refresh|session)_?token)=)" + _VALUE
)
_HEADER = re.compile(
    r"(?i)(?P<start>\b(?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?)(?P<kind>(?:bearer|basic|token|digest)\s+)?[^\s'\",}]+"
)
_BEARER = re.compile(r"\b(?P<kind>[Bb]earer|[Bb]asic) (?=[^\s'\"]*[0-9=])[A-Za-z0-9._~+/=\-]{8,}")
# Forms by which tokens of well-known services can be told.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_])(?:"
    r"hf_[A-Za-z0-9]{10,}|gh[pousr]_[A-Za-z0-9]{10,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[A-Za-z0-9_\-]{16,}"
    r"|sk-[A-Za-z0-9_\-]{20,}|xox[abprs]-[A-Za-z0-9\-]{10,}|A[KS]IA[0-9A-Z]{16}|AIza[A-Za-z0-9_\-]{30,}"
    r"|npm_[A-Za-z0-9]{20,}|gsk_[A-Za-z0-9]{20,}|pypi-[A-Za-z0-9_\-]{20,}|ya29\.[A-Za-z0-9_\-]{20,}"
    r"|SG\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}"
    r"|dapi[0-9a-f]{32}|eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}"
    r")(?![A-Za-z0-9_])"
)
# Shorter values are too likely to stand somewhere by chance, and so are single words in small letters.
_MIN_KNOWN_CHARACTERS = 6
_WORD = re.compile(r"[a-z]{1,11}|\d{1,7}")

_lock = threading.Lock()
_known: set[str] = set()
_known_pattern: re.Pattern[str] | None = None
_addresses: dict[str, str] = {}
_authorities: dict[str, str] = {}


def is_secret_name(name: str) -> bool:
    """Return whether the name of a variable tells that its value is secret, as in ``HF_TOKEN`` or ``dbPassword``.

    Args:
        name: of an environment variable, or of a value in the query of an address.
    """
    parts = {part.lower() for part in _NAME_PARTS.findall(name)}
    is_variable = _VARIABLE.fullmatch(name) is not None
    if is_variable and (_HOOK.search(name) or (_JOINED.search(name) and _HARMLESS.search(name) is None)):
        return True
    return not parts.isdisjoint(_SECRET_PARTS) and _HARMLESS.search(name) is None


def mask(text: str) -> str:
    """Write a text without the secrets in it.

    Masked are user and password in addresses, secret values in their queries, values that are assigned to variables
    whose name says that they are secret, authorization headers, tokens of well-known services, and every value that
    `remember` or `remember_environment` was told, escaped or not.

    Args:
        text: anything that will be printed or stored.
    """
    masked = mask_address(text)
    masked = _HEADER.sub(lambda found: f"{found['start']}{found['kind'] or ''}{MASK}", masked)
    masked = _BEARER.sub(lambda found: f"{found['kind']} {MASK}", masked)
    masked = _SETTING.sub(_mask_secret_value, masked)
    masked = _ASSIGNMENT.sub(_mask_secret_value, masked)
    masked = _PLAIN_NAME.sub(_mask_value, masked)
    masked = _TOKEN.sub(MASK, masked)
    return mask_known(masked)


def mask_known(text: str) -> str:
    """Write a text without the values that `remember` was told, and leave all else as it is.

    For reports, which show words out of rows: those that only look like a secret stay what they are.

    Args:
        text: anything that will be stored.
    """
    pattern = _known_pattern
    return text if pattern is None else pattern.sub(MASK, text)


def mask_report(value: Any) -> Any:
    """Return nested values with `mask_known` applied to every text.

    Args:
        value: mappings, lists, tuples and plain values, nested at will.
    """
    if isinstance(value, str):
        return mask_known(value)
    if isinstance(value, Mapping):
        return {key: mask_report(inner) for key, inner in value.items()}
    return [mask_report(inner) for inner in value] if isinstance(value, list | tuple) else value


def mask_values(value: Any, *, group: object = None) -> Any:
    """Return nested values with every text masked, and whole what stands under the name of a secret variable.

    Args:
        value: mappings, lists, tuples and plain values, nested at will.
        group: the key that the value stands under; below ``variables`` names count in small letters too.
    """
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {
            key: MASK if _holds_secret(group, key, inner) else mask_values(inner, group=key)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_values(inner) for inner in value]
    return value


def mask_variable(name: str, value: str) -> str:
    """Return the value of an environment variable as it may be shown.

    Args:
        name: of the variable.
        value: what it holds.
    """
    return MASK if value and is_secret_name(name) else mask(value)


def mask_address(text: str) -> str:
    """Write an address without user, password and secret values of its query; other text stays as it is.

    Args:
        text: an address, several of them in a chain, or a text with addresses in it.
    """
    if "://" not in text and "?" not in text and "&" not in text:
        return text
    masked = _USER_INFO.sub(lambda found: f"{found['scheme']}{MASK}@", text)
    return _QUERY_VALUE.sub(
        lambda found: f"{found['start']}{MASK}" if is_secret_name(found["name"]) else found.group(), masked
    )


def mask_error(error: BaseException | None) -> None:
    """Remove the secrets from the messages of an error and of all that led to it.

    Args:
        error: changed in place, so that whoever prints or stores it later has no secret to show.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.args = tuple(mask(value) if isinstance(value, str) else value for value in one.args)
        if isinstance(one, OSError):  # writes its message from these
            for name in ("strerror", "filename", "filename2"):
                if isinstance(value := getattr(one, name), str):
                    setattr(one, name, mask(value))
        waiting += [one.__cause__, one.__context__]


def conceal_address(address: str) -> str:
    """Return an address as it may be stored, and remember the real one for `reveal_address`.

    Args:
        address: what a file is read from; a local path comes back as it is.
    """
    masked = mask_address(address)
    if masked != address:
        with _lock:
            _addresses[masked] = address
            for found in _USER_INFO.finditer(address):
                host = re.match(r"[^\s/?#'\"<>:]*(?::\d+)?", address[found.end() :])
                assert host is not None, "the pattern matches the empty text"
                _authorities[f"{found['scheme']}{MASK}@{host.group()}"] = found.group() + host.group()
    return masked


def reveal_address(masked: str) -> str:
    """Return the real address of one that was stored, as far as this process has been told it.

    Args:
        masked: what `conceal_address` returned, in this process or an earlier one; or another file on the same host.
    """
    if masked in _addresses or MASK not in masked:
        return _addresses.get(masked, masked)
    for shown, real in sorted(_authorities.items(), key=lambda item: -len(item[0])):
        masked = re.sub(re.escape(shown) + r"(?![A-Za-z0-9.-])", lambda _, real=real: real, masked)  # type: ignore[misc]
    return masked


def remember(values: Iterable[str]) -> None:
    """Mask these values from now on, wherever they stand by themselves, as they are or escaped.

    Args:
        values: secrets. Very short ones and single plain words are left out, since they stand in other texts by chance;
            they are masked where an address or a variable holds them. So are paths of files, which hold the secret.
    """
    global _known_pattern  # noqa: PLW0603 - one for the process, as the values are
    with _lock:
        new = set(filter(_can_be_told_apart, values)) - _known
        if new:
            _known.update(new)
            _known_pattern = find_forms(_known)


def remember_environment() -> None:
    """Mask the values of environment variables whose names say that they are secret, and passwords in addresses."""
    remember_settings(dict(os.environ))


def remember_settings(settings: Any, *, group: object = None) -> None:
    """Mask what settings hold of secrets: under names of secret variables, and in addresses.

    Args:
        settings: parameters or variables, nested at will. Their addresses can be revealed afterwards.
        group: the key that the settings stand under.
    """
    if isinstance(settings, str):
        found: list[str] = []
        for match in _USER_INFO.finditer(settings):
            user, _, password = match.group()[len(match["scheme"]) : -1].partition(":")
            found += [password or user, unquote(password or user)]
        found += [match["value"] for match in _QUERY_VALUE.finditer(settings) if is_secret_name(match["name"])]
        if found:
            remember(found)
            conceal_address(settings)
    elif isinstance(settings, Mapping):
        remember(inner for key, inner in settings.items() if _holds_secret(group, key, inner))
        for key, inner in settings.items():
            remember_settings(inner, group=key)
    elif isinstance(settings, list | tuple):
        for inner in settings:
            remember_settings(inner)


def _holds_secret(group: object, name: object, value: object) -> bool:
    """Return whether a key names a secret variable and has text; keys in small letters are settings, as split.key."""
    if not isinstance(name, str) or not isinstance(value, str) or not value:
        return False
    return (group == "variables" or _VARIABLE.fullmatch(name) is not None) and is_secret_name(name)


def _can_be_told_apart(value: str) -> bool:
    """Return whether a secret is unlikely to stand in a text for another reason."""
    is_plain = len(value) < _MIN_KNOWN_CHARACTERS or _WORD.fullmatch(value) is not None
    return not is_plain and not (os.path.isabs(value) and os.path.exists(value))


def _mask_value(found: re.Match[str]) -> str:
    quote = found["value"][0] if found["value"][0] in "'\"" else ""
    return f"{found['start']}{quote}{MASK}{quote}"


def _mask_secret_value(found: re.Match[str]) -> str:
    name = next(found[group] for group in ("name", "line", "quoted") if found[group])
    return _mask_value(found) if is_secret_name(name) else found.group()
