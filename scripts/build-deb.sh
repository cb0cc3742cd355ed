#!/bin/bash
# Builds a Debian package from a wheel: kvfs and all it needs of PyPI in an environment of its own,
# /usr/lib/kvfs/VERSION, and what `kvfs setup` installs. It runs with the Python of the distribution
# on which it is built. The version in the path lets two versions be there during an upgrade.
#
#     scripts/build-deb.sh [--version VERSION] [--wheel FILE] [DIRECTORY]      default dist
#
# Without --wheel it calls scripts/build-wheel.sh. Without --version the package has the wheel's.
set -euo pipefail
usage="usage: scripts/build-deb.sh [--version VERSION] [--wheel FILE] [DIRECTORY], default dist"
python=/usr/bin/python3

say() { echo "build-deb: $*" >&2; }
fail() {
    say "$*"
    exit 2
}
version=
wheel=
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help)
        echo "$usage"
        exit 0
        ;;
    --version | --wheel)
        [ $# -ge 2 ] || fail "$1 needs a value; $usage"
        case $1 in
        --version) version=$2 ;;
        --wheel) wheel=$(realpath "$2") ;;
        esac
        shift
        ;;
    -*) fail "unknown option $1; $usage" ;;
    *) break ;;
    esac
    shift
done
[ $# -lt 2 ] || fail "$2 is one word too many; $usage"
mkdir -p "${1:-dist}"
out=$(cd "${1:-dist}" && pwd)
cd "$(dirname "$0")/.."
command -v dpkg-deb >/dev/null || fail "dpkg-deb is not there: build on Debian or Ubuntu"
[ -x "$python" ] || fail "$python is not there: apt-get install python3"

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT
if [ -z "$wheel" ]; then
    PYTHON=$python scripts/build-wheel.sh "$work/dist"
    wheel=$(echo "$work"/dist/kvfs-*.whl)
fi
[ -f "$wheel" ] || fail "--wheel $wheel: expected a file of scripts/build-wheel.sh"
name=${wheel##*/}
minor=$("$python" -c 'import sys; print(sys.version_info.minor)')
case $name in
kvfs-*-cp3"$minor"-*) ;;
*) fail "$name is not for CPython 3.$minor of $python: PYTHON=$python scripts/build-wheel.sh" ;;
esac
: "${version:=$(echo "$name" | cut -d - -f 2)}"
libc=$(echo "$name" | sed -n 's/.*manylinux_\([0-9]*\)_\([0-9]*\)_.*/\1.\2/p')
[ -n "$libc" ] || fail "$name has no tag manylinux: expected a file of scripts/build-wheel.sh"

root=$work/root
home=usr/lib/kvfs/$version
"$python" -m venv --without-pip "$root/$home"
"$python" -m venv "$work/tools"
"$work/tools/bin/python" -m pip --quiet --disable-pip-version-check \
    --python "$root/$home/bin/python3" install --no-compile "$wheel[pool]"
(cd / && PYTHONDONTWRITEBYTECODE=1 "$root/$home/bin/kvfs" setup --prefix /usr --root "$root") >&2
# Both links say where the files will be. No other program of the environment is anyone's.
ln -sfn "/$home/bin/kvfs" "$root/usr/bin/kvfs"
ln -sfn "/$home/lib/python3.$minor/site-packages/kvfs/share" "$root/usr/share/kvfs"
rm -rf "$root/$home"/include "$root/$home"/lib/{pkgconfig,cmake,libblosc*}
find "$root/$home/bin" -mindepth 1 ! -name 'python*' ! -name kvfs -delete
sed -i "1s|.*|#!/$home/bin/python3|" "$root/$home/bin/kvfs"
sed -i "s|$root||g" "$root/$home/pyvenv.cfg"
# Programs of root must not leave files behind that dpkg does not know. The bytecode is not checked
# against the sources, whose times an archive changes.
"$python" -m compileall -q --invalidation-mode unchecked-hash -s "$root" "$root/$home/lib"
find "$root/usr/share/man" -type f -exec gzip --no-name --best {} +

mkdir -p "$root/DEBIAN" "$root/usr/share/doc/kvfs" "$root/etc/kvfs"
install -m 0644 LICENSE "$root/usr/share/doc/kvfs/copyright"
for page in README.md ARCHITECTURE.md SEMANTICS.md CHANGELOG.md docs examples mount; do
    ln -s "../../kvfs/$page" "$root/usr/share/doc/kvfs/$page"
done
for script in control preinst postinst prerm postrm; do
    sed -e "s|@VERSION@|$version|g" -e "s|@ARCHITECTURE@|$(dpkg --print-architecture)|g" \
        -e "s|@PYTHON@|3.$minor|g" -e "s|@NEXT_PYTHON@|3.$((minor + 1))|g" -e "s|@LIBC@|$libc|g" \
        "mount/debian/$script" >"$root/DEBIAN/$script"
    [ $script = control ] || chmod 0755 "$root/DEBIAN/$script"
done
echo "Installed-Size: $(du -sk "$root" | cut -f 1)" >>"$root/DEBIAN/control"
chmod -R u+rwX,go+rX,go-w "$root"
package=$out/kvfs_${version}_$(dpkg --print-architecture).deb
dpkg-deb --root-owner-group -Zxz -z1 --build "$root" "$package" >/dev/null
say "$package"
