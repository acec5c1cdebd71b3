"""datamat's own hooks pass the conformance tests that it ships for users' hooks."""

import pytest

from datamat import testing
from datamat.directory.ledger import Ledger
from datamat.parallel import get_logger
from datamat.run.progress import ProgressBar, RunLog
from datamat.run.report import RunTally
from datamat.run.reporting import LedgerHook


@pytest.mark.long
class TestProgressBar(testing.HookConformance):
    def make_hook(self):
        return ProgressBar()


class TestLog(testing.HookConformance):
    def make_hook(self):
        return RunLog(get_logger("datamat"))


@pytest.mark.long
class TestTally(testing.HookConformance):
    def make_hook(self):
        return RunTally(0.0)


class TestLedger(testing.HookConformance):
    @pytest.fixture(autouse=True)
    def ledger_elsewhere(self, tmp_path_factory):
        """A ledger beside the one that every run writes."""
        self.ledger = Ledger(tmp_path_factory.mktemp("ledger") / "ledger.jsonl")
        yield
        self.ledger.close()

    def make_hook(self):
        return LedgerHook(self.ledger)
