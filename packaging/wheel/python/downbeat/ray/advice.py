"""The number of backends that the leading scheduler advises."""
import math
import time

from ..autoscaler import Hpa, published
from .process import NO_PROXY

NAMES = ("downbeat_devices", "downbeat_autoscale_devices")


class Advice:
    """Follows the advice by the algorithm of Kubernetes' autoscaler, if `max_backends` is set."""

    def __init__(self, settings):
        self.settings, self.last, self.next_at = settings, None, 0
        self.scaler = None
        if settings.max_backends is not None:
            self.scaler = Hpa(settings.min_backends, settings.max_backends, settings.scale_down_after_s)

    def ask(self, addresses, backends):
        """The number of backends from now on, or None: leave it as it is."""
        now = time.monotonic()
        if self.scaler is None or now < self.next_at or not backends:
            return None
        self.next_at = now + self.settings.scale_every_s
        self.last = next(filter(None, map(advised, addresses)), None)
        if self.last is None:
            return None
        metric = published(self.last["devices"], self.last["wanted"])
        return self.scaler.sync(now, backends, metric and metric / self.settings.devices_per_backend)


def advised(address):
    """The advice of a scheduler, by its page of metrics; None if it does not lead or has not seen enough."""
    try:
        with NO_PROXY.open(f"http://{address}/metrics", timeout=2) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError):
        return None
    values = {name: float(value) for name, _, value in (line.partition(" ") for line in lines) if name in NAMES}
    if len(values) < 2 or not all(map(math.isfinite, values.values())):
        return None
    return {"devices": int(values[NAMES[0]]), "wanted": int(values[NAMES[1]])}
