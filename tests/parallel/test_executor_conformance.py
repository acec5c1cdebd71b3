"""datamat's executor, and those of the standard library, pass the tests that datamat ships for executors of others."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from datamat import PathosExecutor, testing


class TestInline(testing.ExecutorConformance):
    def make_executor(self):
        return testing.InlineExecutor()


@pytest.mark.long
class TestThreads(testing.ExecutorConformance):
    def make_executor(self):
        return ThreadPoolExecutor(2)


class TestProcesses(testing.ExecutorConformance):
    def make_executor(self):
        return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))


class TestFork(testing.ExecutorConformance):
    def make_executor(self):
        return PathosExecutor(2, start_method="fork")


@pytest.mark.long
class TestForkServer(testing.ExecutorConformance):
    def make_executor(self):
        return PathosExecutor(2, start_method="forkserver")


@pytest.mark.long
class TestSpawn(testing.ExecutorConformance):
    def make_executor(self):
        return PathosExecutor(2, start_method="spawn")
