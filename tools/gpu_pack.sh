#!/usr/bin/env bash
# Packs what has to travel to measure on a GPU of another machine, which has Python but neither Rust nor a network; tools/gpu_run.py runs there. Prints the commands.
#
#     tools/gpu_pack.sh                 # writes target/gpu-pack/1 and 2, each with this repository's files below 60 MiB
#     ARCH=80 tools/gpu_pack.sh         # for GPUs of compute capability 8.0 (A100); 90 (H100, H200) unless said otherwise
#     BUILT=1 tools/gpu_pack.sh         # with the programs as they were built last
#     WHEEL=FILE tools/gpu_pack.sh      # with a wheel of onnxruntime-gpu that is here already
#
# The other machine: x86-64 with glibc as new as this one's or newer, the NVIDIA driver, CUDA 13 and cuDNN 9 (such as PyTorch's wheels bring).
set -euo pipefail
cd "$(dirname "$0")/.."

arch=${ARCH:-90}
version=1.31.1
limit_mib=60
pack=target/gpu-pack
target=${CARGO_TARGET_DIR:-target}
rm -rf "$pack/1" "$pack/2" "$pack/stage"
mkdir -p "$pack/1" "$pack/2" "$pack/stage" "$pack/wheel"
stage=$pack/stage

if [ -z "${BUILT:-}" ]; then
  cargo build --release -p downbeat -p downbeat-lab
  cargo build --release -p downbeat-engine-ort --example gpu_measure
  tests=$(cargo test --release --no-run -p downbeat-engine-ort --test it --message-format=json 2>/dev/null |
    python3 -c 'import json, sys; print([m["executable"] for m in map(json.loads, sys.stdin) if m.get("executable")][-1])')
else
  tests=$(find "$target/release/deps" -name 'it-*' -type f -executable -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
fi
cp "$target/release/downbeat" "$target/release/downbeat-lab" "$target/release/examples/gpu_measure" "$stage"
cp "$tests" "$stage/engine_tests"
strip "$stage/downbeat" "$stage/downbeat-lab" "$stage/gpu_measure" "$stage/engine_tests"

# What a plain system lacks would be found out too late there.
for binary in "$stage"/*; do
  unusual=$(ldd "$binary" | awk '{print $1}' | grep -vE '^(linux-vdso|libc|libm|libdl|libpthread|librt|libgcc_s|/lib64/ld-linux-x86-64)\.so' || true)
  if [ -n "$unusual" ]; then
    echo "gpu_pack: $binary needs $unusual, which the other machine may not have" >&2
    exit 1
  fi
  echo "$(basename "$binary"): needs glibc $(objdump -T "$binary" | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1 | cut -d_ -f2), $(du -h "$binary" | cut -f1)"
done

wheel=${WHEEL:-$(find "$pack/wheel" -name "onnxruntime_gpu-$version-*.whl" | head -1)}
if [ -z "$wheel" ]; then
  python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \
    --dest "$pack/wheel" "onnxruntime-gpu==$version"
  wheel=$(find "$pack/wheel" -name "onnxruntime_gpu-$version-*.whl" | head -1)
fi
python3 - "$wheel" "$stage" "$version" <<'PY'
import pathlib, shutil, sys, zipfile
wheel, stage, version = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    for name in (f"libonnxruntime.so.{version}", "libonnxruntime_providers_shared.so", "libonnxruntime_providers_cuda.so"):
        with archive.open(f"onnxruntime/capi/{name}") as source, open(pathlib.Path(stage, name), "wb") as target:
            shutil.copyfileobj(source, target)
PY
provider=libonnxruntime_providers_cuda.so
archive=$pack/wheel/provider-$version-$arch.tar.xz
if [ ! -e "$archive" ]; then
  python3 tools/strip_fatbin.py --arch "$arch" "$stage/$provider" "$stage/stripped"
  mv "$stage/stripped" "$stage/$provider"
  # One thread: blocks for several would be compressed apart, and larger.
  tar -C "$stage" -c "$provider" | xz -9e -T1 >"$archive.part"
  mv "$archive.part" "$archive"
fi
cp "$archive" "$pack/1/provider.tar.xz"
rm "$stage/$provider"
tar -C "$stage" -c . | xz -6 -T0 >"$pack/2/programs.tar.xz"
rm -r "$stage"

repository=$(git ls-files -z | xargs -0 du -cb | tail -1 | cut -f1)
for part in 1 2; do
  bytes=$(($(du -sb "$pack/$part" | cut -f1) + repository))
  echo "part $part: $((bytes >> 20)) MiB with the repository's files"
  if [ $((bytes >> 20)) -ge $limit_mib ]; then
    echo "gpu_pack: part $part is above $limit_mib MiB: it may not be let through" >&2
    exit 1
  fi
done
cat <<TEXT

Copy this repository's files with one part at a time ($pack is ignored by git), and run there, in its root:

    python3 tools/gpu_run.py unpack $pack/1 /tmp/gpu                                  # with $pack/1
    python3 tools/gpu_run.py unpack $pack/2 /tmp/gpu && python3 tools/gpu_run.py measure /tmp/gpu "\$OUT"   # with $pack/2, at once after it: 9.3 minutes
    python3 tools/gpu_run.py measure /tmp/gpu "\$OUT" more                             # the second call: the server's policies, larger models
    python3 tools/gpu_run.py measure /tmp/gpu "\$OUT" abacus                           # the third: samples for a predictor
    python3 tools/gpu_run.py measure /tmp/gpu "\$OUT" STEP ...                         # single steps again

"\$OUT" is the folder whose files come back: gpu.md, gpu.jsonl, logs.txt, calibration-*.json, abacus.jsonl.
TEXT
