"""The layers of modules: imports are read from the source, also those inside functions."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvfs

ROOT = Path(kvfs.__file__).parent
# From the top down. A module may import its own layer and those below.
LAYERS = (
    ("kvfs.__main__",),
    ("kvfs.engines",),
    ("kvfs.connectors",),
    ("kvfs.cli",),
    ("kvfs.keeper",),
    ("kvfs.daemon", "kvfs.fsck", "kvfs.gc", "kvfs.metrics", "kvfs.web"),
    ("kvfs.control",),
    ("kvfs.fuse",),
    # The floors of the core. Rooms of one floor do not know each other.
    ("kvfs.core.dispatcher",),
    ("kvfs.core.check",),
    ("kvfs.core.jobs",),
    ("kvfs.core.bucket.node",),
    ("kvfs.core.bucket.upload", "kvfs.core.bucket.download", "kvfs.core.pool"),
    ("kvfs.core.fetching",),
    ("kvfs.core.bucket.listing", "kvfs.core.admin", "kvfs.core.lending"),
    ("kvfs.core.names", "kvfs.core.objects", "kvfs.core.moves"),
    ("kvfs.core.capacity",),
    ("kvfs.core.ledger",),
    ("kvfs.core.namespaces",),
    ("kvfs.core.bucket", "kvfs.core"),  # the packages themselves: a docstring each
    ("kvfs.pool",),
    ("kvfs.movement",),
    ("kvfs.fairness", "kvfs.simulation"),
    ("kvfs.eviction", "kvfs.layouts", "kvfs.profiles"),
    ("kvfs.tiers", "kvfs.s3", "kvfs.compression"),
    ("kvfs.catalog",),
    ("kvfs.config", "kvfs.live", "kvfs.templates", "kvfs.settings"),
    ("kvfs.nfs",),
    (
        "kvfs.s3.place",
        "kvfs.pool.place",
        "kvfs.pool.member",
        "kvfs.pool.credentials",
        "kvfs.metrics.address",
    ),  # plain data, that options are read into
    ("kvfs.preflight",),
    ("kvfs.runtime", "kvfs.mounts"),
    ("kvfs.parsing",),
    ("kvfs.client",),  # runs in engines, where there is nothing else of kvfs
    (
        *(
            "kvfs.acl",
            "kvfs.clock",
            "kvfs.errors",
            "kvfs.failpoints",
            "kvfs.own_files",
            "kvfs.rates",
            "kvfs.units",
        ),
        *("kvfs.matching", "kvfs.leasing", "kvfs.prefix"),
    ),
)
# The command line talks to the daemon. It may know the modules that both need, and those that need
# no daemon.
CLI_MAY = (
    *("kvfs.cli", "kvfs.config", "kvfs.profiles", "kvfs.control", "kvfs.runtime"),
    *("kvfs.mounts", "kvfs.settings", "kvfs.simulation", "kvfs.templates", "kvfs.errors"),
    *("kvfs.nfs", "kvfs.parsing", "kvfs.rates", "kvfs.matching", "kvfs.prefix", "kvfs.own_files"),
    "kvfs.units",
)
KEEPER_MAY = (
    *(
        "kvfs.keeper",
        "kvfs.control",
        "kvfs.runtime",
        "kvfs.mounts",
        "kvfs.own_files",
        "kvfs.errors",
        "kvfs.pool.nginx",
    ),
    "kvfs.clock",
)
# A library that is expensive, or could be exchanged, has one home.
HOMES = {
    "pyfuse3": ("kvfs.fuse",),
    "rocksdict": ("kvfs.catalog",),
    "trio_parallel": ("kvfs.movement",),
    "xxhash": (
        "kvfs.movement",
        "kvfs.layouts",
        "kvfs.s3",
        "kvfs.pool",
        "kvfs.compression",
        "kvfs.prefix",
        "kvfs.connectors",
    ),
    "boto3": ("kvfs.s3.boto",),
    "botocore": ("kvfs.s3.boto", "kvfs.s3.direct", "kvfs.s3.failures"),
    "blosc": ("kvfs.compression.frames",),
    "redis": ("kvfs.pool",),
    "hiredis": ("kvfs.pool",),
    "msgpack": ("kvfs.catalog.journal",),
    "click": ("kvfs.cli",),
    "rich": ("kvfs.cli",),
    "prometheus_client": ("kvfs.metrics",),
    "matplotlib": ("kvfs.simulation.curves",),
    "torch": ("kvfs.client", "kvfs.connectors"),  # runs in engines, and nowhere else
}
# The command line loads these for one way of running only.
CLI_LOADS = {
    ("kvfs.cli.fsck", "kvfs.fsck"),
    ("kvfs.cli.gc", "kvfs.gc"),
    ("kvfs.cli.doctor", "kvfs.pool.nginx"),
    ("kvfs.cli.umount", "kvfs.pool.nginx"),
    ("kvfs.cli.umount", "kvfs.tiers"),
    ("kvfs.cli.umount", "kvfs.tiers.ram"),
}
NEVER = ("requests", "numpy")


class Import(NamedTuple):
    module: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.imported}"


def name_of(path: Path) -> str:
    parts = ["kvfs", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def is_or_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports(module: str) -> Iterator[Import]:
    """Everything that the module imports anywhere, also for types only."""
    for node in ast.walk(ast.parse(MODULES[module].read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} has a relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                submodule = whole in MODULES or whole == "kvfs.fuse._passthrough"
                yield Import(module, whole if submodule else node.module, node.lineno)


def of_kvfs(found: Import) -> bool:
    """Whether it is one of kvfs's own modules; the package itself has the version and no more."""
    return is_or_in(found.imported, "kvfs") and found.imported != "kvfs"


