#!/usr/bin/env bash
# libFuzzer on the targets named, or on all, for so many seconds each: fuzz/run.sh SECONDS [TARGET...]. What it finds worth keeping goes to
# target/fuzz/corpus, from where the next run goes on; bytes that end a target to target/fuzz/artifacts. seeds/ is only read.
set -euo pipefail
cd "$(dirname "$0")"

seconds=${1:-60}
targets=("${@:2}")
[ "${#targets[@]}" -gt 0 ] || mapfile -t targets < <(ls seeds)

# Sanitizers' flags are unstable; the stable compiler takes them with this.
export RUSTC_BOOTSTRAP=1
# A program is not optimised for many minutes to run for one.
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=1
out=$PWD/../target/fuzz
failed=()
for target in "${targets[@]}"; do
  printf '\n== %s (%d s)\n' "$target" "$seconds"
  mkdir -p "$out/corpus/$target" "$out/artifacts/$target"
  # A leak is looked for by the soak, in the whole server; here a frontend lives until the end.
  cargo fuzz run --fuzz-dir . "$target" --features libfuzzer --codegen-units 16 --target-dir "$out" "$out/corpus/$target" "seeds/$target" -- \
    -max_total_time="$seconds" -timeout=30 -rss_limit_mb=2048 -malloc_limit_mb=1024 -max_len=65536 -detect_leaks=0 -print_final_stats=1 \
    -artifact_prefix="$out/artifacts/$target/" || failed+=("$target")
done
if [ "${#failed[@]}" -gt 0 ]; then
  printf '\nfailed: %s\n' "${failed[*]}" >&2
  exit 1
fi
