"""Downbeat on Ray: the roles of a cluster as actors.

    import downbeat.ray

    app = downbeat.ray.deploy("/models", frontends=2, schedulers=2, backends=2)
    print(app.address)
    app.scale(backends=3)
    app.shutdown()

`python -m downbeat.ray status` prints the state of the apps that run.
"""
# The oldest version of Ray that the tests were run with.
OLDEST_RAY = (2, 40)
INSTALL = "pip install 'downbeat-server[ray]'"

try:
    import ray as _ray
except ImportError as error:
    raise ImportError(f"downbeat.ray needs Ray, which is not installed ({error}). Install it: {INSTALL}") from error


def _numbers(version):
    """The first two numbers of a version: (2, 60) of `2.60.0`."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])


if _numbers(_ray.__version__) < OLDEST_RAY:
    raise ImportError(f"downbeat.ray needs Ray {OLDEST_RAY[0]}.{OLDEST_RAY[1]} or newer, and {_ray.__version__} is installed. Upgrade it: {INSTALL}")

from .app import App, DeployError, connect, deploy, running  # noqa: E402

__all__ = ["App", "DeployError", "connect", "deploy", "running"]
