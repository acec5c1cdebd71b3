"""Reads XML files that others made."""

from __future__ import annotations

import os
from xml.etree import ElementTree

from datamat.codecs.files import read_file
from datamat.errors import InputError


class _NoDoctype(ElementTree.TreeBuilder):
    """Refuses document type declarations, and with them all entities."""

    def doctype(self, name: str, *_: object) -> None:
        raise ElementTree.ParseError(f"it declares a document type ({name}), which no annotation needs")


def read_xml(path: str | os.PathLike[str]) -> ElementTree.Element:
    """Return the root of an XML file.

    Raises:
        InputError: as of `read_file`; or the file is no XML, or declares a document type.
    """
    try:
        return ElementTree.fromstring(read_file(path), ElementTree.XMLParser(target=_NoDoctype()))  # noqa: S314 -- no entities
    except ElementTree.ParseError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from error
