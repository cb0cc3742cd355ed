"""Names of namespaces that a shell offers come from the mount."""

import pytest
from click.shell_completion import ShellComplete

from kvfs import runtime
from kvfs.cli import main
from kvfs.control import request
from tests.conftest import Mount


def test_namespaces_of_the_only_mount_are_offered(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = mount("ram=64M")
    for name in ("chat", "chat-2", "code", "chat $(x)"):
        request(kv.path, "ns_create", name=name, settings={}, uid=0, gid=0)
    only = [one for one in runtime.mounts() if one.path == str(kv.path)]
    monkeypatch.setattr(runtime, "mounts", lambda *_: only)  # other tests have mounts, too
    shell = ShellComplete(main, {}, "kvfs", "_KVFS_COMPLETE")
    for command in (["ns", "show"], ["ns", "set"], ["ns", "drop"], ["match"], ["connect", "vllm"]):
        found = [item.value for item in shell.get_completions(command, "ch")]
        assert found == ["chat", "chat-2"]
    (path,) = shell.get_completions(["ns", "show"], f"{kv.path}/ch")
    assert path.type == "dir"
