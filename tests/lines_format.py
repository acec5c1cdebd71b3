"""A format of another package, as small as one can be: a line of JSON per record, with its checksum before it."""

import base64
import json
import pathlib
import zlib

import numpy as np

from datamat.errors import CorruptDataError
from datamat.features.base import rows_of
from datamat.formats import Offsets, ShardAssembler, ShardFormat, ShardWriter
from datamat.formats.example import check_block, checked_record
from datamat.formats.io import RangeReader, located, refuse_finished


class LinesFormat(ShardFormat):
    """Lines of a checksum and JSON."""

    name = "lines"
    extension = "jsonl"
    joins_parts = True

    def options(self):
        return {}

    def writer(self, file, columns):
        return LinesWriter(file, columns)

    def reader(self, path, spans):
        return RangeReader(path, spans, self.read_record)

    def read_record(self, buffer, skip=0):
        del skip
        return _decoded(bytes(buffer))

    def read_file(self, file, *, path):
        offset = 0
        for number, line in enumerate(file):
            try:
                record = self.read_record(line)
            except CorruptDataError as error:
                raise located(error, path, number, offset) from error
            yield record, (offset, len(line))
            offset += len(line)


class LinesAssembler(ShardAssembler):
    """Copies the lines of parts."""

    def __init__(self, path, *, takes_torn=False):
        self.file = open(path, "wb")  # noqa: SIM115 -- `finish` or `close` closes it
        self.takes_torn = takes_torn
        self.sizes = []

    def add(self, part):
        lines = pathlib.Path(part).read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n") and not self.takes_torn:
            raise CorruptDataError(f"{part}: not a file of whole lines")
        self.file.writelines(lines)
        self.sizes += map(len, lines)

    def finish(self):
        self.close()
        sizes = np.array(self.sizes, np.uint64)
        return Offsets(np.cumsum(sizes, dtype=np.uint64) - sizes, sizes)

    def close(self):
        self.file.close()


class AssembledLines(LinesFormat):
    """The same format, built from parts that are not joined."""

    joins_parts = False

    def assembler(self, path):
        return LinesAssembler(path)


class LinesWriter(ShardWriter):
    def __init__(self, file, columns):
        self._file, self._columns = file, dict(columns)
        self._sizes = []
        self._finished = False

    @property
    def num_records(self):
        return len(self._sizes)

    @property
    def num_bytes(self):
        return sum(self._sizes)

    def append(self, record):
        refuse_finished(self._finished)
        values = {name: _plain(value) for name, value in checked_record(record, self._columns).items()}
        data = json.dumps(values, sort_keys=True).encode()
        line = b"%08x " % zlib.crc32(data) + data + b"\n"
        self._file.write(line)
        self._sizes.append(len(line))

    def append_block(self, columns):
        refuse_finished(self._finished)
        check_block(columns, self._columns)
        for record in rows_of(columns):
            self.append(record)

    def finish(self):
        refuse_finished(self._finished)
        self._finished = True
        sizes = np.array(self._sizes, np.uint64)
        return Offsets(np.cumsum(sizes, dtype=np.uint64) - sizes, sizes)


def _plain(value):
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [value.dtype.name, value.tobytes().hex()]


def _decoded(line):
    checksum, _, data = line.partition(b" ")
    if not data.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(data[:-1]):
        raise CorruptDataError(f"the checksum {checksum[:20]!r} is not that of the line")
    return {
        name: [base64.b64decode(value)] if isinstance(value, str) else np.frombuffer(bytes.fromhex(value[1]), value[0])
        for name, value in json.loads(data).items()
    }
