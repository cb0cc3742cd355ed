"""A store that survives its process: one file has its content, written again at each change."""

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

from kvfs.s3.store import Data
from tests.s3.memory import MemoryStore


class FolderStore(MemoryStore):
    """A store for one process at a time, and for objects that go up in one request."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        folder.mkdir(exist_ok=True)
        self._file = folder / "store"
        if self._file.exists():
            self.objects = pickle.loads(self._file.read_bytes())  # noqa: S301 (ours)

    def _save(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_bytes(pickle.dumps(self.objects))
        os.rename(fresh, self._file)

    def _store(
        self, key: str, data: Data, metadata: Mapping[str, str], etag: str, *, once: bool
    ) -> str:
        super()._store(key, data, metadata, etag, once=once)
        self._save()
        return etag

    def delete(self, key: str) -> None:
        super().delete(key)
        self._save()
