"""The arithmetic of the benchmarks: what a wrong figure would come from."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "bench" / "measure.py"


def load() -> ModuleType:
    specification = importlib.util.spec_from_file_location("bench_measure", PATH)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up there
    specification.loader.exec_module(module)
    return module


measure = load()


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("1", 1, "1 B"),
        ("4K", 4096, "4 KiB"),
        ("64k", 65536, "64 KiB"),
        ("32MiB", 32 << 20, "32 MiB"),
        ("1GB", 1 << 30, "1 GiB"),
        ("1536K", 1536 << 10, "1536 KiB"),
        ("1025", 1025, "1025 B"),
    ],
)
def test_sizes_are_powers_of_1024(text: str, count: int, name: str) -> None:
    assert measure.size(text) == count
    assert measure.size_name(count) == name


@pytest.mark.parametrize("text", ["", "0", "K", "1.5M", "-1", "12T", "1 M B"])
def test_malformed_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        measure.size(text)


def test_a_percentile_is_the_nearest_sample_from_above() -> None:
    hundred = [float(value) for value in range(100, 0, -1)]
    assert measure.percentile(hundred, 0.5) == 50
    assert measure.percentile(hundred, 0.99) == 99
    assert measure.percentile(hundred, 0.07) == 7
    assert measure.percentile(hundred, 0) == 1
    assert measure.percentile(hundred, 1) == 100
    assert measure.percentile([3.0], 0.99) == 3
    assert measure.percentile([1.0, 2.0], 0.5) == 1


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1)])
def test_a_percentile_of_nothing_is_refused(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"no samples|not between"):
        measure.percentile(samples, share)


def test_best_and_median_of_a_series() -> None:
    series = measure.Series((3.0, 1.0, 10.0))
    assert series.best == 10
    assert series.median == 3
    assert series.scatter == pytest.approx(10 / 3)
    with pytest.raises(ValueError, match="one round"):
        measure.Series(())


def test_paired_ratios_cancel_common_slowdowns() -> None:
    """The machine was ten times slower in the second round: the ratio stays 0.9."""
    base = measure.Series((10.0, 1.0, 10.0))
    slower = measure.Series((9.0, 0.9, 9.0))
    assert slower.against(base)["median"] == pytest.approx(0.9)
    assert slower.against(base)["best"] == pytest.approx(0.9)


def test_best_and_paired_ratio_differ_where_one_round_was_disturbed() -> None:
    base = measure.Series((10.0, 10.0, 10.0))
    disturbed = measure.Series((2.0, 9.5, 9.0))
    assert disturbed.against(base)["best"] == pytest.approx(0.95)
    assert disturbed.against(base)["median"] == pytest.approx(0.9)


def test_there_is_no_ratio_to_nothing() -> None:
    assert measure.ratio(1.0, 0.0) is None
    assert measure.paired_ratio([1.0], [0.0]) is None
    assert measure.paired_ratio([], []) is None
    with pytest.raises(ValueError, match="cannot be paired"):
        measure.paired_ratio([1.0], [1.0, 2.0])


def test_a_bar_holds_at_its_bound() -> None:
    read = measure.Bar("read", 0.95)
    assert read.holds(0.95)
    assert not read.holds(0.9499)
    memory = measure.Bar("memory", 400, at_least=False)
    assert memory.holds(400)
    assert not memory.holds(401)


def test_judged_bar_says_if_it_was_not_measured() -> None:
    bar = measure.Bar("read", 0.95)
    assert bar.judged(1.0, "1 MiB") == {
        "bar": "read",
        "at": "1 MiB",
        "bound": ">= 0.95",
        "value": 1.0,
        "paired": None,
        "holds": "yes",
    }
    assert bar.judged(0.5)["holds"] == "NO"
    assert bar.judged(None)["holds"] == "not measured"


def test_everyone_is_first_in_turn() -> None:
    orders = [measure.turns(3, number) for number in range(3)]
    assert orders == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
    assert measure.turns(1, 7) == [0]


def test_best_rival_has_the_best_median() -> None:
    """One lucky round makes no rival the best; the ratio is that of the rounds' pairs."""
    ours = measure.Series((9.0, 18.0, 9.0))
    rivals = {
        "lucky": measure.Series((50.0, 1.0, 1.0)),
        "steady": measure.Series((10.0, 20.0, 10.0)),
    }
    name, ratios = measure.against_best(ours, rivals)
    assert name == "steady"
    assert ratios == {"best": pytest.approx(0.9), "median": pytest.approx(0.9)}
