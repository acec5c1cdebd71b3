"""Observes files as they get their names."""

import os
import pathlib


def observe_names(monkeypatch, hear):
    """Call `hear(source, target)` with both paths before a file gets a name; what it raises stops that."""

    def observing(rename):
        def observed(source, target, *, src_dir_fd=None, dst_dir_fd=None, **options):
            hear(_path(source, src_dir_fd), _path(target, dst_dir_fd))
            rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **options)

        return observed

    for name in ("replace", "rename", "link"):
        monkeypatch.setattr(os, name, observing(getattr(os, name)))


def _path(path, folder):
    path = pathlib.Path(path)
    return path if folder is None else pathlib.Path(os.readlink(f"/proc/self/fd/{folder}"), path)
