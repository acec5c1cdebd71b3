"""Reads files behind the URLs that fsspec knows (`s3://`, `gs://`, `https://`, ...) from front to back.

A path holds its URL and options, and nothing that is open: each use asks fsspec for the filesystem, which it caches per
process and set of options. So a path can be pickled, and keeps working in forked processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any, final

from datamat.errors import CorruptDataError, DatamatError, MissingDependencyError, OptionError, OutputError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping


__all__ = ["RemotePath", "is_url"]

_URL = re.compile(r"[A-Za-z][\w+.-]+(://|::)")  # at least two letters: one is a Windows drive
_READ_BYTES = 4 << 20
_REQUEST_BYTES = 16 << 20  # of one request, and so of memory, where files are read by ranges
_WAIT_S = 60
_HTTP = ("http", "https")
_PACKAGES = {
    "s3": "datamat[s3]",
    "s3a": "datamat[s3]",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
# Filesystems of this process. In a forked process fsspec drops the parent's; that would close their connections and so
# remove them from the epoll set that the two share: the parent would wait for answers in vain.
_KEPT: dict[int, Any] = {}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL for fsspec.

    Args:
        path: path or URL.

    Example:
        >>> is_url("s3://bucket/camvid"), is_url("out/camvid"), is_url("C:/camvid")
        (True, False, False)
    """
    return _URL.match(os.fspath(path)) is not None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or folder behind a URL; `str` returns the URL.

    Attributes:
        url: URL, `SCHEME://PLACE`; names are appended with a slash.
        options: options for fsspec, often credentials, and therefore not part of the repr.

    Raises:
        OptionError: the URL is one of fsspec's chains (`simplecache::s3://...`), to which no name can be appended.
    """

    url: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if "::" in self.url.partition("://")[0]:
            raise OptionError(
                f"{self.url} is a chain of filesystems; want the URL of the directory: cache_dir keeps the copies"
            )

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}", self.options)

    def __str__(self) -> str:
        return self.url

    def blocks(self) -> Generator[bytes, None, None]:
        """Yield the content of the file, a few megabytes at a time.

        Raises:
            MissingDependencyError: the package that reads such URLs is not installed.
            OptionError: fsspec knows no such URLs.
            OutputError: the file is missing, or cannot be read to its end; the filesystem's own error is the cause.
        """
        with _translate_errors(self.url):
            filesystem, path = self._filesystem()
            filesystem.invalidate_cache(path)  # sizes may have been listed before the file was rewritten
            # One response for a whole file: not every web server serves ranges, and fsspec assumes that it does.
            block_size = 0 if self._scheme in _HTTP else _REQUEST_BYTES
            with filesystem.open(path, "rb", block_size=block_size) as file:
                while block := file.read(_READ_BYTES):
                    yield block

    def read_bytes(self, max_bytes: int) -> bytes:
        """Return the content of a small file.

        Args:
            max_bytes: most bytes that the file may have.

        Raises:
            CorruptDataError: the file is larger.

        It also raises what `blocks` raises.
        """
        content = bytearray()
        with contextlib.closing(self.blocks()) as blocks:
            for block in blocks:
                content += block
                if len(content) > max_bytes:
                    raise CorruptDataError(
                        f"{self.url} has over {max_bytes} bytes, the most it may have; run the job again"
                    )
        return bytes(content)

    @property
    def _scheme(self) -> str:
        return self.url.partition("://")[0].lower()

    def _filesystem(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        try:
            options = _with_timeout(self.options) if self._scheme in _HTTP else self.options
            filesystem, path = url_to_fs(self.url, **options)
        except ImportError as error:
            package = _PACKAGES.get(self._scheme, f"fsspec[{self._scheme}]")
            raise MissingDependencyError(
                f"{self.url} needs a package that is not installed ({error}); install it with: pip install '{package}'"
            ) from error
        except ValueError as error:
            raise OptionError(f"{self.url}: {error}; want a URL and storage_options that fsspec takes") from error
        _KEPT[hash(filesystem)] = filesystem
        return filesystem, path


def _with_timeout(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that give up a web server after a minute of silence, however long a file takes."""
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=_WAIT_S, sock_read=_WAIT_S)
    return {**options, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}


@contextlib.contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    try:
        yield
    except DatamatError:
        raise
    except Exception as error:  # each filesystem raises what the client below it does
        raise OutputError(
            f"{url} cannot be read: {_reason(error)}; check the address, the network and storage_options, and that the "
            "run that writes there has finished"
        ) from error


def _reason(error: BaseException) -> str:
    """Return the message of an error and of its causes: fsspec reports a server that is down as a missing file."""
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return message if error.__cause__ is None else f"{message}, from {_reason(error.__cause__)}"
