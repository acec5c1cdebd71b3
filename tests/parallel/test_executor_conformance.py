"""datamat's executor, and those of the standard library, pass the tests that datamat ships for executors of others."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

from datamat import PathosExecutor, testing


class TestInline(testing.ExecutorConformance):
    def make_executor(self):
        return testing.InlineExecutor()


class TestThreads(testing.ExecutorConformance):
    def make_executor(self):
        return ThreadPoolExecutor(2)


class TestProcesses(testing.ExecutorConformance):
    def make_executor(self):
        return ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))


class TestFork(testing.ExecutorConformance):
    def make_executor(self):
        return PathosExecutor(2, start_method="fork")


class TestForkServer(testing.ExecutorConformance):
    def make_executor(self):
        return PathosExecutor(2, start_method="forkserver")


class TestSpawn(testing.ExecutorConformance):
    def make_executor(self):
        return PathosExecutor(2, start_method="spawn")
