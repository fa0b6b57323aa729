"""A controller that follows the published algorithm of Kubernetes' HorizontalPodAutoscaler, on an external metric with an
`AverageValue` of 1: the metric is the number of pods. lab/downbeat-lab/src/autoscaling/hpa.rs is the same in virtual time.

Source: "Algorithm details" and "Configurable scaling behavior" of Kubernetes' page on horizontal pod autoscaling."""
import math


class Hpa:
    # 4 pods, or as many as there are, in 15 s: the default policies.
    GROWTH_S, GROWTH_PODS = 15, 4

    def __init__(self, least=1, most=16, down_window_s=120, tolerance=0.1):
        self.least, self.most, self.down_window_s, self.tolerance = least, most, down_window_s, tolerance
        # By time: what the metric asked for, and pods that came.
        self.asked, self.grown = [], []

    def sync(self, now, pods, metric):
        """The number of pods from now on, by the number now and the metric; without a metric nothing changes."""
        if metric is None or not math.isfinite(metric):
            return pods
        is_near = pods > 0 and abs(metric / pods - 1) <= self.tolerance
        asked = pods if is_near else math.ceil(metric - 1e-9)
        self.asked = [(at, its) for at, its in self.asked if now - at <= self.down_window_s] + [(now, asked)]
        stable = asked if pods < asked else min(pods, max(its for _, its in self.asked))
        self.grown = [(at, its) for at, its in self.grown if now - at < self.GROWTH_S]
        before = max(0, pods - sum(its for _, its in self.grown))
        limit = max(pods, before + max(before, self.GROWTH_PODS))
        wanted = max(self.least, min(self.most, stable, limit))
        if wanted > pods:
            self.grown.append((now, wanted - pods))
        return wanted


def published(devices, wanted):
    """The metric as the rule of deploy/helm has it. Kubernetes leaves the number of pods alone while it differs by a
    tenth at most; if more devices are wanted, the rule asks for more than a tenth more."""
    if not math.isfinite(wanted) or wanted <= 0:
        return None
    return max(wanted, math.floor(1.1 * devices) + 1) if wanted > devices else wanted
