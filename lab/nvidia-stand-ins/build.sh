#!/bin/sh -eu
# Builds the stand-ins of NVIDIA's libraries: build.sh FOLDER DRIVER, where DRIVER is libcuda_stand_in.so of lab/cuda-stand-in.
# Needs gcc 12 or newer and, for NVIDIA's headers, pip. FOLDER/lib is then what LD_LIBRARY_PATH has to name.
here=$(cd "$(dirname "$0")" && pwd)
driver=$(realpath "$2")
mkdir -p "$1/headers" "$1/lib"
cd "$1"
if [ ! -d headers/cudnn ]; then
    python3 -m pip download --quiet --no-deps --dest headers nvidia-cuda-runtime==13.5.37 nvidia-cuda-crt==13.5.37 \
        nvidia-cudnn-cu13==9.28.0.42
    for wheel in headers/*.whl; do python3 -m zipfile -e "$wheel" headers/all; done
    cp -r headers/all/nvidia/cu13/include headers/cuda
    cp -r headers/all/nvidia/cudnn/include headers/cudnn
    rm -r headers/all headers/*.whl
fi
ln -sf "$driver" lib/libcuda.so.1
build() { # build LIBRARY ARGUMENTS...
    library=$1
    shift
    # The provider asks for symbols of the version that is the library's name.
    echo "$library { global: *; };" >headers/map
    gcc -O2 -g -w -shared -fPIC -Iheaders/cuda -Iheaders/cudnn "$@" -o "lib/$library" -Wl,-soname,"$library" -Wl,--version-script=headers/map
}
build libcudart.so.13 "$here/calls.c" "$here/cudart.c" "$here/unsupported.c" "$here/launch.c" "$here/kernels.c" lib/libcuda.so.1 -lm
build libcublas.so.13 "$here/cublas.c" lib/libcudart.so.13
build libcublasLt.so.13 -DLT "$here/cublas.c" lib/libcudart.so.13
build libcudnn.so.9 "$here/cudnn.c" lib/libcudart.so.13
# Those that the engine looks for at its start, of which nothing is used.
for library in libcurand.so.10 libnvrtc.so.13 libcufft.so.12 libcudnn_graph.so.9 libcudnn_ops.so.9 libcudnn_cnn.so.9 libcudnn_adv.so.9 \
    libcudnn_heuristic.so.9 libcudnn_engines_precompiled.so.9 libcudnn_engines_runtime_compiled.so.9; do
    build "$library" -x c /dev/null
done
