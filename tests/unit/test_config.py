"""The configuration: what is understood, what is refused, and with which words."""

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs import runtime
from kvfs.config import OPTIONS, Config, parse_hot
from kvfs.errors import ConfigError
from kvfs.mounts import mount, umount
from kvfs.parsing import rows
from kvfs.s3.place import BucketPlace
from kvfs.units import MIB, format_size, parse_size

KV = Path("/mnt/kv")


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mount point"
    path.mkdir()
    return path


@pytest.fixture
def nobody() -> Iterator[Path]:
    """Run as user nobody, with a directory that root owns and all may read."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        place = Path(directory)
        place.chmod(0o755)
        os.seteuid(65534)
        try:
            yield place
        finally:
            os.seteuid(0)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mount("none", path, "tmpfs", 0, "size=32M,mode=0755")
    yield path
    umount(path)


# Accepted options


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("16M", 16 << 20),
        ("16m", 16 << 20),
        ("2G", 2 << 30),
        ("2GB", 2 << 30),
        ("2Gi", 2 << 30),
        ("2GiB", 2 << 30),
        ("1.5T", 3 << 39),
        ("4096K", 4 << 20),
    ],
)
def test_sizes_have_units_of_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "+1G", "1 G", "1GG", "1e9", "0x10", "1,5G", ".5G", "٢G", "9" * 5000]
)
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size such as"):
        parse_size(text)


@given(st.integers(0, (1 << 62) - 1))
def test_a_formatted_size_is_the_same_size(size: int) -> None:
    assert parse_size(format_size(size)) == size


def test_every_option_is_understood(tmp_path: Path) -> None:
    config = Config.from_options(
        KV,
        f"ram=2G,nvme={tmp_path},nvme_size=100G,passthrough=on,huge=always,allow_other,movers=3,"
        "promote_after=0,verify_after=2h,reclaimable=50%,entry_timeout=1.5,log=/var/log/x,log_level=debug,ro,noatime,"
        "s3=s3://bucket/a/b,s3_endpoint=http://[::1]:80,s3_region=here,s3_profile=p,s3_required=off,"
        "s3_dirty=1G,s3_delay=2,s3_wait=0.5,s3_shared=off,s3_exclusive=on,s3_recheck=5,"
        "metrics=localhost:9095,web=/run/kvfs//page.sock",
    )
    assert config == Config(
        mountpoint=KV,
        ram=2 << 30,
        nvme=tmp_path,
        nvme_size=100 << 30,
        passthrough="on",
        huge="always",
        allow_other=True,
        movers=3,
        promote_after=0,
        reclaimable=50,
        verify_after=7200,
        entry_timeout=1.5,
        log=Path("/var/log/x"),
        log_level="debug",
        mount_flags=("ro", "noatime"),
        s3="s3://bucket/a/b/",
        s3_endpoint="http://[::1]:80",
        s3_region="here",
        s3_profile="p",
        s3_required=False,
        s3_dirty=1 << 30,
        s3_delay=2.0,
        s3_wait=0.5,
        s3_shared=False,
        s3_exclusive=True,
        s3_recheck=5.0,
        metrics="127.0.0.1:9095",
        web="/run/kvfs/page.sock",
    )
    assert config.place == BucketPlace("bucket", "a/b/", "http://[::1]:80", "here", "p")
    assert config.dirty_most == 1 << 30


def test_s3_dirty_is_a_size_or_a_share_of_the_local_tiers() -> None:
    assert Config.from_options(KV, "ram=2G").dirty_most == 512 << 20
    half = Config.from_options(KV, "ram=2G,s3=s3://bucket,s3_dirty=50%")
    assert half.dirty_most == 1 << 30
    assert half.as_options()["s3_dirty"] == "50%"
    assert Config.from_json(half.to_json()) == half
    all_of_it = Config.from_options(KV, "ram=2G,s3=s3://bucket,s3_dirty=100%")
    assert Config.from_json(all_of_it.to_json()).dirty_most == 2 << 30


def test_defaults_are_fitted_to_the_machine(tmp_path: Path) -> None:
    config = Config.from_options(KV, f"nvme={tmp_path}")
    assert config.ram == pytest.approx(runtime.memory() * 0.25, abs=MIB)
    assert (
        16 * MIB <= config.nvme_size < os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    )
    assert config.fitted == ("ram", "nvme_size")
    assert 1 <= config.movers <= 4


def test_a_tier_directory_that_is_still_to_be_made_is_sized_by_its_parent(tmp_path: Path) -> None:
    assert Config.from_options(KV, f"nvme={tmp_path}/new").nvme_size >= 16 * MIB


def test_options_of_fstab_are_ignored() -> None:
    words = "defaults,rw,noauto,user,user=me,nofail,_netdev,x-systemd.automount,comment=x,,relatime"
    assert Config.from_options(KV, words) == Config.from_options(KV, "")


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ("ro,rw", ()),
        ("rw,ro", ("ro",)),
        ("nosuid,nodev,noexec,dev", ("nosuid", "noexec")),
        ("noatime,noatime", ("noatime",)),
        ("noatime,atime,suid,exec", ()),
    ],
)
def test_the_last_of_opposite_flags_holds(options: str, flags: tuple[str, ...]) -> None:
    assert Config.from_options(KV, options).mount_flags == flags


def test_a_comma_in_a_path_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    config = Config.from_options(KV, f"nvme={tmp_path}/a\\,b,ram=0")
    assert config.nvme == tmp_path / "a,b"


@pytest.mark.parametrize(("text", "on"), [("allow_other", True), ("allow_other=off", False)])
def test_a_switch_may_stand_alone(text: str, *, on: bool) -> None:
    assert Config.from_options(KV, text).allow_other is on


def test_a_password_in_an_url_is_refused_and_not_repeated() -> None:
    for option in (
        "s3=s3://bucket,s3_endpoint=https://me:hunter2@store:9000",
        "s3=s3://me:hunter2@bucket/p",
        "metrics=http://me:hunter2@host:1",
    ):
        with pytest.raises(ConfigError, match="expected") as refused:
            Config.from_options(Path("/mnt/kv"), option)
        assert "hunter2" not in str(refused.value)


@given(
    ram=st.one_of(st.just(0), st.integers(16 * MIB, 1 << 61)),
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/\\")),
    seconds=st.floats(0, 1e6),
    flags=st.lists(st.sampled_from(["ro", "nosuid", "nodev", "noexec", "noatime"]), unique=True),
)
def test_a_configuration_survives_the_way_to_text_and_to_json(
    ram: int, name: str, seconds: float, flags: list[str]
) -> None:
    config = Config(
        mountpoint=KV,
        ram=ram,
        nvme=Path(os.path.normpath(f"/x{name}")),
        nvme_size=20 * MIB,
        entry_timeout=seconds,
        mount_flags=tuple(flags),
    )
    text = ",".join(f"{k}={v}" if v else k for k, v in config.as_options().items())
    assert Config.from_options(KV, text) == config
    assert Config.from_json(config.to_json()) == config


def test_json_keeps_a_path_that_is_no_text() -> None:
    config = Config(mountpoint=Path(os.fsdecode(b"/mnt/\xff")), log=Path("/l"), fitted=("ram",))
    assert Config.from_json(config.to_json()) == config


def test_json_of_an_older_version_gets_defaults() -> None:
    values = json.loads(Config(mountpoint=KV, watchdog=5.0).to_json())
    del values["watchdog"]
    assert Config.from_json(json.dumps(values)).watchdog == 30.0


@pytest.mark.parametrize("text", ["[]", "{}", '{"mountpoint": "/mnt/kv", "frobnicate": 1}'])
def test_json_of_a_newer_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"another version of kvfs has .*: expected some of"):
        Config.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("ram", "x"), ("ram", -1), ("nvme", "a/../x"), ("nvme", "/a/../x"), ("nvme", 5)),
        *(("mountpoint", "kv"), ("watchdog", "soon"), ("promote_after", -1), ("huge", "maybe")),
        *(("allow_other", "yes"), ("mount_flags", ["suid"]), ("s3", "/etc"), ("log", "x")),
    ],
)
def test_json_with_a_value_that_no_option_takes_is_refused(name: str, value: object) -> None:
    values = json.loads(Config(mountpoint=KV).to_json()) | {name: value}
    with pytest.raises(ConfigError, match="is no configuration of a mount: ") as refused:
        Config.from_json(json.dumps(values))
    assert len(str(refused.value)) < 500


def test_upgrade_changes_options_of_the_daemon() -> None:
    config = Config.from_options(KV, "ram=64M,movers=1")
    assert config.upgraded("") == config
    changed = config.upgraded("ram=128M,movers=2,watchdog=5,promote_after=7,passthrough=auto")
    assert (changed.ram, changed.movers, changed.promote_after) == (128 << 20, 2, 7)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("passthrough=off,allow_other", "allow_other=on, passthrough=off of /mnt/kv: unmount"),
        ("nvme=/elsewhere,movers=2", "nvme=/elsewhere of /mnt/kv: unmount"),
        ("ram=0", "ram=0 of /mnt/kv: unmount"),
        ("ro", "ro of /mnt/kv: use kvfs remount"),
    ],
)
def test_upgrade_refuses_options_that_need_a_new_mount_by_name(options: str, names: str) -> None:
    config = Config.from_options(KV, "ram=64M,movers=1")
    with pytest.raises(ConfigError, match=f"^kvfs upgrade cannot change {names}"):
        config.upgraded(options)


def test_an_upgrade_is_held_against_the_machine() -> None:
    with pytest.raises(ConfigError, match="more than the memory"):
        Config.from_options(KV, "ram=64M").upgraded("ram=900T")


def test_every_option_is_described() -> None:
    described = {row.name: row for row in rows(Config)}
    assert set(Config(mountpoint=KV, nvme=KV, log=KV).as_options()) <= set(described)
    assert all(row.unit and row.default and row.meaning for row in described.values())
    hot = {name for name, row in described.items() if row.hot}
    assert hot == {
        *("promote_after", "reclaimable", "verify_after"),
        *("entry_timeout", "log_level", "bandwidth", "nvme_writes"),
        *("access_log", "access_log_size", "scrub"),
        *("s3_delay", "s3_wait", "s3_shared", "s3_stream", "s3_recheck"),
        *("pool_wait", "pool_copies", "pool_stream"),
    }


# Texts that are refused by themselves


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("s3=bucket", "option s3=bucket: expected s3://BUCKET"),
        ("s3=s3://bucket,s3_endpoint=ftp://x", "expected an endpoint such as https://"),
        ("s3_region=x", "s3_region is given without s3"),
        ("s3=s3://bucket,s3_region=a b", "expected one word"),
        ("s3=s3://bucket,s3_dirty=0", "expected a size such as 2G, or a share from 1% to 100%"),
        ("s3=s3://bucket,s3_dirty=101%", "or a share from 1% to 100%"),
        ("ramm=2G", "unknown option 'ramm'; did you mean ram?"),
        ("nvmesize=2G", "did you mean nvme_size"),
        ("noatim", "did you mean noatime"),
        (
            "pool=redis://h/kv,pool_allow=10.0.0.0/8,fd00::/8",
            "unknown option 'fd00::/8'; join networks by +, not by a comma",
        ),
        ("frobnicate", "unknown option 'frobnicate'; there are ram, nvme"),
        ("ro=1", "option ro=1: ro takes no value: give ro alone"),
        ("rw=1", "option rw=1: rw takes no value: give rw alone"),
        ("mount_flags=ro", "unknown option 'mount_flags'"),
        ("=1", "unknown option ''"),
        ("ram", "option ram=: expected a size"),
        ("ram=", "option ram=: expected a size"),
        ("ram=lots", "option ram=lots: expected a size"),
        ("ram=1M", "option ram=1M: expected at least 16M"),
        ("ram=16M,ram=17M", "ram is given twice"),
        ("nvme_size=100G", "nvme_size is given without nvme"),
        ("ram=0", "no place for objects"),
        ("nvme=relative/path", "expected an absolute path"),
        ("nvme=/tmp,nvme_size=15M", "expected at least 16M"),
        ("passthrough=maybe", "one of auto, on, off"),
        ("passthrough", "one of auto, on, off"),
        ("huge=2M", "one of within_size, always, advise, never"),
        ("allow_other=", "expected on or off"),
        ("allow_other=yes", "expected on or off"),
        ("movers=0", "a whole number from 1 to 64"),
        ("movers=65", "a whole number from 1 to 64"),
        ("movers=1.5", "a whole number from 1 to 64"),
        ("reclaimable=91", "a whole number from 1 to 90"),
        ("promote_after=-1", "a whole number from 0"),
        ("entry_timeout=nan", "seconds from 0"),
        ("entry_timeout=inf", "seconds from 0"),
        ("entry_timeout=-1", "seconds from 0"),
        ("entry_timeout=soon", "seconds from 0"),
        ("metrics=host:1", "metrics=host:1: expected PORT"),
        ("web=off", "bytes, or none"),
        ("web=None", "web=None: expected PORT"),
        ("web=", "web=: expected PORT"),
        ("metrics=9095,web=9095", "metrics=127.0.0.1:9095 and web=127.0.0.1:9095 are one address"),
        ("metrics=0.0.0.0:9095,web=9095", "are one address: give each its own"),
        ("metrics=9095,web=0.0.0.0:9095", "are one address"),
        ("metrics=9095,web=[::]:9095", "are one address"),
        ("metrics=/run/kvfs/one,web=/run//kvfs/one", "are one address"),
        ("log_level=verbose", "one of debug, info, warning, error"),
        ("log=kvfs.log", "expected an absolute path"),
    ],
)
def test_a_bad_option_is_refused_by_name_value_and_expectation(options: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Config.from_options(KV, options)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_relative_mount_point_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected an absolute path"):
        Config.from_options(Path("kv"), "")


def test_a_hot_option_changes_and_no_other_does() -> None:
    config = Config(mountpoint=KV)
    assert config.changed("promote_after", "7").promote_after == 7
    with pytest.raises(ConfigError, match=r"by kvfs upgrade MOUNTPOINT -o ram=1G; .*promote_after"):
        config.changed("ram", "1G")
    with pytest.raises(ConfigError, match=r"nvme cannot change while mounted: unmount"):
        config.changed("nvme", "/data")
    with pytest.raises(ConfigError, match="did you mean log_level"):
        parse_hot("loglevel", "info")
    with pytest.raises(ConfigError, match="reclaimable=x"):
        parse_hot("reclaimable", "x")


# Options that the machine cannot serve


def test_a_sound_configuration_passes_and_changes_nothing(mountpoint: Path, tmp_path: Path) -> None:
    options = f"ram=16M,nvme={tmp_path}/new,nvme_size=16M,log={tmp_path}/log"
    Config.from_options(mountpoint, options).check()
    assert sorted(tmp_path.iterdir()) == [mountpoint]


def test_a_missing_mount_point_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; mkdir -p"):
        Config.from_options(tmp_path / "none", "ram=16M").check()


def test_a_mount_point_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a directory"):
        Config.from_options(tmp_path / "file", "ram=16M").check()
    with pytest.raises(ConfigError, match="Not a directory"):
        Config.from_options(tmp_path / "file/below", "ram=16M").check()


def test_a_mount_point_in_use_is_refused(small_tmpfs: Path) -> None:
    with pytest.raises(ConfigError, match=r"already a mount point \(tmpfs\)"):
        Config.from_options(small_tmpfs, "ram=16M").check()


def test_mount_of_a_dead_daemon_is_refused_with_its_cure(mountpoint: Path, tmp_path: Path) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    mount("kvfs", mountpoint, runtime.FSTYPE, 0, options)
    try:
        # The daemon does not answer yet: the refusal must come without asking it.
        with pytest.raises(ConfigError, match="kvfs umount"):
            Config.from_options(mountpoint, "ram=16M").check()
        os.close(device)
        with pytest.raises(ConfigError, match=r"endpoint is not connected.*kvfs umount"):
            Config.from_options(mountpoint, "ram=16M").check()
        with pytest.raises(ConfigError, match="endpoint is not connected"):
            Config.from_options(mountpoint / "below", "ram=16M").check()
        with pytest.raises(ConfigError, match="endpoint is not connected"):
            Config.from_options(tmp_path, f"nvme={mountpoint}/tier")
    finally:
        umount(mountpoint)


def test_ram_beyond_the_memory_is_refused(mountpoint: Path) -> None:
    with pytest.raises(ConfigError, match="ram=1024T: more than the memory"):
        Config.from_options(mountpoint, "ram=1024T").check()


def test_a_tier_directory_without_a_parent_is_refused(mountpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/a does not exist; mkdir -p {tmp_path}/a/b"):
        Config.from_options(mountpoint, f"nvme={tmp_path}/a/b")
    with pytest.raises(ConfigError, match="does not exist"):
        Config.from_options(mountpoint, f"nvme={tmp_path}/a/b,nvme_size=16M").check()


@pytest.mark.parametrize("kind", ["file", "dangling", "loop"])
def test_a_tier_directory_that_is_none_is_refused(
    mountpoint: Path, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / kind
    if kind == "file":
        place.touch()
    else:
        place.symlink_to(place if kind == "loop" else tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a directory"):
        Config.from_options(mountpoint, f"nvme={place},nvme_size=16M").check()


def test_a_tier_on_a_read_only_file_system_is_refused(mountpoint: Path, tmp_path: Path) -> None:
    place = tmp_path / "ro"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", place], check=True)
    try:
        with pytest.raises(ConfigError, match="read-only file system"):
            Config.from_options(mountpoint, f"nvme={place}/tier,nvme_size=16M").check()
    finally:
        umount(place)


def test_a_tier_on_a_read_only_bind_mount_is_refused(mountpoint: Path, tmp_path: Path) -> None:
    place = tmp_path / "bind"
    place.mkdir()
    subprocess.run(["mount", "--bind", place, place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        with pytest.raises(ConfigError, match="read-only file system"):
            Config.from_options(mountpoint, f"nvme={place},nvme_size=16M").check()
    finally:
        umount(place)


def test_a_tier_on_a_kvfs_is_refused(
    mountpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    above = runtime.MountEntry("/", str(tmp_path), runtime.FSTYPE, "kvfs", ())
    monkeypatch.setattr(runtime, "mounts", lambda *_: [above])
    config = Config(mountpoint=mountpoint, ram=32 * MIB, nvme=tmp_path / "nvme", nvme_size=32 * MIB)
    with pytest.raises(ConfigError, match=rf"is on {tmp_path}, a mount of kvfs"):
        config.check()
    below = above._replace(path=str(tmp_path / "nvme"), fstype="ext4")
    monkeypatch.setattr(runtime, "mounts", lambda *_: [above, below])
    (tmp_path / "nvme").mkdir()
    config.check()


def test_a_tier_that_others_may_write_to_is_refused(mountpoint: Path, tmp_path: Path) -> None:
    place = tmp_path / "nvme"
    place.mkdir()
    for mode in (0o770, 0o1777):
        place.chmod(mode)
        with pytest.raises(ConfigError, match=f"other users can write there; chmod go-w {place}"):
            Config.from_options(mountpoint, f"nvme={place},nvme_size=16M").check()
    place.chmod(0o755)
    Config.from_options(mountpoint, f"nvme={place},nvme_size=16M").check()


def test_a_tier_on_overlayfs_is_refused(mountpoint: Path, tmp_path: Path) -> None:
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    place = tmp_path / "merged"
    layers = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    mount("overlay", place, "overlay", 0, layers)
    try:
        with pytest.raises(ConfigError, match=r"on overlayfs.*expected a directory on ext4 or xfs"):
            Config.from_options(mountpoint, f"nvme={place}/tier,nvme_size=16M").check()
    finally:
        umount(place)


def test_a_tier_larger_than_its_device_is_refused(mountpoint: Path, small_tmpfs: Path) -> None:
    Config.from_options(mountpoint, f"nvme={small_tmpfs},nvme_size=32M").check()
    with pytest.raises(ConfigError, match="nvme_size=33M: more than the device has, expected 32M"):
        Config.from_options(mountpoint, f"nvme={small_tmpfs},nvme_size=33M").check()


def test_a_device_too_full_to_fit_a_tier_is_refused(mountpoint: Path, small_tmpfs: Path) -> None:
    (small_tmpfs / "other").write_bytes(bytes(16 * MIB))
    with pytest.raises(ConfigError, match=r"80 % of the free space is 12M.*or give nvme_size"):
        Config.from_options(mountpoint, f"nvme={small_tmpfs}")


def test_a_tier_without_permission_to_write_is_refused(nobody: Path) -> None:
    with pytest.raises(ConfigError, match=f"uid 65534 may not write to {nobody}"):
        Config.from_options(Path("/usr"), f"nvme={nobody}/tier,nvme_size=16M").check()
    with pytest.raises(ConfigError, match=f"log={nobody}/log: expected a file that uid 65534"):
        Config.from_options(Path("/usr"), f"ram=16M,log={nobody}/log").check()


def test_a_log_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/no does not exist; mkdir -p {tmp_path}/no"):
        Config.from_options(Path("/usr"), f"ram=16M,log={tmp_path}/no/log").check()


def test_a_tier_and_its_mount_must_be_apart(mountpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nvme=.* is inside the mount point"):
        Config.from_options(mountpoint, f"nvme={mountpoint}/tier,nvme_size=16M").check()
    with pytest.raises(ConfigError, match=r"mount point .* is inside nvme="):
        Config.from_options(mountpoint, f"nvme={tmp_path},nvme_size=16M").check()
    (tmp_path / "link").symlink_to(mountpoint)
    with pytest.raises(ConfigError, match=r"log=.* is inside the mount point"):
        Config.from_options(mountpoint, f"ram=16M,log={tmp_path}/link/log").check()


@pytest.mark.parametrize("option", ["metrics", "web"])
def test_a_socket_that_the_mount_would_hide_is_refused(mountpoint: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}=.* is inside the mount point"):
        Config.from_options(mountpoint, f"ram=16M,{option}={mountpoint}/socket").check()


def test_an_upgrade_to_an_address_that_is_not_to_be_had_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = Config.from_options(KV, "ram=64M,metrics=9")
        for address in (str(port), f"0.0.0.0:{port}", "/nope/x"):
            with pytest.raises(ConfigError, match=r"web=.* cannot be used"):
                config.upgraded(f"web={address}")
        with pytest.raises(ConfigError, match=r"are one address"):
            config.upgraded(f"web={tmp_path}/both,metrics={tmp_path}/both")
        here = Config.from_options(KV, f"ram=64M,web={port},metrics=9")
        assert here.upgraded("movers=2").web == f"127.0.0.1:{port}"
        swapped = here.upgraded(f"web=0.0.0.0:9,metrics=0.0.0.0:{port}")
        assert (swapped.web, swapped.metrics) == ("0.0.0.0:9", f"0.0.0.0:{port}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        "metrics=9095,web=9096",
        "metrics=127.0.0.1:9095,web=127.0.0.2:9095",
        "metrics=0.0.0.0:9095,web=[::1]:9095",
        "metrics=9095,web=/run/kvfs/page.sock",
        "metrics=none,web=none",
    ],
)
def test_addresses_that_differ_are_taken(options: str) -> None:
    Config.from_options(KV, f"ram=16M,{options}")


def test_each_path_comes_back_from_json() -> None:
    names = [item.name for item in fields(Config) if item.type in {Path, Path | None}]
    values = {name: f"/x/{name}" for name in names}
    config = Config.from_json(json.dumps(values))
    assert {"mountpoint", "pool_tls", "pool_credentials"} <= set(names)
    assert Config.from_json(config.to_json()) == config


def test_an_upgrade_to_one_address_for_both_is_refused() -> None:
    config = Config.from_options(KV, "ram=64M,metrics=9")
    for port in ("9", "0.0.0.0:9"):
        with pytest.raises(ConfigError, match=r"metrics=.* and web=.* are one address"):
            config.upgraded(f"web={port}")


@pytest.mark.parametrize("name", [item.name for item in fields(Config) if item.type == Path | None])
def test_an_option_with_a_path_reaches_the_keeper(name: str, tmp_path: Path) -> None:
    config = Config.from_options(KV, f"ram=64M,pool=redis://h/kv,{name}={tmp_path}")
    assert getattr(config, name) == tmp_path
    assert Config.from_json(config.to_json()) == config


# Without a value they have a default of their own, or come with a bucket.
NOT_NONE = {
    *("log", "s3_endpoint", "s3_region", "s3_profile"),
    *("pool_address", "pool_allow", "pool_tls", "pool_credentials"),
}


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in OPTIONS.keys() - NOT_NONE
        if getattr(Config(mountpoint=KV, ram=1), name) is None
    ),
)
def test_none_is_taken_where_an_option_may_have_no_value(name: str) -> None:
    """`kvfs get` prints this word, and a mount takes what it prints."""
    config = Config.from_options(KV, f"ram=64M,{name}=none")
    assert getattr(config, name) is None
    assert config.as_options() == Config.from_options(KV, "ram=64M").as_options()
    assert config.upgraded(f"{name}=none") == config


def test_none_ends_metrics_and_the_page_at_an_upgrade() -> None:
    config = Config.from_options(KV, "ram=64M,metrics=9,web=10").upgraded("web=none")
    assert config.addresses.keys() == {"metrics"}
    assert config.upgraded("metrics=none").addresses == {}


def test_a_log_that_is_a_directory_is_refused(mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(ConfigError, match=r"log=.*expected a file"):
        Config.from_options(mountpoint, f"ram=16M,log={tmp_path}/log").check()