ALL = [found for module in MODULES for found in imports(module)]


def layer(module: str) -> int | None:
    """Of a module that is named itself, its own."""
    for within in (False, True):
        for number, packages in enumerate(LAYERS):
            if any(is_or_in(module, one) if within else module == one for one in packages):
                return number
    return None


def test_every_module_has_a_layer() -> None:
    assert [module for module in MODULES if module != "kvfs" and layer(module) is None] == []


def test_imports_point_down() -> None:
    wrong = []
    for found in ALL:
        if not of_kvfs(found):
            continue
        above, below = layer(found.module), layer(found.imported)
        assert above is not None
        assert below is not None, f"{found}, which is in no layer"
        if above > below:
            wrong.append(str(found))
    assert wrong == []


def test_rooms_of_one_floor_do_not_import_each_other() -> None:
    def room(module: str) -> str:
        floor = LAYERS[layer(module) or 0]
        return next(one for one in floor if is_or_in(module, one))

    inside = [
        found
        for found in ALL
        if is_or_in(found.module, "kvfs.core") and is_or_in(found.imported, "kvfs.core")
    ]
    assert [
        str(found)
        for found in inside
        if layer(found.module) == layer(found.imported)
        and room(found.module) != room(found.imported)
    ] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also for types only. A module is left out once all that it imports is."""
    left = {
        module: {one.imported for one in imports(module) if one.imported in MODULES} - {module}
        for module in MODULES
    }
    while done := {module for module, below in left.items() if not below & left.keys()}:
        left = {module: below for module, below in left.items() if module not in done}
    assert sorted(left) == [], "these are in a circle, or import one that is"


def test_only_the_daemon_knows_everything() -> None:
    """The command line gets by with the sockets, and the keeper with even less."""
    wrong = [
        str(found)
        for package, may in (("kvfs.cli", CLI_MAY), ("kvfs.keeper", KEEPER_MAY))
        for found in ALL
        if is_or_in(found.module, package)
        and of_kvfs(found)
        and not any(is_or_in(found.imported, allowed) for allowed in may)
        and (found.module, found.imported) not in CLI_LOADS
    ]
    assert wrong == []
    assert not [
        str(found)
        for found in ALL
        if is_or_in(found.module, "kvfs.control")
        and of_kvfs(found)
        and not is_or_in(found.imported, "kvfs.control")
        and layer(found.imported) not in {layer("kvfs.runtime"), layer("kvfs.errors")}
    ]


@pytest.mark.parametrize(("library", "homes"), HOMES.items())
def test_a_library_stays_in_its_home(library: str, homes: tuple[str, ...]) -> None:
    users = [found for found in ALL if is_or_in(found.imported, library)]
    assert [
        str(found) for found in users if not any(is_or_in(found.module, home) for home in homes)
    ] == []
    assert users, f"nobody imports {library}: take it out of this test"


def test_only_the_catalog_knows_the_letters_of_kinds() -> None:
    """Code that marks an inode names the kind by a constant of kvfs.catalog.keys."""
    wrong = [
        f"{module}:{node.lineno}"
        for module, path in MODULES.items()
        if not is_or_in(module, "kvfs.catalog")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"mark", "unmark", "marks", "any_mark", "erase"}
        and any(isinstance(one, ast.Constant) and isinstance(one.value, bytes) for one in node.args)
    ]
    assert wrong == []


def test_heavy_libraries_are_not_imported() -> None:
    wrong = [str(f) for f in ALL if any(is_or_in(f.imported, library) for library in NEVER)]
    assert wrong == []


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_docstring(module: str) -> None:
    assert ast.get_docstring(ast.parse(MODULES[module].read_bytes()))
