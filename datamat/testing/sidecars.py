"""The tests of a `Sidecar`."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

from datamat.directory.manifest import Manifest
from datamat.directory.sidecars import Sidecar
from datamat.directory.sidecars.exporting import export
from datamat.directory.verify import verify
from datamat.errors import MissingDependencyError
from datamat.formats import get_format
from datamat.run.materializer import Materializer
from datamat.testing.assertions import compare
from datamat.testing.executors import InlineExecutor
from datamat.testing.small_run import Numbers


class SidecarConformance:
    """What every `Sidecar` does: its files follow from the manifest alone."""

    def make_sidecar(self) -> Sidecar:
        """Return the sidecar."""
        raise NotImplementedError(f"{type(self).__name__}: define make_sidecar(self)")

    def test_a_run_writes_its_files(self, tmp_path: pathlib.Path) -> None:
        """It has files for at least one built-in format; a run accepts them all, and `verify` finds them."""
        found = {name: self._run(tmp_path / name, name) for name in _installed_formats()}

        assert any(found.values()), f"sidecar: found no file for any of {', '.join(found)}, expected one"
        for name, files in found.items():
            written = {file: (tmp_path / name / file).read_bytes() for file in files}
            compare(written, files, f"{name}: files of the run")
            report = verify(tmp_path / name)
            assert report.ok, f"{name}: found {report}, expected the directory to verify"

    def test_files_do_not_depend_on_time_and_place(self, tmp_path: pathlib.Path) -> None:
        """Equal manifests give equal files, in another directory and at another time."""
        for name in _installed_formats():
            first, second = (self._run(tmp_path / f"{name}{number}", name) for number in range(2))
            compare(second, first, f"{name}: files of a second directory, compared with the first")
            report = export(tmp_path / f"{name}0", sidecars=[self.make_sidecar()])
            compare(report.written, (), f"{name}: files that `export` wrote again")

    def test_files_follow_the_shards(self, tmp_path: pathlib.Path) -> None:
        """After the shards change, a run with the same object rewrites the files."""
        for name in _installed_formats():
            sidecar = self.make_sidecar()
            self._run(tmp_path / name, name, sidecar, num_rows=3, num_shards=1)
            files = self._run(tmp_path / name, name, sidecar)
            fresh = self._run(tmp_path / f"{name} fresh", name)
            compare(files, fresh, f"{name}: files after a change, compared with a new directory")

    def _run(
        self,
        output: pathlib.Path,
        format_name: str,
        sidecar: Sidecar | None = None,
        *,
        num_rows: int = 8,
        num_shards: int = 2,
    ) -> dict[str, bytes]:
        """Run a small job with a sidecar, and return the sidecar's files."""
        sidecar = sidecar or self.make_sidecar()
        options: dict[str, Any] = {"format": format_name, "shards": num_shards, "sidecars": [sidecar]}
        Materializer(Numbers(), num_rows, output, **options).run(executor=InlineExecutor(), progress=False)
        files = sidecar(Manifest.read(output))
        return {
            name: content if isinstance(content, bytes) else content.make(output / content.shard.file)
            for name, content in files.items()
        }


def _installed_formats() -> list[str]:
    found = []
    for name in ("tfrecord", "parquet", "webdataset"):
        with contextlib.suppress(MissingDependencyError):
            get_format(name)
            found.append(name)
    return found
