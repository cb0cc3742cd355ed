"""Any bytes are a name, and what a connector's own code would write is read back."""

from hypothesis import given
from hypothesis import strategies as st

from kvfs import prefix
from kvfs.layouts import LIVES, link, recognise

NAMES = st.binary(max_size=300)
# As people call models: paths with @, %, -, _ and spaces among them.
MODELS = st.text(st.sampled_from("aZ09@%-_. /é"), min_size=1, max_size=60)
NO_AT = MODELS.map(lambda model: model.replace("@", ""))
RANKS = st.integers(1, 200).flatmap(
    lambda world: st.tuples(st.integers(0, world - 1), st.just(world))
)
KEYS = st.binary(min_size=16, max_size=16)
HASHES = st.binary(min_size=32, max_size=32).map(bytes.hex)
SUFFIXES = (
    *(b".bin", b".data", b".kv", b".pt", b".tmp", b".safetensors", b".metadata", b".weka1"),
    *(b".meta", b".bucket", b".rank_", b".tmp0123abcd", b".kvcache.safetensors"),
)


@given(st.lists(NAMES, max_size=5), NAMES, st.sampled_from(SUFFIXES), NAMES)
def test_any_bytes_are_a_name(
    directory: list[bytes], name: bytes, suffix: bytes, target: bytes
) -> None:
    for candidate in (name, name + suffix, b"m@1@0@" + name + suffix, b"0" * 64 + b"_" + name):
        found = recognise(tuple(directory), candidate)
        assert found is None or (found.layout in LIVES and 0 < found.key < 2**63)
    assert link(tuple(directory), name, target) is None


@given(
    st.text(st.sampled_from("a0@%-_. é"), max_size=80),
    RANKS,
    st.integers(-(2**63), 2**256),
    st.sampled_from(("half", "bfloat16", "fp8_e5m2fnuz")),
    st.none() | st.integers(0, 200),
    st.lists(st.tuples(st.just("user"), st.text("aZ0% ", max_size=9)), max_size=2),
)
def test_lmcache_engine_keys(
    model: str,
    ranks: tuple[int, int],
    chunk: int,
    dtype: str,
    layer: int | None,
    tags: list[tuple[str, str]],
) -> None:
    """`CacheEngineKey.to_string`; the first fit is taken where a model's name looks like one."""
    rank, world = ranks
    tail = "" if layer is None else f"@{layer}"
    tail += "".join(f"@{tag}%{value}" for tag, value in tags)
    name = f"{model}@{world}@{rank}@{chunk:x}@{dtype}{tail}.pt"
    found = recognise((), name.encode())
    assert found
    assert (found.layout, found.model, found.rank, found.world) == (
        *("lmcache-local-disk", model),
        *ranks,
    )
    assert (found.block, found.shard) == (f"{chunk:x}", "" if layer is None else str(layer))


@given(NO_AT, RANKS, st.integers(0, 300), HASHES, st.text("aZ0% -", max_size=128))
def test_lmcache_l2_keys(
    model: str, ranks: tuple[int, int], number: int, chunk: str, salt: str
) -> None:
    """`_object_key_to_filename`."""
    rank, world = ranks
    packed = world << 24 | rank << 16 | 1 << 8
    safe = model.replace("/", "-SEP-")
    name = f"{safe}@{packed:#010x}@{number:x}@{chunk}{'@' if salt else ''}{salt}.data"
    found = recognise((), name.encode())
    assert found
    assert found.layout == "lmcache-l2-fs"
    assert (found.rank, found.world, found.shard, found.block) == (
        rank,
        world,
        f"{number:x}",
        chunk,
    )
    assert found.model == model.replace("-SEP-", "/")


@given(MODELS, HASHES, st.integers(0, 99), st.integers(0, 9))
def test_vllm_blocks(model: str, block: str, rank: int, group: int) -> None:
    """`FileMapper.get_file_name`."""
    safe = model.replace("/", "_")
    path = f"{safe}_0123456789ab_r{rank}/{block[:3]}/{block[3:5]}_g{group}"
    found = recognise(tuple(path.encode().split(b"/")), f"{block}.bin".encode())
    assert found
    assert (found.layout, found.model, found.block) == ("vllm-fs", safe, block)
    assert (found.rank, found.shard) == (rank, str(group))


@given(
    st.text("aZ09.-_", min_size=1, max_size=60).filter(lambda model: not model[-1].isdigit()),
    HASHES,
    RANKS,
    st.none() | RANKS,
    st.none() | RANKS,
    st.sampled_from(("", "mamba", "swa", "draft_indexer", "deepseek_v4_c128")),
)
def test_sglang_pages(
    model: str,
    block: str,
    ranks: tuple[int, int],
    stage: tuple[int, int] | None,
    context: tuple[int, int] | None,
    pool: str,
) -> None:
    """`HiCacheFile._get_suffixed_key`; a model named like a pair of ranks cannot be told apart."""
    name = block + (f".{pool}" if pool else "") + f"_{model}_{ranks[0]}_{ranks[1]}"
    if stage:
        name += f"_{stage[1]}_{stage[0]}"
    if context:
        name += f"_cp{context[0]}_{context[1]}"
    found = recognise((), f"{name}.bin".encode())
    assert found
    assert (found.model, found.block, found.shard) == (model, block, pool)
    assert (found.rank, found.world) == ranks


@given(KEYS, KEYS, st.from_regex(r"([0-9A-Za-z_-]{1,32})?", fullmatch=True))
def test_prefix_paths(block: bytes, parent: bytes, shard: str) -> None:
    above, name = prefix.path(parent, block, shard).encode().split(b"/")
    found = recognise((b"d", above), name)
    assert found
    assert (found.block, found.parent, found.shard) == (block.hex(), parent.hex(), shard)
    assert 0 < found.key < 1 << 63
