"""Changes that the catalog's log lacks: those that its journal has, and those that are lost.

Contract: the first part of a check, since nothing else can be said of a catalog whose newest
changes are missing. Without a mount a repair has taken them from the journal when it opened the
catalog; a mount does so by itself. What is lost is accepted by a repair: files that may have been
its objects go into quarantine, and are not removed.
"""

from kvfs.core.check.survey import Survey


def nothing() -> None:
    """It was mended when the catalog was opened."""


def look(survey: Survey) -> bool:
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
