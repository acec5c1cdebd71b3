"""A digest of anything that decides the output: writers, transforms, callables, features, options.

Fingerprints are equal if the meaning is equal (in another process, on another host, with another hash seed or folder),
and differ if the output may. How objects count:

    values              by content; dicts and sets without their order
    the user's code     functions by bytecode, constants, defaults, closure and the globals they use; classes by bases
                        and attributes. Comments, docstrings, annotations of functions, line numbers and file names
                        do not count
    installed code      by module and name; the version of its distribution is recorded beside the digest
    datamat's own code  as installed code, with the `OUTPUT_VERSION` of its part as version, which is incremented if,
                        and only if, the part produces different bytes
    environment         by name and value, for variables that code reads by a literal name
    bound methods       by their code, and by what it, and the methods that it calls, read of their object
    instances           by class and by what pickle would keep: `__getstate__`, `__dict__`, slots, `__reduce__`
    albumentations      without what a transform remembers of the last image
    random generators,  by type alone: their state never reaches the output, or is set for each record
    loggers, locks, threads
    open files, connections, iterators    not at all: a `FingerprintError` says where they are

The files, each built on those below it:

    graph       finds everything that a value is made of and folds it into the digest    <- start reading here
    objects     what one object is made of: values, instances, and the tables of how each type counts
    code        what functions, classes and modules are made of: bytecode, what it reads, and who wrote it
    memos       what code keeps between its calls in globals and caches that it fills itself
    switches    what libraries hold for all code: numpy.seterr, the precision of decimal
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
