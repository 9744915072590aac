"""Create figures with matplotlib, which is optional (extra ``log``)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

NOT_DRAWN = 'not drawn: matplotlib is not installed; pip install "oarjax[log]"'


def can_draw() -> bool:
    """Return True if matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float, *, dpi: int) -> Any:
    """Return an empty white figure with a canvas of its own, so that the global backend stays as it is.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"figures are {NOT_DRAWN}") from None
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure
