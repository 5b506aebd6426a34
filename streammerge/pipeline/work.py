"""Carry out a plan in the staging folder, and commit it."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from streammerge import files
from streammerge.execute.casts import needs_torch
from streammerge.execute.checksums import CHECKSUMS_NAME, Checksums
from streammerge.execute.compute import formula_casts
from streammerge.execute.engine import Progress, Routes, Watcher, run
from streammerge.execute.journal import Journal, journal_fingerprint
from streammerge.execute.memory import Buffers
from streammerge.execute.routes import read_route, write_route
from streammerge.execute.scan import ValueScan
from streammerge.families.config import edited_config
from streammerge.folder.staging import Staging, check_destination, commit, manifest_of, staging_of
from streammerge.pipeline.prepare import Prepared
from streammerge.plan.plan import ADAPTER_NAME, INDEX_NAME, Plan
from streammerge.version import __version__

__all__ = ["Work"]


@dataclass
class Work:
    """A plan being carried out."""

    prepared: Prepared
    made: Plan
    target: Path
    buffers: Buffers
    untie: bool
    stop: threading.Event | None
    progress: Progress = field(default_factory=Progress)

    def bytes_there(self) -> int:
        """Bytes on disk that an unfinished merge of the same plan has left, and that need no space again."""
        staging = staging_of(self.target)
        if not staging.folder.is_dir() or journal_fingerprint(staging.journal) != self._fingerprint():
            return 0
        return sum(path.stat().st_blocks * 512 for path in staging.folder.iterdir() if path.is_file())

    def write(self, staging: Staging, finished: object) -> list[str]:
        """Write everything into the staging folder and make it the destination; returns the names.

        Args:
            finished: see ``finished_plan``, as it was before the staging folder was locked.
        """
        options, observer = self.prepared.options, self.prepared.observer
        fingerprint = self._fingerprint()
        if finished == fingerprint:
            self.progress.kept = self.made.write_size
            return [str(name) for name in manifest_of(self.target)["files"]]  # type: ignore[attr-defined]
        check_destination(self.target, overwrite=options.overwrite)
        found = journal_fingerprint(staging.journal)
        if found != fingerprint:
            if found is not None:
                self.prepared.warn(
                    "an unfinished merge of other sources or with other options was there: starting over"
                )
            staging.clear()
        files.make_folder(staging.folder)
        staging.keep_only({file.name for file in self.made.files})
        for file in self.made.files:
            files.make_folder((staging.folder / file.name).parent)
        journal = Journal(staging.journal, fingerprint)
        routes = Routes(read_route(options.io, self.made.sources), write_route(options.io, staging.folder))
        halt = threading.Event()
        scan, checksums = ValueScan(), Checksums(halt)
        watchers: list[Watcher] = [*([scan] if options.scan else []), *([checksums] if options.checksums else [])]
        observer.phase("merging", self.made.write_size)
        try:
            run(
                self.made,
                staging.folder,
                self.buffers,
                routes,
                journal,
                progress=self.progress,
                watchers=watchers,
                on_poll=lambda: observer.advance(self.progress.done),
                stop=self.stop,
                halt=halt,
            )
        finally:
            journal.close()
        observer.advance(self.made.write_size)
        for warning in scan.warnings():
            self.prepared.warn(warning)
        written = [file.name for file in self.made.files]
        written += self._write_sidecars(staging.folder, checksums.lines() if options.checksums else None)
        manifest = {"streammerge": __version__, "source": str(self.prepared.catalogue.root), "plan": fingerprint}
        commit(staging, self.target, written, manifest, overwrite=options.overwrite)
        return written

    def _fingerprint(self) -> str:
        """A hash of all that decides on the bytes written; a merge goes on only where it is the same."""
        options = self.prepared.options
        parts = [self.made.fingerprint(), __version__, metadata.version("ml_dtypes")]
        parts += [options.mesh_order, str(options.subtree), str(options.allow_replica_mismatch)]
        if self.made.formulas.listed:
            parts.append(metadata.version("numpy"))  # another version may multiply in another order
        if needs_torch({*self.made.casts, *formula_casts(self.made.formulas)}):
            parts.append(metadata.version("torch"))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _write_sidecars(self, folder: Path, checksums: str | None) -> list[str]:
        """Everything beside the weights; returns the names written."""
        contents: dict[Path, bytes] = {}
        for name, path in self.prepared.sidecars.paths().items():
            with files.io_errors("read", path):
                contents[name] = path.read_bytes()
        if self.prepared.config is not None:
            edited = edited_config(self.prepared.config, dtype=_main_dtype(self.made), untie=self.untie)
            if edited is not None:
                contents[Path("config.json")] = edited
        if self.prepared.adapter_config is not None:
            contents[Path(ADAPTER_NAME).with_name("adapter_config.json")] = self.prepared.adapter_config.encode()
        index = self.made.index_bytes()
        if index is not None:
            contents[Path(INDEX_NAME)] = index
        if checksums is not None:
            contents[Path(CHECKSUMS_NAME)] = checksums.encode()
        for name, content in contents.items():
            files.make_folder((folder / name).parent)
            files.write_file(folder / name, content)
        return [str(name) for name in contents]


def _main_dtype(made: Plan) -> str | None:
    """The floating dtype that most bytes are written in, or None without any."""
    sizes: Counter[str] = Counter()
    for file in made.weights:
        for tensor in file.tensors:
            if tensor.dtype.castable:
                sizes[tensor.dtype.name] += tensor.size
    return sizes.most_common(1)[0][0] if sizes else None
