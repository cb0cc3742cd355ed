"""Expected sizes of new files, by the earlier files of the same directory."""

import tracemalloc

from kvfs.core.capacity.sizes import REMEMBERED, ExpectedSizes


def test_unknown_name_has_no_expected_size() -> None:
    sizes = ExpectedSizes()
    assert sizes.expect(1, b"a.pt") is None
    sizes.learn(1, b"a.pt", 100)
    assert sizes.expect(1, b"b.bin") is None
    assert sizes.expect(1, b"c") is None


def test_a_directory_and_suffix_is_known() -> None:
    sizes = ExpectedSizes()
    sizes.learn(1, b"a.pt", 100)
    sizes.learn(1, b"a.json", 7)
    sizes.learn(1, b"plain", 9)
    assert sizes.expect(1, b"b.pt") == 100
    assert sizes.expect(1, b"b.json") == 7
    assert sizes.expect(1, b"other") == 9


def test_another_directory_is_expected_to_be_alike() -> None:
    sizes = ExpectedSizes()
    sizes.learn(1, b"a.pt", 100)
    sizes.learn(2, b"a.pt", 5000)
    assert sizes.expect(3, b"b.pt") == 5000
    assert sizes.expect(1, b"b.pt") == 100


def test_growth_is_believed_at_once_and_shrinking_slowly() -> None:
    sizes = ExpectedSizes()
    sizes.learn(1, b"a.pt", 1000)
    sizes.learn(1, b"a.pt", 9000)
    assert sizes.expect(1, b"b.pt") == 9000
    seen = []
    for _ in range(60):
        sizes.learn(1, b"a.pt", 1000)
        expected = sizes.expect(1, b"b.pt")
        assert expected is not None
        seen.append(expected)
    assert seen == sorted(seen, reverse=True)
    assert 1000 <= seen[-1] < 1100


def test_only_the_end_of_a_long_suffix_counts() -> None:
    sizes = ExpectedSizes()
    sizes.learn(1, b"a." + b"x" * 200, 100)
    assert sizes.expect(1, b"b." + b"y" * 100 + b"x" * 8) == 100


def test_memory_is_bounded() -> None:
    sizes = ExpectedSizes()
    tracemalloc.start()
    try:
        for number in range(5 * REMEMBERED):
            sizes.learn(number + 1, b"a.%d" % number, 1 << 40)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sizes.expect(1, b"a.0") is None
    assert taken < 2 << 20
