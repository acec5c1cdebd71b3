"""Give workers the state of the user's modules in the program that called `run`, or refuse to start them.

A worker that was not forked from that program imports the user's modules itself, and misses what the program has set
since (`cfg.size = 512`, the usual result of argparse). So a job that is sent to it carries what its code reads from
modules: a digest of each value, and the values that can be sent.

    caller   ModuleState.of(records) ── travels with the job ──> worker   settle(records)
             examines writer and transform,                               examines both: equal, nothing to do
             pickles what they read                                       else sets what differs, and again
                                                                          still different: FingerprintError

Workers forked from the program have all of its state, and compare nothing.
"""

from __future__ import annotations

import contextlib
import sys
import types
import uuid
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from datamat.errors import FingerprintError, OptionError, UnpicklableError
from datamat.fingerprint import (
    Memo,
    assume_versions,
    clear_caches,
    examine,
    is_filled,
    known_versions,
    read_memos,
    set_memo,
)
from datamat.parallel import get_logger
from datamat.parallel.byvalue import is_by_value
from datamat.parallel.pickling import PLAIN, dumps_code, load_code
from datamat.plan.digests import as_drawn, as_written
from datamat.values import frozen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from datamat.fingerprint import ModuleValue
    from datamat.fingerprint.code import Home, Origin
    from datamat.plan.pipeline import RecordSource

_LARGEST = 256 << 20  # largest value that is sent; larger ones belong on the writer
_MOST_NAMED = 3
_Place = TypeVar("_Place")
_Sent: TypeAlias = "tuple[tuple[_Place, ...], bytes, tuple[bytes, ...]]"
"""Places of one object, its pickle, and the pickle's buffers."""

_settled: set[str] = set()  # in a worker: tokens of the states already compared


@frozen()
class ModuleState:
    """The state of the user's modules that code reads, in the program that called `run`.

    Attributes:
        token: unique name of the state.
        expected: path (`writer.read -> cfg.size`) and digest of each value that is read, by the place to set it.
        packages: versions of the installed packages that the code uses, by name.
        versions: known versions of installed modules; empty if the worker must find them itself.
        values: pickles of the values that are read, each with its places.
        memos: the same for memos; these are set to the caller's without comparison.
        caches: the function caches among these, including empty ones.
        unsent: names of filled memos that cannot be sent.
    """

    token: str
    expected: Mapping[Home, tuple[str, bytes]]
    packages: Mapping[str, str]
    versions: Mapping[str, Origin]
    values: tuple[_Sent[Home], ...]
    memos: tuple[_Sent[Memo], ...]
    caches: tuple[Home, ...]
    unsent: tuple[str, ...]

    @classmethod
    def of(cls, records: RecordSource, *, is_own_pool: bool) -> ModuleState | None:
        """Return the state that a writer and a transform read in this process; None if it cannot be determined.

        Args:
            records: record source of the job, with its writer and transform.
            is_own_pool: whether the job goes to datamat's own workers, on this machine and installation.
        """
        try:
            places, packages, memo_places = _examined(records)
        except FingerprintError:  # `run` has refused it, unless the user has given a version
            return None
        # Code of other modules travels with what it uses of them.
        places = {home: place for home, place in places.items() if not is_by_value(home[0])}
        sent = {home: place.value for home, place in places.items() if _is_worth_sending(home, place)}
        values, _ = _pickled(sent)
        memos, caches, unsent = _sent_memos(memo_places)
        return cls(
            token=uuid.uuid4().hex,
            expected={home: (place.path, place.digest) for home, place in places.items()},
            packages=packages,
            versions=known_versions() if is_own_pool else {},
            values=tuple(values),
            memos=memos,
            caches=caches,
            unsent=unsent,
        )

    @property
    def remark(self) -> str:
        """A remark for the user on memos that workers lack; "" for none."""
        if not self.unsent:
            return ""
        more = f" and {len(self.unsent) - _MOST_NAMED} more" if len(self.unsent) > _MOST_NAMED else ""
        return (
            f"{', '.join(self.unsent[:_MOST_NAMED])}{more}: filled in this program, and cannot be sent to workers, "
            "which fill it anew; if records depend on what the program has put there, pass that as an attribute of the "
            "writer, or use start_method='fork'"
        )

    def settle(self, records: RecordSource) -> None:
        """In a worker, before its first part: set the module values that differ here.

        Args:
            records: the copy here of the argument of `of`.

        Raises:
            FingerprintError: a value differs and cannot be set; names it.
        """
        if self.token in _settled:
            return
        assume_versions(self.versions)
        main = main_namespaces(records)
        self._set_memos(main)
        cause = None
        differing, packages = self._differing(records)
        if differing:
            cause = self._set(differing, main)
            differing, packages = self._differing(records)
        if differing:
            raise _refusal([self.expected[home][0] for home in differing]) from cause
        wrong = sorted(name for name in {*packages, *self.packages} if packages.get(name) != self.packages.get(name))
        if wrong:
            versions = ", ".join(f"{name} {packages.get(name)}, there {self.packages.get(name)}" for name in wrong)
            raise FingerprintError(
                f"this worker has other packages than the program that called run: here {versions}; install the same "
                "ones, or the shards would mix records of both"
            )
        _settled.add(self.token)

    def _set_memos(self, main: list[dict[str, Any]]) -> None:
        """Fill memos with the caller's content, as far as it was sent."""
        clear_caches(self.caches, main)
        for memos, stream, buffers in self.memos:
            try:
                values = load_code(stream, [bytearray(buffer) for buffer in buffers])
                for memo in memos:
                    set_memo(memo, values[memo], main)
            except Exception as error:  # noqa: BLE001 -- a user's __setstate__ may raise anything
                get_logger("datamat").warning(
                    "%s cannot be set in a worker (%s: %s), which fills it again", memos[0], type(error).__name__, error
                )

    def _differing(self, records: RecordSource) -> tuple[list[Home], Mapping[str, str]]:
        places, packages, _ = _examined(records)
        wrong = [
            home for home, (_, digest) in self.expected.items() if home not in places or places[home].digest != digest
        ]
        return wrong, packages

    def _set(self, differing: list[Home], main: list[dict[str, Any]]) -> Exception | None:
        """Set the values that differ, as far as they were sent.

        Args:
            differing: modules and names whose values differ here.
            main: namespaces of the main program.

        Returns:
            What went wrong, if anything.
        """
        cause = None
        for homes, stream, buffers in self.values:
            if set(homes) & set(differing):
                try:
                    values = load_code(stream, [bytearray(buffer) for buffer in buffers])
                except Exception as error:  # noqa: BLE001 -- a user's __setstate__ may raise anything; see `_refusal`
                    cause = error
                    continue
                for home in {*homes} & {*differing}:
                    with contextlib.suppress(AttributeError, TypeError):  # the following comparison shows it
                        set_memo(Memo(home), values[home], main)
        return cause


