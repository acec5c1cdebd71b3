"""A digest of whatever decides the output: writers, transforms, callables, features, options.

A `fingerprint` is equal wherever the meaning is equal (another process, host, hash seed or folder) and differs
wherever the output may. How objects count:

    values              by content; dicts and sets without their order
    the user's code     functions by bytecode, constants, defaults, closure and the globals they use; classes by bases
                        and attributes. Comments, docstrings, annotations of functions, line numbers and file names
                        do not count. `datamat.writers` is treated like it
    installed code      by module, name and version of its distribution
    instances           by class and by what pickle would keep: `__getstate__`, `__dict__`, slots, `__reduce__`
    albumentations      without what a transform remembers of the last image
    random generators,  by type alone: what they hold never reaches the output, or is set per record
    loggers, locks, threads
    open files, connections, iterators    not at all: a `FingerprintError` names their place

The files, each built on those below it:

    graph       walks to everything a value is made of, and folds that up into the digest    <- start reading here
    objects     what one object is made of: values, instances, and the tables that say how each type counts
    code        what functions, classes and modules are made of
    bytecode    the instructions of a function, the globals that it reads, the modules that it imports
    origins     whose code a module is: the user's, or Python's or a distribution's of some version
    parts       `Parts`, the answer of all of these
"""

from __future__ import annotations

from datamat.fingerprint.graph import fingerprint

__all__ = ["fingerprint"]
