"""A stand-in for the classes of ``ray.util.metrics``, which keeps all that is reported."""

import collections

from cluster import metrics


class Metric:
    """A counter, gauge or histogram. ``sums`` and ``values`` have the reports by the values of the labels."""

    def __init__(self, kind, name, description, *options):
        self.prometheus_name = f"ray_{name}{'_total' if kind == 'Counter' else ''}"
        self.tag_keys = options[-1]
        self.sums, self.values = collections.Counter(), {}

    @classmethod
    def in_place_of_rays(cls, monkeypatch):
        """Replaces the classes that ``cluster.metrics`` uses. Returns the list of all that are made then."""
        made = []
        for kind in ("Counter", "Gauge", "Histogram"):

            def make(*arguments, kind=kind):
                made.append(cls(kind, *arguments))
                return made[-1]

            monkeypatch.setattr(metrics, kind, make)
        return made

    def inc(self, value=1.0, tags=None):
        assert value > 0, "Ray refuses others"
        self.observe(value, tags)

    def observe(self, value, tags):
        self.set(value, tags)
        self.sums[self._key(tags)] += value

    def set(self, value, tags):
        assert set(tags) == set(self.tag_keys)
        self.values[self._key(tags)] = value

    def _key(self, tags):
        return tuple(value for name, value in tags.items() if name != "run")
