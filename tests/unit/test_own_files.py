"""Small files that kvfs reads back: of damaged ones nothing is believed, and nothing follows."""

import ast
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs
from kvfs import own_files, runtime
from kvfs.errors import ConfigError

UUID = "0b2bb2a5-1e4c-4f9c-8a3e-7a1f3b0c9d55"


def linked(path: Path) -> None:
    """To what would be right."""
    (path.parent / "elsewhere").write_text(UUID if "uuid" in path.name else "7")
    path.symlink_to(path.parent / "elsewhere")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": Path.touch,
    "blank": lambda path: path.write_text("\n"),
    "above": lambda path: path.write_text("a/../../../x\n"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "escapes": lambda path: path.write_bytes(b"\x1b]0;x\x07\r\nkvfs: all is well\n"),
    "huge": lambda path: path.write_bytes(b"1" * (own_files.LIMIT + 1)),
    "sparse": sparse,
    "link": linked,
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("read", [own_files.read_uuid, own_files.read_number])
def test_damaged_file_is_refused_in_one_line(
    tmp_path: Path, damage: str, read: Callable[[Path, str], object]
) -> None:
    path = tmp_path / read.__name__
    DAMAGES[damage](path)
    with pytest.raises(ConfigError) as refused:
        read(path, "restore it")
    said = str(refused.value)
    assert said.startswith(f"{path} ")
    assert "expected " in said
    assert said.endswith(": restore it")
    assert said.isprintable()
    assert len(said) < 500


def test_written_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert own_files.read_uuid(path, "") is None
    assert own_files.read_number(path, "") is None
    for text in (UUID, f"{UUID}\n"):
        own_files.write(path, text)
        assert own_files.read(path, "", "") == text
        assert own_files.read_uuid(path, "") == UUID
    own_files.write(path, "7")
    assert own_files.read_number(path, "") == 7
    assert os.listdir(tmp_path) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_content_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "file", list[str]()
    sync, rename = os.fsync, os.rename

    def fsync(number: int) -> None:
        steps.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{number}'))}")
        sync(number)

    def renamed(old: Path, new: Path) -> None:
        steps.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    own_files.write(path, "new")
    assert steps == ["sync file.new", "rename", f"sync {tmp_path.name}"]


def test_a_link_in_the_place_of_a_new_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("file", "file.new"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    own_files.write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "/", "a/b", "a/../../../x", "/etc", "a\n", "a\0b", ".x", "x" * 256, "é"]
)
def test_a_path_of_a_files_content_stays_where_it_belongs(name: str) -> None:
    with pytest.raises(ConfigError, match=r"/run/kvfs-ram has .*, expected the name of a file"):
        runtime.ram_path(name)


def test_any_name_is_a_file_in_its_directory_or_refused() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice, root = random.Random(seed), Path("/run/kvfs-ram")
    taken = 0
    for _ in range(20_000):
        name = "".join(dice.choices("ab9._-/\\\0\n \x7fé", k=dice.randrange(1, 6)))
        try:
            path = own_files.inside(root, name)
        except ConfigError:
            continue
        taken += 1
        assert os.path.normpath(path) == str(path)
        assert path.parent == root
    assert taken
    assert runtime.ram_path(UUID) == root / UUID


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(ConfigError, match="expected a directory that kvfs makes itself"):
            own_files.ensure_folder(tmp_path / name)
    for _ in range(2):
        own_files.ensure_folder(tmp_path / "new")


def test_a_directory_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    own_files.expect_no_other_folders(tmp_path, ["folder"])
    with pytest.raises(ConfigError, match=r"folder is drwx.*, expected a file that kvfs makes"):
        own_files.expect_no_other_folders(tmp_path, [])


# Modules that read whole files by other means, and what those are.
OTHERS = {
    "kvfs.cli.bench": "files of the kernel, and files that it made itself",
    "kvfs.cli.bundle": "files of the kernel; all else is cut or read by own_files",
    "kvfs.cli.doctor": "files of the kernel",
    "kvfs.cli.package": "files of the kernel",
    "kvfs.cli.setup": "files of the package, and files that it compares with them",
    "kvfs.cli.users": "files of the kernel",
    "kvfs.client.leased": "files of the kernel",
    "kvfs.core.objects.scans": "files of the kernel",
    "kvfs.fuse.processes": "files of the kernel",
    "kvfs.keeper.process": "files of the kernel",
    "kvfs.nfs.servers": "files of the kernel",
    "kvfs.pool.nginx": "files of the kernel, and a log that is only shown",
    "kvfs.runtime": "files of the kernel, and the machine's id, which is compared only",
    "kvfs.templates": "a file of the user's, named by an option",
    "kvfs.web.page": "files of the package",
}


def test_every_file_that_is_read_back_is_read_by_one_module() -> None:
    root = Path(kvfs.__file__).parent
    found = {
        "kvfs." + ".".join(path.relative_to(root).with_suffix("").parts)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and node.attr in {"read_text", "read_bytes"}
    }
    found -= {
        "kvfs.rates",
        "kvfs.core.namespaces.namespace",
        "kvfs.core.namespaces.namespaces",
    }  # a counter's name
    assert found == OTHERS.keys()


def test_only_runtime_names_the_root_of_ram() -> None:
    root = Path(kvfs.__file__).parent
    users = {path.name for path in root.rglob("*.py") if "ram_root(" in path.read_text()}
    assert users == {"runtime.py"}
