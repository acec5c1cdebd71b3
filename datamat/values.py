"""Provides `frozen`, a frozen dataclass that is cheap to define; see `datamat.parallel.frozen`."""

from datamat.parallel.frozen import frozen

__all__ = ["frozen"]
