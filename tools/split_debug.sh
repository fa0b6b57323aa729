#!/usr/bin/env bash
# Strips programs, and keeps the debug information of PROGRAM in PROGRAM.debug beside it. Backtraces and gdb find it there.
#
#     cargo build --profile dist -p downbeat && tools/split_debug.sh target/dist/downbeat
#
# Cargo's own `split-debuginfo` leaves the line tables in the program, where `strip` removes them.
set -euo pipefail

for program; do
  # A second call would replace the debug information by nothing.
  if ! objdump --section-headers "$program" | grep -q '\.debug_line'; then
    echo "split_debug: $program has no debug information (any more)" >&2
    continue
  fi
  objcopy --only-keep-debug --compress-debug-sections=zlib "$program" "$program.debug"
  chmod -x "$program.debug"
  # The name of the file goes into the program, so the call is made beside it.
  (cd "$(dirname "$program")" && name=$(basename "$program") &&
    objcopy --strip-all --add-gnu-debuglink="$name.debug" "$name")
done
