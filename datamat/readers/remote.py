"""Files behind the URLs that fsspec knows (`s3://`, `gs://`, `https://`, ...), read from front to back.

A path keeps its URL and options, nothing that is open: fsspec is asked for the filesystem at each use, and keeps one
for each process and set of options. So what holds a path can be pickled, and goes on in forked processes.
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

_URL = re.compile(r"[A-Za-z][\w+.-]+(://|::)")  # two letters at least: one is a drive of Windows
_READ_BYTES = 4 << 20
_REQUEST_BYTES = 16 << 20  # of one request, and of memory, where files are read by ranges
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
# Filesystems of this process. fsspec drops those of the parent in a forked process; that would close their connections,
# and so take them out of the epoll set that the parent shares: it would wait for answers on them in vain.
_KEPT: dict[int, Any] = {}


def is_url(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path is a URL for fsspec.

    Example:
        >>> is_url("s3://bucket/camvid"), is_url("out/camvid"), is_url("C:/camvid")
        (True, False, False)
    """
    return _URL.match(os.fspath(path)) is not None


@final
@dataclasses.dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or folder behind a URL; `str` is the URL.

    Attributes:
        url: SCHEME://PLACE; names are put behind it with a slash.
        options: what fsspec is given for it: credentials, most often, and therefore not shown.

    Raises:
        OptionError: the URL is one of fsspec's chains (`simplecache::s3://...`), which nothing can be put behind.
    """

    url: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if "::" in self.url.partition("://")[0]:
            raise OptionError(
                f"{self.url} is a chain of filesystems; want the URL of the directory alone: cache_dir keeps the copies"
            )

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}", self.options)

    def __str__(self) -> str:
        return self.url

    def blocks(self) -> Generator[bytes, None, None]:
        """Yield the content of the file, a few megabytes at a time.

        Raises:
            MissingDependencyError: the package for such URLs is not installed.
            OptionError: there are no such URLs.
            OutputError: the file is not there, or cannot be read to its end; what the filesystem raised is the cause.
        """
        with _errors_told(self.url):
            filesystem, path = self._filesystem()
            filesystem.invalidate_cache(path)  # of sizes that someone listed before the file was written anew
            # One answer for a whole file: not every web server gives ranges, and fsspec takes it for granted.
            block_size = 0 if self._scheme in _HTTP else _REQUEST_BYTES
            with filesystem.open(path, "rb", block_size=block_size) as file:
                while block := file.read(_READ_BYTES):
                    yield block

    def read(self, max_bytes: int) -> bytes:
        """Return the content of a small file.

        Raises:
            CorruptDataError: it has more than `max_bytes`.

        Raises what `blocks` does, too.
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
    """Have a web server given up that is silent for a minute, not one that takes five for a large file."""
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=_WAIT_S, sock_read=_WAIT_S)
    return {**options, "client_kwargs": {"timeout": timeout, **options.get("client_kwargs", {})}}


@contextlib.contextmanager
def _errors_told(url: str) -> Iterator[None]:
    try:
        yield
    except DatamatError:
        raise
    except Exception as error:  # each filesystem raises what the client below it does
        raise OutputError(
            f"{url} cannot be read: {_reason(error)}; check the address, the network and storage_options, and that the "
            "run that writes there is finished"
        ) from error


def _reason(error: BaseException) -> str:
    """Return what an error says, and what caused it: fsspec calls a server that is down a file that is not there."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return told if error.__cause__ is None else f"{told}, from {_reason(error.__cause__)}"
