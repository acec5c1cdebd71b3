"""URLs of files and folders: recognising them, hiding their secrets, and restricting those in foreign tables.

A URL may contain a password or a signature, and options contain keys. None of these may appear in a message.
"""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import TYPE_CHECKING, Any

from datamat.errors import InputError, OptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WEB_SCHEMES = ("http", "https")
READ_ONLY = frozenset({*WEB_SCHEMES, "github", "zip", "tar", "data", "reference", "git"})
_OF_TABLES = (*WEB_SCHEMES, "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf", "data")
_URL = re.compile(r"[A-Za-z][\w+.-]+(://|::)|(?i:data):[\w/+.-]*[;,]")  # one letter is a Windows drive


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a URL for fsspec.

    Example:
        >>> is_url("s3://bucket/camvid"), is_url("out/camvid"), is_url("C:/camvid")
        (True, False, False)
    """
    return _URL.match(os.fspath(path)) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL in small letters."""
    return url.partition("://")[0].lower()


def refuse_chain(url: str) -> None:
    """Raise `OptionError` for a chain of filesystems (`simplecache::s3://...`), which has no names below it."""
    if "::" in url.partition("://")[0]:
        raise OptionError(f"{without_secrets(url)} is a chain of filesystems; want the URL of the folder itself")


def refuse_braces(place: str) -> None:
    """Raise `OptionError` for a brace pattern, as in webdataset: `shard-{000..009}.tar`."""
    if _BRACES.search(place) and not os.path.lexists(place):
        raise OptionError(
            f"{without_secrets(place)} is a pattern of braces, which nothing here expands; give the folder, or, as a "
            f"source, a wildcard: {_BRACES.sub('*', without_secrets(place))}"
        )


_BRACES = re.compile(r"\{\w+\.\.\w+\}")


def url_of_table(url: str) -> str:
    """Return a URL from a foreign table, with its scheme in lower case.

    A chain of filesystems, or another scheme, could read files of this machine for the author of the table.

    Raises:
        InputError: the URL is not allowed in a table.
    """
    if is_inline(url):
        return f"data:{url[5:]}"
    scheme = scheme_of(url)
    if "::" in url:
        raise InputError("holds '::', by which fsspec chains filesystems; write %3A%3A if it is part of the address")
    if scheme not in _OF_TABLES:
        raise InputError(
            f"is of the scheme {scheme!r}, which tables of URLs must not use; want {', '.join(_OF_TABLES)}"
        )
    return scheme + url[len(scheme) :]


def options_for(url: str, options: Mapping[str, Any], trusted: str | None = None) -> dict[str, Any]:
    """Return the options for a URL; they may be given by place: `{"s3": {...}, "https://data.example": {...}}`.

    Args:
        url: URL, `SCHEME://PLACE`.
        options: fsspec options, or such options by scheme or by URL prefix: the longest match counts.
        trusted: a URL from the user, if this one comes from a foreign table. Possible secrets are then sent only to
            named web servers: the host of that URL, or one in the options. None trusts all.
    """
    from fsspec import available_protocols

    by_place = bool(options) and all("://" in key or key in available_protocols() for key in options)
    if by_place:
        fitting = [key for key in options if "://" in key and _begins_with(url, key)]
        if fitting:
            return dict(options[max(fitting, key=len)])
    scheme = scheme_of(url)
    found = dict(options.get(scheme, {}) if by_place else options)
    if scheme not in WEB_SCHEMES or trusted is None or _origin_of(url) == _origin_of(trusted):
        return found
    headers = {name: value for name, value in found.get("headers", {}).items() if name.lower() in SENT_ANYWHERE}
    client = {name: value for name, value in found.get("client_kwargs", {}).items() if name == "timeout"}
    return {name: value for name, value in (("headers", headers), ("client_kwargs", client)) if value}


def _origin_of(url: str) -> str:
    """Return scheme, host and port of a URL, in lower case and without a password."""
    scheme, _, rest = url.lower().partition("://")
    return f"{scheme}://{re.split('[/?#]', rest, maxsplit=1)[0].rpartition('@')[2]}"


def _begins_with(url: str, place: str) -> bool:
    """Return True if a URL is at or below a place; `https://a.example` does not include `https://a.example.org`."""
    below = place.partition("://")[2].partition("/")[2].rstrip("/")
    path = url.partition("://")[2].partition("/")[2]
    return _origin_of(url) == _origin_of(place) and f"{path}/".startswith(f"{below}/" if below else "")


SENT_ANYWHERE = frozenset({"accept", "accept-encoding", "range", "user-agent"})
"""Headers that every web server may see, and that redirects to another server keep."""

# ---------------------------------------------------------------- secrets
#

