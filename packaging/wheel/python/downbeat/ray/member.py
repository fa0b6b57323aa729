"""The actor that keeps the process of one role."""
import os

import ray

from .process import RoleProcess


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class Member:
    """Runs on the node that Ray chose. All methods return at once: a thread of `RoleProcess` works."""

    def __init__(self, name):
        self.process = RoleProcess(name, ray.util.get_node_ip_address())
        self.node = ray.get_runtime_context().get_node_id()

    def look(self):
        return {**self.process.look(), "node": self.node, "actor_pid": os.getpid()}

    def take_ports(self, wishes):
        self.process.take_ports(wishes)

    def run(self, spec):
        self.process.run(spec)

    def replace(self, how):
        self.process.replace(how)

    def stop(self):
        self.process.stop()

    def log(self, lines):
        return self.process.log(lines)

    def remove_folder(self):
        self.process.remove_folder()
