"""A `Materializer` and the options of its runs, for tests that say both in one place and run several times."""

import inspect

from datamat import ImportWriter, Materializer
from datamat.options import RunKeywords


class Prepared:
    """Calls the methods of a `Materializer` with options that were given once; those of a call win.

    Args:
        arguments: arguments of `Materializer`.
        both: arguments by name of `Materializer`, of its `run`, and of the writer of a source without a class.
    """

    def __init__(self, *arguments, **both):
        of_run = both.keys() & RunKeywords.__annotations__.keys()
        self.options = {name: both.pop(name) for name in of_run}
        chosen = {name: both.pop(name) for name in ("columns", "rename", "drop") if name in both}
        if chosen:
            kind = arguments[0] if isinstance(arguments[0], str) else None
            source = arguments[1:2] if kind else arguments[:1]
            arguments = (ImportWriter(kind=kind, **chosen), *source, *arguments[2:])
        self.materializer = Materializer(*arguments, **both)

    def __getattr__(self, name):
        if name == "materializer":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.materializer, name)

    def __repr__(self):
        return repr(self.materializer)

    @property
    def pair(self):
        """What a module gives the command line."""
        return self.materializer, self.options

    def run(self, **options):
        return self.materializer.run(**{**self.options, **options})

    def finalize(self, **options):
        return self._call(self.materializer.finalize, **options)

    def repair(self, **options):
        return self._call(self.materializer.repair, **options)

    def estimate(self, *arguments, **options):
        return self._call(self.materializer.estimate, *arguments, **options)

    def _call(self, method, *arguments, **options):
        taken = self.options.keys() & inspect.signature(method).parameters.keys()
        return method(*arguments, **{**{name: self.options[name] for name in taken}, **options})
