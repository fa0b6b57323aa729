"""`python -m downbeat.ray`: the state of the apps that run on a Ray cluster."""
import argparse
import json
import sys

from . import DeployError, connect, running


def text(status):
    """A status as people read it; its form follows that of `serve status`."""
    lines = [f"{status['name']}:", f"  status: {status['state']}", f"  addresses: {', '.join(status['addresses']) or 'none'}"]
    if status["advice"]:
        lines.append(f"  advice: {status['advice']['wanted']} devices wanted, {status['advice']['devices']} there")
    for role in ("scheduler", "backend", "frontend"):
        members = [member for member in status["members"] if member["role"] == role]
        lines.append(f"  {role}s: {sum(member['state'] == 'ready' for member in members)} of {len(members)} ready")
        lines += [f"    {line(member)}" for member in members]
    return "\n".join(lines)


def line(member):
    reason = f" ({member['reason'].splitlines()[0]})" if member["reason"] else ""
    starts = f", started {member['starts']} times" if member["starts"] > 1 else ""
    return f"{member['name']}: {member['state']}{reason} at {member.get('http', 'no node')}{starts}"


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m downbeat.ray", description="Shows and changes Downbeat's apps on the Ray cluster of RAY_ADDRESS, or of this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help in (("status", "print what runs where"), ("scale", "set the number of backends"), ("log", "print the end of a process's log"), ("shutdown", "end an app")):
        command = commands.add_parser(name, help=help)
        command.add_argument("--name", help="the app; without it the only one, or for status all")
        if name == "status":
            command.add_argument("--json", action="store_true", help="print JSON")
        if name == "scale":
            command.add_argument("backends", type=int, help="number of backends")
        if name == "log":
            command.add_argument("member", help="such as backend-0")
    return run(parser.parse_args(arguments))


def run(options):
    names = [options.name] if options.name else running()
    if options.command != "status" and len(names) != 1:
        raise LookupError(f"name the app by --name; running: {', '.join(names) or 'none'}")
    for app in map(connect, names):
        if options.command == "status":
            print(json.dumps(app.status(), indent=2) if options.json else text(app.status()))
        elif options.command == "scale":
            app.scale(backends=options.backends)
        elif options.command == "log":
            print(app.log(options.member))
        else:
            app.shutdown()
    if not names:
        print("no app runs")


if __name__ == "__main__":
    try:
        main()
    except (ConnectionError, DeployError, LookupError, ValueError) as error:
        sys.exit(f"downbeat.ray: {error}")
