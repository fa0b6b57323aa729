#!/usr/bin/env bash
# Tries the pages about coming from other servers, with these servers from PyPI in environments of their own:
#
#     tools/peers/migrate_check.sh target/release/downbeat                      # all
#     tools/peers/migrate_check.sh target/release/downbeat bentoml ray_serve    # some
#
# Fetches about 500 MB into target/peers once. The servers and Downbeat take their default ports. Needs ApacheBench (`ab`).
set -euo pipefail
cd "$(dirname "$0")/../.."

program=${1:?"name the program, such as target/release/downbeat"}
shift
pages=${*:-mlserver bentoml ray_serve triton}
command -v ab >/dev/null || { echo "migrate_check.sh: ab is missing (on Debian: apt-get install apache2-utils)" >&2 && exit 1; }
mkdir -p target/peers/bin
ln -sf "$(realpath "$program")" target/peers/bin/downbeat

for page in $pages; do
  case $page in
    mlserver) file=from_mlserver packages=(mlserver==1.7.1 uvloop==0.21.0 onnxruntime "tritonclient[grpc]") ;;
    bentoml) file=from_bentoml packages=(bentoml==1.4.40 onnxruntime) ;;
    ray_serve) file=from_ray_serve packages=("ray[serve]==2.60.0" onnxruntime) ;;
    triton) file=triton packages=(nvidia-pytriton==0.7.0 onnxruntime "tritonclient[http]") ;;
    *) echo "migrate_check.sh: there is no page about '$page'; it may be mlserver, bentoml, ray_serve or triton" >&2 && exit 2 ;;
  esac
  venv=target/peers/$page
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
  # The library beside which the model's other answers were computed.
  ORT_DYLIB_PATH=$(echo "$PWD/$venv"/lib/python3*/site-packages/onnxruntime/capi/libonnxruntime.so.*)
  export ORT_DYLIB_PATH
  "$venv/bin/python" tools/try_page.py "docs/guide/$file.md" --path target/peers/bin --path "$venv/bin"
done
