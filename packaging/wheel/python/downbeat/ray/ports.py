"""Ports of a node."""
import contextlib
import random
import socket

from .commands import CannotStart

# Ray's own workers listen below, and the kernel gives out ports above.
LOWEST, HIGHEST = 20_000, 65_535


def take(address, wishes):
    """A port of `address` for each kind of `{kind: wished port}`; 0 is any free port. A wished port that is in use is an error."""
    with contextlib.ExitStack() as stack:
        return {kind: _listen(stack, address, kind, port) for kind, port in wishes.items()}


def _listen(stack, address, kind, port):
    """Holds the port until all ports are known, so that no two kinds get the same."""
    if port:
        if not _is_bound(stack, address, port):
            raise CannotStart(f"port {port} of {address} is in use by another program: stop that program, or give deploy({kind}_port=0) for any free port")
        return port
    for candidate in random.sample(range(LOWEST, _highest()), 500):
        if _is_bound(stack, address, candidate):
            return candidate
    raise CannotStart(f"no port of {address} is free")


def _is_bound(stack, address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = stack.enter_context(socket.socket(family))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen()
    except OSError:
        return False
    return True


def _highest():
    with contextlib.suppress(OSError, ValueError), open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        lowest_of_kernel = int(file.read().split()[0])
        if lowest_of_kernel > LOWEST + 1000:
            return lowest_of_kernel
    return HIGHEST
