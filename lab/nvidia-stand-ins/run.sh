#!/bin/sh -eu
# Runs a command with onnxruntime's CUDA provider on the stand-ins of NVIDIA's libraries: run.sh COMMAND...
# Takes the library of ORT_DYLIB_PATH where it has the provider beside it, else installs onnxruntime-gpu in target/ (255 MB).
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
target=${CARGO_TARGET_DIR:-target}
mkdir -p "$target"
target=$(realpath "$target")
if [ ! -e "$(dirname "${ORT_DYLIB_PATH:-/}")/libonnxruntime_providers_cuda.so" ]; then
    if [ ! -d "$target/onnxruntime-gpu" ]; then
        python3 -m pip install --quiet --no-deps --target "$target/onnxruntime-gpu" onnxruntime-gpu==1.31.1
    fi
    export ORT_DYLIB_PATH="$target/onnxruntime-gpu/onnxruntime/capi/libonnxruntime.so.1.31.1"
fi
cargo build --quiet --package cuda-stand-in
"$here/build.sh" "$target/cuda_stand_ins" "$target/debug/libcuda_stand_in.so"
export LD_LIBRARY_PATH="$target/cuda_stand_ins/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export CUDA_STAND_IN_READABLE=1 DOWNBEAT_REQUIRE_ONNXRUNTIME=1
exec "$@"
