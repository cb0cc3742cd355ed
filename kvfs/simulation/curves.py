"""Hit ratio over capacity, as a picture.

Contract: one PNG file, a curve for each policy and a dashed one for the bound; nothing is shown on
a screen. The extra `plot` brings matplotlib. Only this module imports it, when a picture is
requested.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence

from kvfs.errors import ConfigError, KvfsError

_SIZE_INCHES = (8.0, 5.0)
_DPI = 120

Curve = Sequence[tuple[int, float]]  # capacity in blocks, ratio between 0 and 1


def check(path: str) -> None:
    """Raise ConfigError now if the picture could not be drawn later."""
    if not path.lower().endswith(".png"):
        raise ConfigError(f"--plot {path}: expected a name that ends in .png")
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise ConfigError(f"--plot {path}: {folder} is not a writable directory")
    if os.path.isdir(path):
        raise ConfigError(f"--plot {path} is a directory: give a file")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'kvfs[plot]'")


def draw(path: str, title: str, unique: int, policies: Mapping[str, Curve], bound: Curve) -> None:
    """Draw token hit ratios over the share of `unique` blocks; KvfsError if that fails."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - it takes 0.5 s
    from matplotlib.figure import Figure  # noqa: PLC0415 - see above

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, curve in policies.items():
        axes.plot(*_percent(curve, unique), marker="o", markersize=4, label=name)
    axes.plot(*_percent(bound, unique), "k--", marker=".", label="bound (Belady)")
    axes.set(
        title=title,
        xlabel=f"capacity, % of {unique} unique blocks",
        ylabel="token hit ratio, %",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=_DPI)
    except OSError as error:
        raise KvfsError(f"--plot {path}: {error.strerror or error}") from error


def _percent(curve: Curve, unique: int) -> tuple[list[float], list[float]]:
    points = sorted(curve)
    return [100 * blocks / unique for blocks, _ in points], [100 * ratio for _, ratio in points]
