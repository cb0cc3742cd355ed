"""Bytes of a tier that are set aside: what a block does not hand on, it returns."""

import re
from contextlib import suppress
from pathlib import Path

import kvfs
from kvfs.errors import KvfsError
from kvfs.tiers import NvmeTier, Reservation
from tests.unit.world import MIB


def test_reservation_that_is_not_kept_returns_its_bytes(tmp_path: Path) -> None:
    tier = NvmeTier(tmp_path, 64 * MIB)
    with Reservation(tier, MIB) as room:
        assert tier.reserved == MIB
        room.resize(2 * MIB)
        assert tier.reserved == 2 * MIB
    assert tier.reserved == room.size == 0
    with suppress(KvfsError), Reservation(tier, MIB):
        raise KvfsError
    assert tier.reserved == 0
    with Reservation(tier, MIB) as room:
        kept = room.keep()
    assert tier.reserved == kept.size == MIB
    kept.release()
    kept.release()
    assert tier.reserved == 0
    tier.close()


def test_only_reservations_change_reserved_bytes() -> None:
    root = Path(kvfs.__file__).parent
    changes = re.compile(r"\.reserved\s*[-+]?=(?!=)")
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if changes.search(path.read_text())
    }
    assert found == {"tiers/tier.py"}
