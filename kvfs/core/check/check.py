"""The order of a check: each part may rely on what those before it have mended.

First come changes that the catalog's log lacks: those that its journal has, and those that are
lost. Without a mount, a repair takes them from the journal when it opens the catalog; a mount does
so by itself. A repair accepts lost changes: files that may have been their objects go into
quarantine, and are not removed.

Then come the numbers, because a repair may need new ones. Names come before inodes, because they
show which inodes are nameless. Backing files come before the copies that the records claim, because
a file may lie in the wrong folder. Copies come before the bucket, because a repair uploads from
them the objects that the bucket lacks.
"""

from kvfs.core.check.copies import CopyCheck
from kvfs.core.check.files import FileCheck, nothing
from kvfs.core.check.inodes import InodeCheck
from kvfs.core.check.names import NameCheck
from kvfs.core.check.stored import ListingCheck
from kvfs.core.check.survey import Survey


async def check(survey: Survey) -> None:
    """Look at everything once. Raises KvfsError, OSError if something cannot be looked at."""
    if survey.live:
        await survey.ledger.accounts.census_done.wait()
    whole = _look_for_changes(survey)
    await survey.step(0)
    if not whole:
        return  # all other findings would be about an older catalog
    names = NameCheck(survey)
    inodes = InodeCheck(survey, names)
    copies = CopyCheck(survey)
    await inodes.count()
    names.check_root()
    await names.run()
    await inodes.run()
    await copies.look_for_tiers()
    await FileCheck(survey, copies.lost).run()
    await copies.run()
    if survey.remote is not None:
        await ListingCheck(survey, survey.remote).run()


def _look_for_changes(survey: Survey) -> bool:
    """Whether the rest can be checked."""
    catalog, found = survey.catalog, survey.catalog.recovered
    where = str(catalog.path)
    missing = 0 if survey.live else found.taken
    if missing:
        what = f"its log ends too early, after change {found.number}: {missing} changes are missing"
        survey.report("log", 0, where, what, "take them from the journal", nothing)
    if catalog.doubt:
        cure = "accept it; files that no record means go into quarantine"
        survey.doubtful = True
        survey.report("log", 0, where, catalog.doubt, cure, catalog.believe)
    return survey.repair or not missing
