#!/usr/bin/env python3
"""Blanks the GPU code of other architectures in a CUDA library, so that it compresses to a fraction of its size.

    python tools/strip_fatbin.py [--arch 90] [--dry-run] LIBRARY OUTPUT

A CUDA library carries its kernels compiled for each GPU architecture, as entries of "fatbin" containers in the ELF section
`.nv_fatbin`. The payload of every entry that a GPU of compute capability ARCH (9.0 as 90: H100, H200) cannot need is
overwritten with zeros; its header stays, so the containers can still be walked, and the file keeps its size and its symbols:
compress it afterwards (`zstd -19`). Kept in each container: machine code of the architecture itself, else that of the newest
one of the same major version not above it, else the PTX of the newest version not above it. A container with none of these
is left as it is.

For carrying onnxruntime's CUDA provider to a machine that cannot fetch it: 284 MB become 53 MB under `zstd -19`. The result
runs on that architecture only, elsewhere CUDA reports "no kernel image is available for execution on the device".
"""
import argparse
import collections
import mmap
import pathlib
import shutil
import struct
import sys

# NVIDIA does not document the format: a container is this header and then entries, each its own
# header and a payload. A file that does not fit this reading is refused rather than blanked.
CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, bytes of entries that follow it
MAGIC = 0xBA55ED50
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, header bytes, payload bytes, compressed bytes, -, minor, major, arch
PTX, MACHINE_CODE = 1, 2


def section(data, name):
    """The file offset and size of the ELF section `name`."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    table, = struct.unpack_from("<Q", data, 0x28)
    width, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + width * i) for i in range(count)]
    names = headers[names_at][4]
    for header in headers:
        start = names + header[0]
        if data[start:data.find(b"\0", start)] == name.encode():
            return header[4], header[5]
    raise ValueError(f"no section {name}: not a library with CUDA kernels")


def containers(data, start, size):
    """The entries of each fatbin container, as lists of (kind, arch, payload offset, payload bytes)."""
    at, end = start, start + size
    while at + CONTAINER.size <= end:
        magic, _, header, length = CONTAINER.unpack_from(data, at)
        if magic != MAGIC:
            # Containers are aligned to 8 bytes, with zeros between them.
            if data[at:at + 8].strip(b"\0"):
                raise ValueError(f"unknown data at offset {at:#x} of .nv_fatbin")
            at += 8
            continue
        entries, inner, last = [], at + header, at + header + length
        if last > end:
            raise ValueError(f"the container at offset {at:#x} ends outside .nv_fatbin")
        while inner + ENTRY.size <= last:
            kind, _, head, payload, *_, arch = ENTRY.unpack_from(data, inner)
            if kind not in (PTX, MACHINE_CODE) or head < ENTRY.size or inner + head + payload > last:
                raise ValueError(f"unknown entry at offset {inner:#x}")
            entries.append((kind, arch, inner + head, payload))
            inner += head + payload
        yield entries
        at = last


def kept(entries, arch):
    """Which kind and architecture of a container's entries to keep; None to keep all."""
    code = [a for kind, a, *_ in entries if kind == MACHINE_CODE and a // 10 == arch // 10 and a <= arch]
    if code:
        return MACHINE_CODE, max(code)
    text = [a for kind, a, *_ in entries if kind == PTX and a <= arch]
    return (PTX, max(text)) if text else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability times ten (90: H100, H200)")
    parser.add_argument("--dry-run", action="store_true", help="print what the library holds and write nothing")
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path, nargs="?")
    arguments = parser.parse_args()
    if not arguments.dry_run:
        if arguments.output is None:
            parser.error("name the OUTPUT file (or ask for --dry-run)")
        if arguments.output.exists() and arguments.output.samefile(arguments.library):
            parser.error("OUTPUT is LIBRARY itself: name another file")
        shutil.copyfile(arguments.library, arguments.output)
    try:
        totals = blank(arguments)
    except BaseException:
        # A reader must not take a half-blanked library for a whole one.
        if not arguments.dry_run:
            arguments.output.unlink(missing_ok=True)
        raise
    print("kind arch  entries     bytes      kept")
    for (kind, arch), (count, size, left) in sorted(totals.items()):
        print(f"{'PTX ' if kind == PTX else 'code'} {arch:4} {count:8} {size:9} {left:9}")


def blank(arguments):
    """Blanks what is not kept; by (kind, arch): entries, bytes, bytes kept."""
    totals = collections.defaultdict(lambda: [0, 0, 0])
    path = arguments.library if arguments.dry_run else arguments.output
    access = mmap.ACCESS_READ if arguments.dry_run else mmap.ACCESS_WRITE
    with open(path, "rb" if arguments.dry_run else "r+b") as file, mmap.mmap(file.fileno(), 0, access=access) as data:
        for entries in containers(data, *section(data, ".nv_fatbin")):
            keep = kept(entries, arguments.arch)
            for kind, arch, at, size in entries:
                total = totals[kind, arch]
                total[0] += 1
                total[1] += size
                if keep in (None, (kind, arch)):
                    total[2] += size
                elif not arguments.dry_run:
                    data[at:at + size] = bytes(size)
    return totals


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"strip_fatbin: {error}")
