"""Log records of workers, handed to the parent's own handlers.

    worker:  logger ──> ForwardingHandler ──> pack ──> the worker's own socket
    parent:  dispatcher ──> replay ──> getLogger(record.name).handle(record) ──> whatever the user configured

No queue or lock is shared between processes: a shared queue blocked the surviving workers for good in 4 of 16 kills.
A record is sent before the logging call returns, so a worker that dies right after it loses nothing. Records keep
their order per worker, their `extra` fields and exceptions, and carry `processName`, `process` and `task`.

Levels apply in the worker (a disabled record is never sent), filters and handlers in the parent, once.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

from datamat.parallel.frozen import frozen

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_PLAIN = (str, int, float, bool, type(None))
_targets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_forwarder: ForwardingHandler | None = None


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger of this name; in a worker its records reach the parent's handlers.

    It is an ordinary `logging.Logger`: every logger works in workers.

    Args:
        name: dotted name, usually `__name__`; None gives the library's own, "datamat".

    Example:
        >>> get_logger("my.project").name
        'my.project'
    """
    return logging.getLogger("datamat" if name is None else name)


class ForwardingHandler(logging.Handler):
    """Sends records to the parent instead of writing them.

    Args:
        send: takes the packed record; None drops records (a copy of the handler in the parent).
        target: key of the parent's own logger or handler that gets the record, 0 for the logger of that name.
    """

    task: tuple[Any, int] = None, 0
    process_name = "MainProcess"

    def __init__(self, send: Callable[[bytes], None] | None, target: int = 0) -> None:
        super().__init__()
        self._send = send
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record; like any handler, never raise into the code that logs."""
        if self._send is None:
            return
        try:
            self._send(_pack(record, self._target))
        except OSError:  # the parent is gone, and this process is about to end
            pass
        except Exception:  # noqa: BLE001 -- the contract of logging.Handler.emit
            self.handleError(record)


def set_task(function: Any, number: int) -> None:
    """Set the call to which the next records belong; `function` is None between calls."""
    ForwardingHandler.task = function, number


def label_of(function: Any) -> str:
    """Return the name of a callable in messages."""
    try:
        return str(function.__qualname__)
    except Exception:  # noqa: BLE001 -- a partial has none; a user's `__getattr__` may raise anything
        return type(function).__qualname__


@frozen()
class LoggingState:
    """Levels of the parent's loggers, for workers that do not inherit them.

    Attributes:
        levels: for each named logger, and "" for the root: (level, propagate, disabled).
        disable: level that `logging.disable` has set.
    """

    levels: dict[str, tuple[int, bool, bool]]
    disable: int


def capture_state() -> LoggingState:
    """Return the levels that the parent's loggers have now."""
    levels = {"": (logging.root.level, True, False)}
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            levels[name] = (logger.level, logger.propagate, logger.disabled)
    return LoggingState(levels, logging.root.manager.disable)


def forward_in_worker(send: Callable[[bytes], None], state: LoggingState, process_name: str) -> None:
    """In a worker: send all records, warnings and uncaught tracebacks through `send`."""
    ForwardingHandler.process_name = process_name
    global _forwarder  # noqa: PLW0603 -- one per worker process, used by handlers that arrive later
    _forwarder = ForwardingHandler(send)
    for name, (level, propagate, disabled) in state.levels.items():
        logger = logging.getLogger(name or None)
        logger.setLevel(level)
        logger.propagate = propagate
        logger.disabled = disabled
    logging.disable(state.disable)
    named = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [logging.root, *named]:
        for handler in list(
            logger.handlers
        ):  # it runs in the parent, as filters do: running twice would repeat records
            logger.removeHandler(handler)
        logger.filters.clear()
        if logger is logging.root or not logger.propagate:
            logger.addHandler(_forwarder)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_thread_death


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("uncaught exception in a worker", exc_info=(kind, error, trace))


