#!/usr/bin/env bash
# Makes a container image without a container engine, and tries it:
#
#     packaging/image.sh                     # target/packages/downbeat-0.1.0-x86_64-image.tar, an OCI archive
#     packaging/image.sh --engine cpu        # with ONNX Runtime: ...-image-cpu.tar
#
# The program is that of the archive (packaging/build.sh). Debian's mmdebstrap makes the root file system: libc, libgcc,
# certificates and time zones, without a shell. umoci packs it. Needs Debian's mmdebstrap, umoci and bubblewrap.
set -euo pipefail
cd "$(dirname "$0")/.."

engine=none suite=trixie
while [ $# -gt 0 ]; do
  case $1 in
    --engine) engine=${2:-} && shift 2 ;;
    --suite) suite=${2:?"--suite needs a release of Debian"} && shift 2 ;;
    *) echo "image.sh: unknown argument $1; there are --engine none|cpu and --suite NAME" >&2 && exit 2 ;;
  esac
done
case $engine in
  none) suffix= packages="ca-certificates tzdata" ;;
  cpu) suffix=-cpu packages="ca-certificates tzdata libstdc++6" ;;
  *) echo "image.sh: --engine is '$engine'; it may be none or cpu (the Dockerfile also has cuda)" >&2 && exit 2 ;;
esac
for tool in mmdebstrap umoci bwrap; do
  command -v $tool >/dev/null || { echo "image.sh: $tool is missing (on Debian: apt-get install mmdebstrap umoci bubblewrap)" >&2 && exit 1; }
done

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
machine=$(uname -m)
out=$PWD/target/packages
archive=$out/downbeat-$version-$machine-linux.tar.gz
[ -f "$archive" ] || { echo "image.sh: no $archive; packaging/build.sh archive makes it" >&2 && exit 1; }
# Of the commit, so that the same commit and packages of Debian make the same image.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The packages without those that they need to be configured (a shell, Perl, OpenSSL): each is unpacked by itself.
cat >"$work/unpack" <<'END'
#!/bin/sh
set -eu
root=$1 && shift
folder=$(mktemp -d)
# apt downloads as a user of its own.
chmod 777 "$folder"
cd "$folder"
APT_CONFIG=$MMDEBSTRAP_APT_CONFIG apt-get download -qq "$@"
# What scanners read in images without dpkg.
mkdir -p "$root/var/lib/dpkg/status.d"
for deb in *.deb; do
  dpkg-deb --extract "$deb" "$root"
  dpkg-deb --field "$deb" >"$root/var/lib/dpkg/status.d/${deb%%_*}"
done
rm -r "$folder"
END
cat >"$work/finish" <<'END'
#!/bin/sh
set -eu
root=$1
cat "$root"/usr/share/ca-certificates/mozilla/*.crt >"$root/etc/ssl/certs/ca-certificates.crt"
# Documentation but licences, and programs: the image has one program.
find "$root/usr/share/doc" -type f ! -name copyright -delete
rm -rf "$root"/usr/share/man "$root"/usr/share/lintian "$root"/usr/share/locale "$root"/usr/share/ca-certificates "$root"/usr/share/debconf \
  "$root"/usr/bin/* "$root"/usr/sbin/* "$root"/usr/lib/*/gconv "$root"/usr/lib/*/audit "$root"/usr/lib/systemd "$root"/etc/ca-certificates
find "$root/usr/share/doc" -type d -empty -delete
# base-files has these links; the program names its loader by /lib64.
for folder in bin sbin lib lib64; do
  [ -e "$root/$folder" ] || { mkdir -p "$root/usr/$folder" && ln -s "usr/$folder" "$root/$folder"; }
done
printf 'root:x:0:0:root:/:/sbin/nologin\ndownbeat:x:10001:10001:Downbeat:/:/sbin/nologin\n' >"$root/etc/passwd"
printf 'root:x:0:\ndownbeat:x:10001:\n' >"$root/etc/group"
printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
mkdir -p "$root/tmp" "$root/profiles" "$root/models" "$root/opt/engine" "$root/proc" "$root/sys" "$root/dev"
chmod 1777 "$root/tmp"
chown 10001:10001 "$root/profiles"
END
chmod +x "$work/unpack" "$work/finish"
mmdebstrap --quiet --variant=extract --include=libc6,libgcc-s1 --extract-hook="'$work/unpack' \"\$1\" $packages" \
  --extract-hook="'$work/finish' \"\$1\"" "$suite" "$work/whole.tar"
# Without the files of apt, which mmdebstrap needs to its end, and without those that a container engine makes.
python3 - "$work/whole.tar" "$work/base.tar" <<'END'
import sys, tarfile
left_out = {"etc/apt", "etc/dpkg", "etc/fstab", "etc/hostname", "etc/resolv.conf", "var/cache", "var/log", "var/lib/apt", "var/lib/dpkg/info",
            "var/lib/dpkg/alternatives", "var/lib/dpkg/triggers", "var/lib/dpkg/updates", "var/lib/dpkg/status", "var/lib/dpkg/arch"}
with tarfile.open(sys.argv[1]) as whole, tarfile.open(sys.argv[2], "w") as base:
    for member in whole:
        name = member.name.removeprefix("./")
        if not member.isdev() and not any(name == path or name.startswith(path + "/") for path in left_out):
            base.addfile(member, whole.extractfile(member) if member.isfile() else None)
END

mkdir -p "$work/program/usr/local/bin"
tar -xzf "$archive" -C "$work/program/usr/local/bin" --strip-components=1 --wildcards '*/downbeat'
if [ "$engine" = cpu ]; then
  # The library alone, in the place where `downbeat engine install` puts it. pip is this machine's.
  XDG_CACHE_HOME=$work/program/opt/engine "$work/program/usr/local/bin/downbeat" engine install
fi
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$work/program" -cf "$work/program.tar" .

layout=$work/layout image=$work/layout:$version
umoci init --layout "$layout"
umoci new --image "$image"
umoci raw add-layer --image "$image" --history.comment "Debian $suite: libc6 libgcc-s1 $packages" "$work/base.tar"
umoci raw add-layer --image "$image" --history.comment "downbeat $version" "$work/program.tar"
# As in the Dockerfile.
case $machine in x86_64) architecture=amd64 ;; *) architecture=arm64 ;; esac
ports=()
for port in 8000 8001 8002 8003 8004; do ports+=(--config.exposedports "$port/tcp"); done
umoci config --image "$image" --architecture "$architecture" --os linux --created "$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)" \
  --config.user 10001:10001 --config.workingdir / --config.entrypoint /usr/local/bin/downbeat "${ports[@]}" \
  --config.env PATH=/usr/local/bin --config.env XDG_CACHE_HOME=/opt/engine --config.env DOWNBEAT_PROFILE_CACHE=/profiles \
  --config.env DOWNBEAT_HOST=0.0.0.0 --config.label org.opencontainers.image.title=downbeat \
  --config.label org.opencontainers.image.licenses=Apache-2.0 --config.label "org.opencontainers.image.version=$version"
umoci gc --layout "$layout"
file=$out/downbeat-$version-$machine-image$suffix.tar
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$layout" -cf "$file" .

# The image itself, unpacked again: its program serves as its user, on a file system that nobody can write.
umoci unpack --rootless --image "$image" "$work/bundle"
python3 packaging/try_image.py "$work/bundle"
unpacked=$(du -sm --apparent-size "$work/bundle/rootfs" | cut -f1)
echo "$file: $(($(stat -c %s "$file") / 1000000)) MB, and $unpacked MB unpacked"
