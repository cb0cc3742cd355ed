"""Pictures show the tables that stand beside them."""

import pytest

from scripts import plots


@pytest.mark.parametrize("name", plots.PICTURES)
def test_a_picture_is_of_its_table(name: str) -> None:
    found = plots.table(plots.PICTURES[name][0])
    picture = (plots.IMAGES / f"bench-{name}.svg").read_text()
    assert f"docs/benchmarks.md {found.digest}" in picture, "run python -m scripts.plots"
    assert f"(images/bench-{name}.svg)" in plots.DOCUMENT.read_text()
