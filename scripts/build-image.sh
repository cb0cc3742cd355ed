#!/bin/bash
# Builds the image of the Helm chart as an OCI archive: a minimal Debian and the package of kvfs. It
# pulls no image; mmdebstrap gets the packages of Debian. For the release of Debian on which it runs.
#
#     scripts/build-image.sh [--deb FILE] [--tag TAG] [ARCHIVE]      default dist/kvfs-image.tar
#
# Without --deb it calls scripts/build-deb.sh. TAG is the name in the archive, by default kvfs's
# version. As root, with mmdebstrap and umoci (apt-get install mmdebstrap umoci). Then, for example:
#     skopeo copy oci-archive:dist/kvfs-image.tar docker://REGISTRY/kvfs:0.1.0
set -euo pipefail
usage="usage: scripts/build-image.sh [--deb FILE] [--tag TAG] [ARCHIVE], default dist/kvfs-image.tar"

say() { echo "build-image: $*" >&2; }
fail() {
    say "$*"
    exit 2
}
deb=
tag=
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        echo "$usage"
        exit 0
        ;;
    --deb | --tag)
        [ $# -ge 2 ] || fail "$1 needs a value; $usage"
        case $1 in
        --deb) deb=$(realpath "$2") ;;
        --tag) tag=$2 ;;
        esac
        shift
        ;;
    -*) fail "unknown option $1; $usage" ;;
    *) break ;;
    esac
    shift
done
[ $# -lt 2 ] || fail "$2 is one word too many; $usage"
archive=$(realpath --canonicalize-missing "${1:-dist/kvfs-image.tar}")
mkdir -p "${archive%/*}"
cd "$(dirname "$0")/.."
[ "$(id -u)" -eq 0 ] || fail "run it as root: the files of the image belong to root"
for tool in mmdebstrap umoci; do
    command -v $tool >/dev/null || fail "$tool is not there: apt-get install mmdebstrap umoci"
done

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
if [ -z "$deb" ]; then
    scripts/build-deb.sh "$work"
    deb=$(echo "$work"/kvfs_*.deb)
fi
[ -f "$deb" ] || fail "--deb $deb: expected a file of scripts/build-deb.sh"
: "${tag:=$(dpkg-deb --field "$deb" Version)}"
release=$(. /etc/os-release && echo "$VERSION_CODENAME")

# The image has nginx-light for the pool. It has no documentation but the licences, and no lists of packages. Of init it has nothing:
# a keeper is its process 1.
umoci init --layout "$work/image"
umoci new --image "$work/image:$tag"
umoci unpack --image "$work/image:$tag" "$work/bundle"
rmdir "$work/bundle/rootfs"
cp "$deb" "$work/kvfs.deb"
mmdebstrap --quiet --variant=minbase --include=ca-certificates,fuse3,nginx-light,python3-minimal \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook="copy-in $work/kvfs.deb /tmp" \
    --customize-hook='chroot "$1" apt-get install --yes --quiet --no-install-recommends /tmp/kvfs.deb' \
    --customize-hook='rm "$1/tmp/kvfs.deb"' \
    "$release" "$work/bundle/rootfs" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    say "mmdebstrap failed"
    exit 1
}
umoci repack --image "$work/image:$tag" "$work/bundle"
umoci config --image "$work/image:$tag" --config.entrypoint kvfs \
    --config.env PATH=/usr/sbin:/usr/bin:/sbin:/bin --config.env PYTHONDONTWRITEBYTECODE=1
umoci gc --layout "$work/image" >/dev/null
tar --create --file "$archive" --directory "$work/image" .
say "$archive (tag $tag)"
