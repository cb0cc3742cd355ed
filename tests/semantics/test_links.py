import errno
import os
from pathlib import Path

from tests.semantics.syscalls import opened, refused

PROC = Path("/proc/self/fd")


def test_hard_links(here: Path) -> None:
    os.mkdir(here / "d")
    (here / "a").write_bytes(b"one")
    os.link(here / "a", here / "d" / "b")
    os.link(here / "d" / "b", here / "c")
    with opened(here / "c", os.O_WRONLY | os.O_APPEND) as descriptor:
        os.write(descriptor, b" and all")
    names = [here / "a", here / "d" / "b", here / "c"]
    assert {path.read_bytes() for path in names} == {b"one and all"}
    assert len({os.stat(path).st_ino for path in names}) == 1
    for left in (3, 2, 1):
        assert os.stat(names[-1]).st_nlink == left
        os.unlink(names.pop(0))
    assert os.listdir(here) == ["d"]


def test_most_links(here: Path) -> None:
    (here / "0").touch()
    for number in range(1, 1000):
        os.link(here / "0", here / str(number))
    assert os.stat(here / "0").st_nlink == 1000
    with refused(errno.EMLINK):
        os.link(here / "0", here / "1000")
    os.unlink(here / "500")
    os.link(here / "0", here / "1000")
    assert len(os.listdir(here)) == 1000


def test_refused_links(here: Path) -> None:
    os.mkdir(here / "d")
    (here / "a").touch()
    with refused(errno.EPERM):
        os.link(here / "d", here / "e")
    with refused(errno.EEXIST):
        os.link(here / "a", here / "d")
    with opened(here / "a", os.O_RDONLY) as descriptor, opened(PROC, os.O_RDONLY) as descriptors:
        os.unlink(here / "a")
        with refused(errno.ENOENT):  # Python follows the link only when told where to begin
            os.link(str(descriptor), here / "b", src_dir_fd=descriptors)
    assert os.listdir(here) == ["d"]


def test_symbolic_links(here: Path) -> None:
    for number, target in enumerate((b"../x", b"\xff\n", b"t" * 4095)):
        link = os.fsencode(here / str(number))
        os.symlink(target, link)
        assert os.readlink(link) == target
        assert os.lstat(link).st_size == len(target)
        assert not os.path.exists(link)
    with refused(errno.ENAMETOOLONG):
        os.symlink(b"t" * 4096, os.fsencode(here / "long"))
    with refused(errno.ENOENT):
        os.stat(here / "0")
    with refused(errno.EEXIST):
        os.symlink("x", here / "0")
    (here / "file").write_bytes(b"content")
    os.symlink("file", here / "good")
    assert (here / "good").read_bytes() == b"content"
    os.symlink("loop", here / "loop")
    with refused(errno.ELOOP):
        os.stat(here / "loop")
