#!/usr/bin/env bash
# Builds the program for glibc 2.28 and puts it into packages, in target/packages:
#
#     packaging/build.sh                          # dist: everything
#     packaging/build.sh --profile ci wheel archive
#
# The packages are `wheel`, `archive` and `deb`. All of them have the same program, whose debug information is in an
# archive of its own. `maturin` builds the program; the tools come into target/packaging-venv.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=dist
if [ "${1:-}" = --profile ]; then
  profile=${2:?"--profile needs a profile of Cargo.toml, such as dist"}
  shift 2
fi
kinds=${*:-wheel archive deb}
for kind in $kinds; do
  case $kind in
    wheel | archive | deb) ;;
    *) echo "build.sh: there is no package '$kind'; it may be wheel, archive or deb" >&2 && exit 2 ;;
  esac
done
machine=$(uname -m)
if [ "$machine" = x86_64 ]; then debian=amd64; else debian=arm64; fi
case $(uname -s)-$machine in
  Linux-x86_64 | Linux-aarch64) ;;
  *) echo "build.sh: packages are for Linux on x86_64 and aarch64, and this is $(uname -sm)" >&2 && exit 1 ;;
esac
for tool in python3 objcopy; do
  command -v $tool >/dev/null || { echo "build.sh: $tool is missing (on Debian: apt-get install python3 python3-venv binutils)" >&2 && exit 1; }
done

venv=target/packaging-venv
tools/venv.sh "$venv" --requirement packaging/requirements.txt
# The tools by absolute paths: maturin starts zig by the `python3` on the path.
PATH="$PWD/$venv/bin:$PATH"

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
# The time of the files in the packages: the same commit makes the same packages.
[ -n "${SOURCE_DATE_EPOCH:-}" ] || SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
out=$PWD/target/packages work=$PWD/target/packages/work
rm -rf "$work"
mkdir -p "$work/raw"

# Not compressed, as this wheel is taken apart below.
(cd packaging/wheel && maturin build --zig --profile "$profile" --target "$machine-unknown-linux-gnu" \
  --compression-method stored --out "$work/raw")
python -m wheel unpack --dest "$work" "$work"/raw/*.whl
program=$(echo "$work"/downbeat_server-*/downbeat_server-*.data/scripts/downbeat)
# The crates in the program, as maturin lists them.
sbom=$(echo "$work"/downbeat_server-*/downbeat_server-*.dist-info/sboms/downbeat.cyclonedx.json)
tools/split_debug.sh "$program"
mv "$program.debug" "$work/downbeat.debug"
rm -r "$work/raw"

# Packs a folder of $work. The files have the owner root, and the order and times that every build gives them.
pack() {
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$work" -c "$1" | gzip -n >"$out/$1.tar.gz"
}

# Copies the manual pages, completions and examples, whose folders are named.
extras() {
  local man=$1 bash=$2 zsh=$3 fish=$4 examples=$5
  mkdir -p "$man" "$bash" "$zsh" "$fish" "$examples"
  "$program" man "$man"
  "$program" completions bash >"$bash/downbeat"
  "$program" completions zsh >"$zsh/_downbeat"
  "$program" completions fish >"$fish/downbeat.fish"
  cp -r examples/models examples/digit.json examples/digit.png examples/downbeat.toml "$examples"
}

wheel() {
  rm -f "$out"/downbeat_server-*.whl
  python -m wheel pack --dest-dir "$out" "$work/downbeat_server-$version"
}

archive() {
  local name=downbeat-$version-$machine-linux
  local folder=$work/$name
  extras "$folder/man" "$folder/completions" "$folder/completions" "$folder/completions" "$folder/examples"
  mv "$folder/completions/downbeat" "$folder/completions/downbeat.bash"
  install -m 755 "$program" "$folder/downbeat"
  install -m 644 LICENSE CHANGELOG.md "$sbom" "$folder"
  install -m 644 -T packaging/archive/README "$folder/README.md"
  pack "$name"
  mkdir "$work/$name-debug"
  install -m 644 "$work/downbeat.debug" "$work/$name-debug"
  pack "$name-debug"
}

deb() {
  command -v dpkg-deb >/dev/null || { echo "build.sh: dpkg-deb is missing, which makes the Debian package" >&2 && exit 1; }
  local root=$work/deb
  local share=$root/usr/share
  local doc=$share/doc/downbeat
  extras "$share/man/man1" "$share/bash-completion/completions" "$share/zsh/vendor-completions" \
    "$share/fish/vendor_completions.d" "$doc/examples"
  gzip -9n "$share"/man/man1/*
  install -D -m 755 "$program" "$root/usr/bin/downbeat"
  install -D -m 644 -t "$root/usr/lib/systemd/system" packaging/debian/downbeat.service
  install -D -m 644 -t "$root/etc/downbeat" packaging/debian/downbeat.toml
  install -D -m 644 -t "$doc" packaging/debian/copyright packaging/debian/gpu.conf "$sbom"
  gzip -9nc CHANGELOG.md >"$doc/CHANGELOG.md.gz"
  mkdir "$root/DEBIAN"
  install -m 755 -t "$root/DEBIAN" packaging/debian/postinst packaging/debian/prerm packaging/debian/postrm
  echo /etc/downbeat/downbeat.toml >"$root/DEBIAN/conffiles"
  sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$debian/" -e "s/@SIZE@/$(du -sk --exclude DEBIAN "$root" | cut -f1)/" \
    packaging/debian/control >"$root/DEBIAN/control"
  (cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)
  chmod -R u=rwX,go=rX "$root"
  dpkg-deb --root-owner-group -Zxz --build "$root" "$out/downbeat_${version}_$debian.deb" >/dev/null
}

for kind in $kinds; do $kind; done
rm -rf "$work/deb"
(cd "$out" && find . -maxdepth 1 -type f -printf '%12s  %P\n' | sort -k2)
