"""Runs a program that gets SIGTERM when its parent process ends: `launch.py PARENT PROGRAM ARGUMENT...`.

This is a program of its own because Python must not run code between fork and exec in a process with threads."""
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    # The parent may have ended before the signal was asked for.
    if os.getppid() != parent:
        sys.exit("the actor has ended")
    # A worker of Ray ignores or blocks signals that the program expects.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    os.execv(command[0], command)
