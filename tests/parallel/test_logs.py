"""Records of workers reach the parent's own handlers, as if the code had run there."""

import io
import logging
import threading
import warnings

import pytest
from fresh import METHODS

from datamat.parallel import PathosExecutor, get_logger


class Keeping(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def logger():
    """Return a logger with a handler that keeps its records."""
    logger = get_logger("datamat.test")
    handler = Keeping()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.keeping = handler
    yield logger
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def run(method, function, *args):
    with PathosExecutor(1, start_method=method) as pool:
        return pool.submit(function, *args).result(timeout=20)


def log_many(n, name="datamat.test"):
    for i in range(n):
        logging.getLogger(name).info("record %d", i)


@pytest.mark.parametrize("method", METHODS)
def test_records_arrive_in_order_and_tagged(method, logger):
    """Each has the worker's name and process, and the task; one below the level is not sent."""
    run(method, log_many, 50)

    records = logger.keeping.records[:]
    assert [record.getMessage() for record in records] == [f"record {i}" for i in range(50)]
    assert {record.processName for record in records} == {"datamat-worker-0"}
    assert all(record.task.startswith("log_many[") for record in records)
    assert records[0].args == (0,)

    logger.setLevel(logging.WARNING)
    logger.keeping.records.clear()
    run(method, log_many, 5)
    assert logger.keeping.records == []


def test_filters_and_formatters_act_in_the_parent_once(method, logger):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(user)s %(message)s"))

    def add_user(record):
        record.user = getattr(record, "user", "") + "ann"
        return "3" not in record.getMessage()

    handler.addFilter(add_user)
    logger.addHandler(handler)
    run(method, log_many, 5)
    logger.removeHandler(handler)

    assert stream.getvalue().splitlines() == [f"ann record {i}" for i in (0, 1, 2, 4)]


def log_error():
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("datamat.test").exception(
            "shape %s", (3, 4), extra={"sample": "a/1", "odd": threading.Lock()}
        )


def test_extra_fields_and_exceptions_arrive(method, logger):
    """A value that cannot be pickled arrives as its text; an exception both as an object and as text."""
    run(method, log_error)

    (record,) = logger.keeping.records
    assert record.sample == "a/1"
    assert "lock" in record.odd
    assert record.getMessage() == "shape (3, 4)"
    assert isinstance(record.exc_info[1], KeyError)
    assert 'raise KeyError("lost")' in logging.Formatter().format(record)


def test_logger_that_does_not_propagate_is_heard(method, logger):
    """Its records never reach the root logger."""
    logger.propagate = False

    run(method, log_many, 2)

    assert len(logger.keeping.records) == 2


def warn_and_fail_in_thread():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("deprecated thing", DeprecationWarning, stacklevel=1)
    thread = threading.Thread(target=[].pop)
    thread.start()
    thread.join()


def test_warnings_and_uncaught_exceptions_of_threads_arrive(method, caplog):
    """Otherwise only the worker's stderr would show them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        run(method, warn_and_fail_in_thread)

    assert any("deprecated thing" in message for message in caplog.messages)
    assert any(record.exc_info and record.exc_info[0] is IndexError for record in caplog.records)


def log_from_threads(n):
    threads = [threading.Thread(target=log_many, args=(n,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_of_a_worker_may_log_at_once(method, logger):
    """Their frames share a socket and must not mix."""
    run(method, log_from_threads, 200)

    assert len(logger.keeping.records) == 800


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_records_from_many_workers_all_arrive(request, logger):
    """None is lost, each worker's are in order, and nothing deadlocks."""
    each = 5_000 if request.config.getoption("--commit") else 100_000
    counts = {}
    last = {}

    def count(record):
        expected = last.get(record.process, -1) + 1
        assert record.args[0] == expected
        last[record.process] = -1 if expected == each - 1 else expected
        counts[record.process] = counts.get(record.process, 0) + 1

    logger.propagate = False
    logger.keeping.emit = count
    with PathosExecutor(8) as pool:
        futures = [pool.submit(log_many, each) for _ in range(8)]
        for future in futures:
            future.result(timeout=280)

    assert sum(counts.values()) == 8 * each


class Model:
    """Holds loggers and handlers in many ways, and returns itself."""

    def __init__(self):
        self.seen = Kept()
        self.detached = logging.Logger("detached")
        self.detached.addHandler(self.seen)
        self.named = logging.getLogger("model.named")
        self.adapter = logging.LoggerAdapter(self.detached, {"step": 1})
        self.held = {"handlers": [self.seen]}

    def fit(self):
        self.detached.info("in the worker")
        self.seen.handle(logging.makeLogRecord({"msg": "in the worker"}))
        self.weight = 7
        return self


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("method", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.long)])
def test_result_has_the_loggers_and_handlers_of_the_caller(method):
    """What it logs from then on is not lost."""
    model = Model()
    with PathosExecutor(1, start_method=method) as pool:
        first = pool.submit(model.fit).result()  # a forked worker has inherited this one
        (fitted,) = pool.map(Model.fit, [model])
        again = pool.submit(model.fit).result()

    for back in (first, fitted, again):
        assert back.weight == 7
        assert back.detached is back.adapter.logger is model.detached
        assert back.named is model.named
        assert back.seen is back.held["handlers"][0] is model.seen
        back.adapter.info("afterwards")
    assert model.seen.texts == ["in the worker"] * 6 + ["afterwards"] * 3


def make_logger():
    logger = logging.Logger("made")
    logger.addHandler(logging.NullHandler())
    return logger, logging.NullHandler()


def test_logger_of_a_worker_is_mistaken_for_none_of_the_caller(method):
    held = [Kept() for _ in range(1000)]
    with PathosExecutor(1, start_method=method) as pool:
        assert pool.submit(len, held).result() == 1000
        for logger, handler in pool.map(lambda _: make_logger(), range(50)):
            assert logger.name == "made"
            assert handler not in held
