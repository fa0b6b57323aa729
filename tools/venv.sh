#!/usr/bin/env bash
# Makes a Python environment, or brings one up to date:
#
#     tools/venv.sh target/clients-venv --requirement tests/clients/requirements.txt highsbox==1.15.1
#
# The packages come by uv, which fetches and unpacks them side by side: the clients' packages take 30 s, and by pip 180 s.
# Where uv finds no registry (it does not read pip's configuration), pip fetches them.
set -euo pipefail

venv=$1
shift
python=$venv/bin/python
[ -x "$python" ] || python3 -m venv "$venv"
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
[ -x "$venv/bin/uv" ] || pip install uv==0.13.9 || true
if ! "$venv/bin/uv" --quiet pip install --python "$python" "$@" 2>"$venv/uv.log"; then
  echo "venv.sh: uv failed, pip goes on: $(tail -n 1 "$venv/uv.log")" >&2
  pip install "$@"
fi