def _transform(records: RecordSource) -> Any:
    return None if records.pipeline is None else records.pipeline.augmenter.transform


def _examined(records: RecordSource) -> tuple[dict[Home, ModuleValue], dict[str, str], set[Home]]:
    foreign: dict[str, type] = {}
    with contextlib.suppress(OptionError):  # unknown features will be inferred, so that none is the user's
        foreign = {name: type(feature) for name, feature in records.features.foreign.items()}
    found = [
        examine(as_written(records.writer), where=getattr(records.writer, "_datamat_name", "writer")),
        examine(as_drawn(_transform(records)), where="transform"),
        examine(foreign, where="writer.features"),
    ]
    places = {home: place for each in reversed(found) for home, place in each.module_values.items()}
    packages = {name: version for each in found for name, version in each.packages.items()}
    return places, packages, {home for each in found for home in each.memos}


def _is_worth_sending(home: Home, place: ModuleValue) -> bool:
    """Return True if a value may differ in a worker: objects pickled by name are the worker's own."""
    _, path = home
    value = place.value
    if isinstance(value, types.ModuleType):
        return path.rpartition(".")[2] != value.__name__.rpartition(".")[2]
    is_code = isinstance(value, (type, types.FunctionType))
    return not (is_code and (value.__module__, value.__qualname__) == home)


def _sent_memos(places: Iterable[Home]) -> tuple[tuple[_Sent[Memo], ...], tuple[Home, ...], tuple[str, ...]]:
    """Return pickles of the memos' contents, which of them are caches, and the names of those that cannot be sent."""
    memos, untold = read_memos(places)
    # Globals of by-value code travel with it.
    values = {
        memo: value for memo, value in memos.items() if memo.home[1].endswith("()") or not is_by_value(memo.home[0])
    }
    sent, unsent = _pickled(values, allow_standins=False)
    names = [str(memo) for memo in unsent if is_filled(memo, values[memo])]
    names += [str(Memo(place)).removesuffix("()") for place in untold]
    caches = [place for place in places if place[1].endswith("()") and place not in untold]
    return tuple(sent), tuple(caches), tuple(sorted(names))


def _pickled(values: dict[_Place, Any], *, allow_standins: bool = True) -> tuple[list[_Sent[_Place]], list[_Place]]:
    """Return pickles of the values that can be sent: one per object, so that failures are independent.

    Args:
        values: values by place.
        allow_standins: whether to send values that contain objects replaced by stand-ins.

    Returns:
        The pickles, and the places of the values that cannot be sent.
    """
    groups: dict[int, dict[_Place, Any]] = {}
    for place, value in values.items():
        groups.setdefault(0 if type(value) in PLAIN else id(value), {})[place] = value
    found: list[_Sent[_Place]] = []
    left: list[_Place] = []
    for group in groups.values():
        try:
            pickled = dumps_code(group)
        except UnpicklableError:
            left += group
            continue
        buffers = [buffer.raw() for buffer in pickled.buffers]
        num_bytes = len(pickled.stream) + sum(buffer.nbytes for buffer in buffers)
        if num_bytes <= _LARGEST and (allow_standins or not pickled.standins):
            found.append((tuple(group), pickled.stream, tuple(map(bytes, buffers))))
        else:
            left += group
    return found, left


def main_namespaces(records: RecordSource) -> list[dict[str, Any]]:
    """Return the namespaces of the main program: it has a second one if multiprocessing ran it again."""
    writer, transform = records.writer, _transform(records)
    found = [vars(sys.modules["__main__"])]
    classes = [base for each in (writer, transform) for base in type(each).__mro__]
    for value in [
        transform,
        *(part for base in classes for part in vars(base).values()),
        *getattr(writer, "__dict__", {}).values(),
    ]:
        held = getattr(value, "__globals__", None)
        if isinstance(held, dict) and held.get("__name__") == "__mp_main__" and not any(held is one for one in found):
            found.append(held)
    return found


def _refusal(paths: list[str]) -> FingerprintError:
    """Return the error that names the differences; of paths that extend one another, only the longest."""
    ends = [path for path in paths if not any(other.startswith(path) and other != path for other in paths)]
    more = f" and {len(ends) - _MOST_NAMED} more" if len(ends) > _MOST_NAMED else ""
    return FingerprintError(
        f"{', '.join(ends[:_MOST_NAMED])}{more}: not the same in this worker as in the program that called run, and "
        "cannot be set here. It was changed after its module was imported, or the file of the module was; import "
        "the module again (restart the notebook's kernel), or pass the value as an attribute of the writer"
    )