_LEAST_SECRET = 4  # characters; shorter texts occur in every message
_SECRET_VARIABLE = re.compile(
    r"AWS_(SECRET_ACCESS_KEY|SESSION_TOKEN|ACCESS_KEY_ID)|AZURE_STORAGE_\w+|GOOGLE_(API_KEY|BEARER_TOKEN|SERVICE_ACCOUNT_KEY)"
)


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query, so that it may be shown.

    Example:
        >>> without_secrets("https://me:word@host/set?sig=abcd&v=2")
        'https://host/set?...'
    """
    if is_inline(url):
        return f"{url.partition(',')[0]},..."
    head, query = halves(url)
    scheme, mark, rest = head.partition("://")
    place, slash, path = rest.partition("/")
    return f"{scheme}{mark}{place.rpartition('@')[2]}{slash}{path}{'?...' if query else ''}" if mark else url


_SIGNS = re.compile(
    r"(?i)x-(amz|goog|oss|cos|obs|bz)-.*|awsaccesskeyid|googleaccessid|ossaccesskeyid|signature|sig|expires|policy|"
    r"key-pair-id|.*token|auth|authorization|api_?key|key|secret|password|hdnea|hdnts"
)
_SIGNS_AZURE = frozenset({"st", "se", "sp", "sv", "sr", "spr", "skoid", "sktid", "skt", "ske", "sks", "skv"})


def lasting(url: str) -> str:
    """Return the part of a URL that stays when it is signed anew: without user, password and signature.

    Example:
        >>> lasting("https://host/get?id=7&X-Amz-Expires=600&X-Amz-Signature=abcd")
        'https://host/get?id=7'
    """
    head, query = halves(url)
    if is_inline(url) or (not query and "@" not in head):
        return url
    parts = query.split("&") if query else []
    names = [urllib.parse.unquote(part.partition("=")[0]) for part in parts]
    signs = _SIGNS_AZURE if "sig" in names else frozenset()
    kept = [part for part, name in zip(parts, names, strict=True) if name not in signs and not _SIGNS.fullmatch(name)]
    return f"{without_secrets(head)}{'?' if kept else ''}{'&'.join(kept)}"


_PLACE_VARIABLE = re.compile(
    r"AWS_ENDPOINT_URL\w*|STORAGE_EMULATOR_HOST|AZURE_STORAGE_(ACCOUNT_NAME|CONNECTION_STRING)"
)


def place_of(url: str, options: Mapping[str, Any]) -> str:
    """Return a text that identifies a URL in its store, independent of signatures; it may contain secrets."""
    said = {
        *_places_in(options),
        *(f"{name}={value}" for name, value in os.environ.items() if _PLACE_VARIABLE.fullmatch(name)),
    }
    return "\n".join([lasting(url), *sorted(said)])


def _places_in(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, dict):
            yield from _places_in(value)
        elif name in _SHOWN or name in _ALSO_PLACES:
            yield f"{name}={value}"


_QUERY = re.compile(r"(https?://[^\s?'\"<>]+)\?[^\s'\"<>]+")


def redacted(text: str, url: str, options: Mapping[str, Any]) -> str:
    """Return a text without the secrets of a URL, its options and the environment, and without queries of other URLs.

    Args:
        text: message of another library, which may quote them.
        url: URL of the message.
        options: options for fsspec.

    Example:
        >>> redacted("key AKIA123 is not known", "s3://bucket/set", {"key": "AKIA123"})
        'key ... is not known'
    """
    for secret in sorted(_secrets(url, options), key=len, reverse=True):
        text = text.replace(secret, "...")
    return _QUERY.sub(r"\1?...", text)


def is_inline(url: str) -> bool:
    """Return True if a URL contains the file: `data:image/png;base64,...`."""
    return url[:5].lower() == "data:"


def halves(url: str) -> tuple[str, str]:
    """Split a URL into the URL without its query, and the query; only web servers have one: S3 keys may contain `?`."""
    if scheme_of(url) not in WEB_SCHEMES:
        return url, ""
    head, _, query = url.partition("?")
    return head, query


def _secrets(url: str, options: Mapping[str, Any]) -> set[str]:
    head, query = halves(url)
    user, at, _ = head.partition("://")[2].partition("/")[0].rpartition("@")
    found = {value for _, value in urllib.parse.parse_qsl(query)} | {query, *query.split("&")}
    found |= {one.partition("=")[2] for one in query.split("&")}
    found |= {user, *user.split(":")} if at else set()
    found |= set(_texts_in(dict(options)))
    found |= {one for name, value in os.environ.items() if _SECRET_VARIABLE.fullmatch(name) for one in _texts_in(value)}
    found |= {urllib.parse.quote(one, safe="") for one in found} | {urllib.parse.unquote(one) for one in found}
    return {one for one in found if len(one) >= _LEAST_SECRET}


_SECRET_PART = re.compile(r"(?i)(?:key|secret|password|token|signature|\bsig)=([^;&]+)")  # part of a connection string
_SHOWN = frozenset(
    {"endpoint_url", "endpoint", "base_url", "region_name", "region", "protocol", "account_name", "project"}
)
"""Options that locate something, and are not secrets."""
_ALSO_PLACES = frozenset({"connection_string", "host", "port"})


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode(errors="replace")
        yield text
        yield from _SECRET_PART.findall(text)
    elif isinstance(value, dict):
        for name, one in value.items():
            if name not in _SHOWN:
                yield from _texts_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts_in(one)
