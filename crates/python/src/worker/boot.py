import json, linecache, os, socket, sys, types
control = socket.socket(fileno=os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
def exactly(count):
    data = bytearray()
    while len(data) < count:
        part = control.recv(count - len(data))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)
sys.path[:] = [entry for entry in sys.path if entry]
problem = None
for name, text in json.loads(exactly(int.from_bytes(exactly(4), "little"))):
    file = "<downbeat>/" + name + ".py"
    module = types.ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    sys.modules[name] = module
    try:
        exec(compile(text, file, "exec"), module.__dict__)
    except ImportError as error:
        problem = error
        if name == "downbeat_worker":
            raise
sys.modules["downbeat_worker"].main(control, problem)
