"""Fingerprints whatever decides the output: writers, transforms, callables, features, options.

Two fingerprints are equal if their objects mean the same, in any process and folder, on any host, with any hash seed;
they differ if the output may. How each kind of object counts:

    values              by content; dicts and sets regardless of order
    the user's code     functions by bytecode, constants, defaults, closure and the globals they use; classes by bases
                        and attributes. Comments, docstrings, annotations of functions, line numbers and file names
                        do not count
    installed code      by module and name; the version of its distribution is recorded beside the digest
    datamat's own code  as installed code; its version is the `OUTPUT_VERSION` of its part, incremented if, and only
                        if, the part produces different bytes
    environment         by name and value, for variables that code reads by a literal name
    bound methods       by their code, and by the attributes of `self` that it and the methods it calls read
    instances           by class and by what pickle would keep: `__getstate__`, `__dict__`, slots, `__reduce__`
    albumentations      without what a transform remembers from the last image
    random generators,  by type alone: their state never reaches the output, or is set for each record
    loggers, locks, threads
    open files, connections, iterators    rejected: a `FingerprintError` gives the path to each

The files, each built on those below it:

    graph       walks everything a value is made of and folds it into the digest    <- start reading here
    objects     the parts of one object: values, instances, and the rule for each type
    code        the parts of functions, classes and modules: bytecode, what it reads, and who wrote it
    memos       what code caches between calls, in globals and in caches
    switches    process-wide settings of libraries: numpy.seterr, the precision of decimal
"""

from __future__ import annotations

from datamat.fingerprint.code import Reached, assume_versions, known_versions, versions_of
from datamat.fingerprint.graph import Examined, ModuleValue, content_of, examine, fingerprint
from datamat.fingerprint.memos import Memo, clear_caches, is_filled, read_memos, set_memo
from datamat.fingerprint.switches import Switches

__all__ = [
    "Examined",
    "Memo",
    "ModuleValue",
    "Reached",
    "Switches",
    "assume_versions",
    "clear_caches",
    "content_of",
    "examine",
    "fingerprint",
    "is_filled",
    "known_versions",
    "read_memos",
    "set_memo",
    "versions_of",
]
