"""The place of a record in a TFRecord or tar shard, by the text file of offsets beside it."""

from __future__ import annotations

import pathlib


def first_byte(shard: str | pathlib.Path, number: int) -> int:
    """Return the position of the first byte of a record, by its number in the shard."""
    line = pathlib.Path(shard).with_suffix(".idx").read_text().splitlines()[number]
    return int(line.split()[0])
