#!/usr/bin/env python3
"""Writes the protocol's .proto files from the descriptors in the `tritonclient` wheel.

The Open Inference Protocol and Triton's model configuration are interfaces: names, numbers
and types must be exactly those that clients were built with, so they are read from the
descriptors those clients carry instead of being typed in.

    pip install 'tritonclient[grpc]==2.73.0' && python tools/proto_from_wheel.py crates/protocol/proto
"""
import pathlib
import sys

from google.protobuf import descriptor_pb2 as pb
from tritonclient.grpc import model_config_pb2, service_pb2

SCALARS = {
    1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 6: "fixed64", 7: "fixed32",
    8: "bool", 9: "string", 12: "bytes", 13: "uint32", 15: "sfixed32", 16: "sfixed64", 17: "sint32", 18: "sint64",
}


def type_name(field, package):
    if field.type in SCALARS:
        return SCALARS[field.type]
    return field.type_name.removeprefix(f".{package}.")


def write_enum(enum, indent):
    pad = "  " * indent
    lines = [f"{pad}enum {enum.name} {{"]
    if enum.options.allow_alias:
        lines.append(f"{pad}  option allow_alias = true;")
    lines += [f"{pad}  {v.name} = {v.number};" for v in enum.value]
    return lines + [f"{pad}}}"]


def write_field(field, message, package):
    entry = next((n for n in message.nested_type
                  if n.options.map_entry and field.type_name.endswith(f".{message.name}.{n.name}")), None)
    if entry is not None:
        kind = f"map<{type_name(entry.field[0], package)}, {type_name(entry.field[1], package)}>"
    else:
        kind = type_name(field, package)
        if field.label == pb.FieldDescriptorProto.LABEL_REPEATED:
            kind = "repeated " + kind
    return f"{kind} {field.name} = {field.number};"


def write_message(message, indent, package):
    pad = "  " * indent
    lines = [f"{pad}message {message.name} {{"]
    for enum in message.enum_type:
        lines += write_enum(enum, indent + 1)
    for nested in message.nested_type:
        if not nested.options.map_entry:
            lines += write_message(nested, indent + 1, package)
    written = set()
    for field in message.field:
        if field.HasField("oneof_index"):
            if field.oneof_index in written:
                continue
            written.add(field.oneof_index)
            lines.append(f"{pad}  oneof {message.oneof_decl[field.oneof_index].name} {{")
            lines += [f"{pad}    {write_field(f, message, package)}" for f in message.field
                      if f.HasField("oneof_index") and f.oneof_index == field.oneof_index]
            lines.append(f"{pad}  }}")
        else:
            lines.append(f"{pad}  {write_field(field, message, package)}")
    return lines + [f"{pad}}}"]


def write_file(module, folder):
    file = pb.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(file)
    lines = [
        "// Written by tools/proto_from_wheel.py from the descriptors in the tritonclient wheel",
        "// (interface by NVIDIA, BSD-3-Clause). Do not edit.",
        'syntax = "proto3";', "", f"package {file.package};", "",
    ]
    lines += [f'import "{name}";' for name in file.dependency]
    for enum in file.enum_type:
        lines += [""] + write_enum(enum, 0)
    for message in file.message_type:
        lines += [""] + write_message(message, 0, file.package)
    for service in file.service:
        lines += ["", f"service {service.name} {{"]
        for m in service.method:
            take = ("stream " if m.client_streaming else "") + m.input_type.removeprefix(f".{file.package}.")
            give = ("stream " if m.server_streaming else "") + m.output_type.removeprefix(f".{file.package}.")
            lines.append(f"  rpc {m.name}({take}) returns ({give}) {{}}")
        lines.append("}")
    (folder / file.name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    target = pathlib.Path(sys.argv[1])
    for module in (model_config_pb2, service_pb2):
        write_file(module, target)
