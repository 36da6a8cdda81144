"""Figures of managers and pipelines for those who collect them: Prometheus text, and scalars for TensorBoard.

Takes the dicts that ``stats()`` gives. Needs neither torch nor, but for `exposition` and `Collector`, any other package.

A counter of a manager becomes ``embcache_hits_total{table="user"}``, a size ``embcache_resident{table="user"}``; a pipeline's
mean times ``embcache_stage_seconds{stage="plan"}`` and ``embcache_wait_seconds{wait="wait_ready"}``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

__all__ = ["Collector", "Sample", "exposition", "samples", "write_scalars"]

# What only rises; all else goes up and down.
COUNTERS = frozenset(
    "hits misses swap_in_rows swap_out_rows swap_in_bytes swap_out_bytes admitted rejected evicted forgotten born step batches_done shortened".split()
)
_TIMES = {"stage_s": ("stage_seconds", "stage"), "wait_s": ("wait_seconds", "wait")}


class Sample(NamedTuple):
    """One figure: its name without a prefix, a label or none, its value, and whether it only rises."""

    name: str
    label: tuple[str, str] | None
    value: float
    rises: bool


class ScalarWriter(Protocol):
    """What `write_scalars` needs of a TensorBoard ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """The figures of one ``stats()``: of a manager, table by table (its totals are their sums), or of a pipeline."""
    tables = stats.get("tables", {})
    summed = set(next(iter(tables.values()), {}))
    for name, value in stats.items():
        if name in _TIMES:
            title, label = _TIMES[name]
            for which, seconds in value.items():
                yield Sample(title, (label, which), float(seconds), False)
        elif isinstance(value, (int, float)) and name not in summed:
            yield Sample(name, None, float(value), name in COUNTERS)
    for table, figures in tables.items():
        for name, value in figures.items():
            yield Sample(name, ("table", table), float(value), name in COUNTERS)


class Collector:
    """A custom collector of the package ``prometheus_client``: asks for the figures whenever they are scraped.

    Parameters
    ----------
    *sources : callable
        ``manager.stats``, ``pipe.stats``: each is called anew. Their names must not be the same, or be told apart by table.
    prefix : str

    Examples
    --------
    ``prometheus_client.REGISTRY.register(Collector(ebc.manager.stats, pipe.stats))``
    """

    def __init__(self, *sources: Callable[[], Mapping[str, Any]], prefix: str = "embcache") -> None:
        self._sources, self._prefix = sources, prefix
        self._core = _client("core")

    def collect(self) -> Iterator[Any]:
        """A family a name."""
        families: dict[str, Any] = {}
        for source in self._sources:
            for sample in samples(source()):
                family = families.get(sample.name)
                if family is None:
                    kind = self._core.CounterMetricFamily if sample.rises else self._core.GaugeMetricFamily
                    labels = () if sample.label is None else (sample.label[0],)
                    help_text = sample.name.replace("_", " ")
                    family = families[sample.name] = kind(f"{self._prefix}_{sample.name}", help_text, labels=labels)
                family.add_metric(() if sample.label is None else (sample.label[1],), sample.value)
        yield from families.values()


def exposition(*sources: Callable[[], Mapping[str, Any]], prefix: str = "embcache") -> str:
    """The figures now as Prometheus text, for a node exporter's textfile collector or an answer of one's own.

    Raises
    ------
    ImportError
        The package prometheus-client is missing.
    """
    registry = _client("registry").CollectorRegistry(auto_describe=False)
    registry.register(Collector(*sources, prefix=prefix))
    text: str = _client("exposition").generate_latest(registry).decode()
    return text


def write_scalars(writer: ScalarWriter, stats: Mapping[str, Any], step: int, *, prefix: str = "embcache") -> None:
    """Write the figures of one ``stats()`` to a TensorBoard ``SummaryWriter``, or whatever has its ``add_scalar``.

    Tags are ``embcache/NAME``, or ``embcache/NAME/LABEL`` for a table's or a stage's.
    """
    for sample in samples(stats):
        tag = f"{prefix}/{sample.name}" if sample.label is None else f"{prefix}/{sample.name}/{sample.label[1]}"
        writer.add_scalar(tag, sample.value, step)


def _client(module: str) -> Any:
    try:
        return importlib.import_module(f"prometheus_client.{module}")
    except ImportError:
        raise ImportError(
            "Prometheus text needs the package prometheus-client: pip install 'embcache[metrics]'"
        ) from None