def _log_thread_death(details: Any) -> None:
    if not issubclass(details.exc_type, SystemExit):
        name = details.thread.name if details.thread is not None else "a thread"
        error = (details.exc_type, details.exc_value, details.exc_traceback)
        logging.getLogger(__name__).critical("uncaught exception in %s of a worker", name, exc_info=error)


def target_key(target: logging.Logger | logging.Handler) -> int:
    """Return a key by which records and results from workers find this logger or handler object in the parent."""
    handlers = target.handlers if isinstance(target, logging.Logger) else [target]
    for handler in handlers:
        if isinstance(handler, ForwardingHandler):
            return handler._target
    if _forwarder is not None:
        return 0  # made in the worker
    _targets[id(target)] = target
    return id(target)


def remote_logger(name: str, level: int, key: int) -> logging.Logger:
    """Return a logger that forwards to the parent's with this key; in the parent, that logger itself."""
    own = _own_target(key)
    if isinstance(own, logging.Logger):
        return own
    logger = logging.Logger(name, level)
    logger.addHandler(remote_handler(logging.NOTSET, key))
    return logger


def _own_target(key: int) -> logging.Logger | logging.Handler | None:
    """Return the logger or handler if this is the process that sent it; None in any other."""
    return None if _forwarder is not None else _targets.get(key)


def remote_handler(level: int, key: int) -> logging.Handler:
    """Return a handler that forwards records to the parent's with this key; in the parent, that handler itself."""
    own = _own_target(key)
    if isinstance(own, logging.Handler):
        return own
    handler = ForwardingHandler(_forwarder._send if _forwarder is not None else None, key)
    handler.setLevel(level)
    return handler


def _pack(record: logging.LogRecord, target: int) -> bytes:
    state = dict(record.__dict__)
    function, number = ForwardingHandler.task
    state.setdefault("task", None if function is None else f"{label_of(function)}[{number}]")
    state["processName"] = ForwardingHandler.process_name
    if record.exc_info:
        state["exc_text"] = record.exc_text or logging.Formatter().formatException(record.exc_info)
        state["exc_info"] = record.exc_info[1]  # a traceback object cannot be pickled
    arguments = record.args.values() if isinstance(record.args, dict) else record.args or ()
    if not (isinstance(record.msg, str) and all(type(value) in _PLAIN for value in arguments)):
        # Formatted now: the objects may change before the parent formats them, and need not be picklable.
        state["msg"], state["args"] = record.getMessage(), None
    try:
        return pickle.dumps((target, state), 5)
    except Exception:  # noqa: BLE001 -- a user's __reduce__ may raise anything; the record must arrive
        return pickle.dumps((target, {name: _portable(value) for name, value in state.items()}), 5)


def _portable(value: Any) -> Any:
    try:
        pickle.dumps(value, 5)
    except Exception:  # noqa: BLE001 -- see _pack
        return None if isinstance(value, BaseException) else repr(value)
    return value


def replay(packed: bytes) -> str:
    """In the parent: pass a worker's record to the handlers that it would have reached here.

    Returns:
        The message, for the last lines that a death report shows.
    """
    try:
        target, state = pickle.loads(packed)  # noqa: S301 -- from our own worker, over its own socket
    except Exception as exc:  # noqa: BLE001 -- a class that only the worker could import
        logging.getLogger(__name__).warning("a log record of a worker could not be read: %s", exc)
        return ""
    record = logging.makeLogRecord(state)
    error = state.get("exc_info")
    if error is not None:
        record.exc_info = (type(error), error, None)
    receiver = (_targets.get(target) if target else None) or logging.getLogger(_own_name(record.name))
    try:
        receiver.handle(record)
        return record.getMessage()
    except Exception:  # noqa: BLE001 -- a user's handler or filter, or arguments that do not fit the message
        logging.Handler().handleError(record)
        return str(record.msg)


def _own_name(name: str) -> str | None:
    return None if name == "root" else name
