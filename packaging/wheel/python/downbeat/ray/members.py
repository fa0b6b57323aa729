"""The actors of an app and their placement groups: made, found again, looked at and removed."""
import contextlib
import dataclasses

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .member import Member

NAMESPACE = "downbeat"


@dataclasses.dataclass
class Record:
    """What the controller knows about a member."""

    role: str
    index: int
    group: object
    actor: object
    # The last answer of `look`, or None while the actor has not answered since it was started.
    seen: dict = None
    asked: object = None
    # The address and ports that others know, which outlive the actor.
    place: dict = dataclasses.field(default_factory=dict)
    is_leaving: bool = False

    @property
    def name(self):
        return f"{self.role}-{self.index}"

    @property
    def is_ready(self):
        return bool(self.seen and self.seen["is_ready"] and not self.is_leaving)


def actor_name(app, member):
    return f"{app}:{member}"


def existing(app):
    """Names of the app's members that Ray has, such as `backend-0`."""
    found = ray.util.list_named_actors(all_namespaces=True)
    prefix = actor_name(app, "")
    names = [actor["name"][len(prefix):] for actor in found if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix)]
    return sorted(name for name in names if name != "controller")


def group_of(settings, role, index):
    """The placement group of a member, and the number of its bundle. Each backend has a group of its own, since backends come and go;
    the members of another role share one group, which spreads them over nodes."""
    count = 1 if role == "backend" else getattr(settings, f"{role}s")
    name = actor_name(settings.name, f"{role}-{index}" if role == "backend" else f"{role}s")
    with contextlib.suppress(ValueError):
        group = ray.util.get_placement_group(name)
        if placement_group_table(group)["state"] != "REMOVED":
            return group
    return placement_group([settings.bundle(role)] * count, strategy="SPREAD", name=name, lifetime="detached")


def make(settings, role, index):
    """Finds or makes a member. Its actor starts once Ray has a node for the placement group."""
    group = group_of(settings, role, index)
    bundle = settings.bundle(role)
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0 if role == "backend" else index)
    actor = Member.options(name=actor_name(settings.name, f"{role}-{index}"), namespace=NAMESPACE, lifetime="detached", get_if_exists=True,
                           num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), scheduling_strategy=place)
    return Record(role, index, group, actor.remote(f"{settings.name}-{role}-{index}"))


def remove(record):
    """Removes an actor whose process has ended, and its reservation."""
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
        ray.get(record.actor.remove_folder.remote(), timeout=5)
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.kill(record.actor)
    if record.role == "backend":
        remove_placement_group(record.group)


def look(record):
    """Asks a member how it is, without waiting for it: takes the answer to the last question, or goes on waiting for it."""
    if record.asked is None:
        record.asked = record.actor.look.remote()
    done, _ = ray.wait([record.asked], timeout=0)
    if not done:
        return
    asked, record.asked = record.asked, None
    try:
        record.seen = ray.get(asked)
    except ray.exceptions.RayActorError:
        # Ray starts the actor again. Its new process knows nothing.
        record.seen = None


def waits_for(settings, record):
    """Why a member has not answered: it has no node yet, or its actor starts."""
    state = placement_group_table(record.group).get("state")
    if state in ("PENDING", "RESCHEDULING"):
        needs = " and ".join(f"{amount:g} {kind}" for kind, amount in settings.bundle(record.role).items())
        have = ", ".join(f"{amount:g} {kind}" for kind, amount in sorted(ray.available_resources().items()) if kind in ("CPU", "GPU"))
        return f"it waits for a node with {needs}; free in the Ray cluster: {have or 'nothing'}"
    return "its actor starts"
