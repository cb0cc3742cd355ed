"""The order of a check: each part may rely on what those before it have mended.

Changes that the catalog lacks come before all else. Then numbers, since what is mended may need new
ones; names before the inodes that they show to be nameless; backing files before the copies that
the records claim, since one may lie in the wrong folder; copies before the bucket, which gets again
from them what it lacks.
"""

from kvfs.core.check import changes
from kvfs.core.check.copies import Copies
from kvfs.core.check.files import Files
from kvfs.core.check.inodes import Inodes
from kvfs.core.check.listed import Listed
from kvfs.core.check.names import Names
from kvfs.core.check.survey import Survey


async def check(survey: Survey) -> None:
    """Look at everything once. Raises KvfsError, OSError if something cannot be looked at."""
    if survey.live:
        await survey.ledger.accounts.census_done.wait()
    whole = changes.look(survey)
    await survey.step(0)
    if not whole:
        return  # all else would be said of an older catalog
    names = Names(survey)
    inodes = Inodes(survey, names)
    copies = Copies(survey)
    await inodes.count()
    names.check_root()
    await names.run()
    await inodes.run()
    await copies.look_for_tiers()
    await Files(survey, copies.lost).run()
    await copies.run()
    if survey.remote is not None:
        await Listed(survey, survey.remote).run()
