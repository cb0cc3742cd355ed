"""The scripts of the index: each changes one key, so a cluster may spread the keys.

Contract: `Script.call` gives the command that runs a script by its SHA-1, without its text. A
server that was started lately does not know the script: it replies `NOSCRIPT`, and has done
nothing. `in_full` gives the command with the text, after which the server knows it. Each script
takes only commands of Redis that docs/pool.md names for a user of the index.

If the memory of a server is full, a script goes on once it has written. So the first write of a
script that adds something is one that needs memory: then the server refuses the script as a whole.
"""

import hashlib

from kvfs.pool.connection import Command, Reply, ReplyError, Word

_TEXTS: dict[str, str] = {}  # by SHA-1


class Script:
    """One script, in Lua. Its only key is KEYS[1]."""

    def __init__(self, text: str) -> None:
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        _TEXTS[self.sha] = text

    def call(self, key: str, *arguments: Word) -> Command:
        """Return the command that runs the script."""
        return ("EVALSHA", self.sha, 1, key, *arguments)


def dated(digest: bytes, mtime_ns: int) -> tuple[str, str]:
    """Return a digest and a time of modification as the scripts take them."""
    return digest.hex(), f"{max(0, mtime_ns):019}"


def is_unknown(reply: Reply) -> bool:
    """Whether a server replies that it does not know a script."""
    return isinstance(reply, ReplyError) and str(reply).startswith("NOSCRIPT")


def in_full(command: Command) -> Command:
    """Return the command of a script with the script's text."""
    _, sha, *rest = command
    return ("EVAL", _TEXTS[str(sha)], *rest)


# Times of modification are compared as texts of 19 digits: numbers of Lua have 53 bits. A mark
# (`gone`) has the last digest that was removed, and the latest time of all that were. It outlives
# later versions of the name, since a copy of an earlier one may be announced again after them. If
# the same bytes are written again, the digest in the mark becomes 0, and the time stays.
_MARK = """
local function time(text)
  if not text or string.sub(text, 1, 1) == '-' then text = '0' end
  return string.rep('0', 19 - #text) .. text
end
local function marked(before, digest, mtime)
  local earlier = before and string.sub(before, 34) or ''
  return digest .. ' ' .. (mtime > earlier and mtime or earlier)
end
"""

# The digest that was announced first stands, unless it was unlinked or only dead nodes have it. But
# of two objects from before a loss of the index, the later one stands. Of two with the same time,
# the one with the greater digest does. Its attributes are those of the last program that has
# changed them, at any node.
# An object that left takes no name; "later": the node knows that it wrote the bytes of the mark
# again. An object in conflict goes with the one that had the name, or if it is earlier than a mark.
# It stays if the node of the mark tells it again: the object may have been written since.
# ARGV: "new", "again" or "later", the digest, its time, the field and value of the owner, "changed"
# or "same" attributes, digest and time of the one that it is in conflict with or "", the facts.
ANNOUNCE = Script(
    _MARK
    + """
local key, again = KEYS[1], ARGV[1] ~= 'new'
local known, gone = redis.call('HGET', key, 'kvfs-xxh3-128'), redis.call('HGET', key, 'gone')
if ARGV[7] ~= '' and gone and known ~= ARGV[2] then
  local digest = string.sub(gone, 1, 32)
  if digest == ARGV[7] or digest == ARGV[2] then return 'gone' end
  if ARGV[3] <= string.sub(gone, 34) then return 'gone' end
end
if known and known ~= ARGV[2] then
  local before = time(redis.call('HGET', key, 'kvfs-mtime-ns'))
  if not again or ARGV[3] .. ARGV[2] < before .. known then return 'conflict' end
end
if again and gone and known ~= ARGV[2] then
  local same = ARGV[1] == 'again' and string.sub(gone, 1, 32) == ARGV[2]
  if same or ARGV[3] <= string.sub(gone, 34) then return 'gone' end
end
if known and known ~= ARGV[2] then
  gone = marked(gone, known, time(redis.call('HGET', key, 'kvfs-mtime-ns')))
  redis.call('DEL', key)
  redis.call('HSET', key, 'gone', gone)
  known = nil
end
if not known then
  redis.call('HSET', key, unpack(ARGV, 9))
  redis.call('PERSIST', key)
  if gone and string.sub(gone, 1, 32) == ARGV[2] and ARGV[3] > string.sub(gone, 34) then
    redis.call('HSET', key, 'gone', string.rep('0', 32) .. string.sub(gone, 33))
  end
elseif ARGV[6] == 'changed' then
  for at = 9, #ARGV, 2 do
    local name = ARGV[at]
    if name == 'kvfs-mode' or name == 'kvfs-uid' or name == 'kvfs-gid' then
      redis.call('HSET', key, name, ARGV[at + 1])
    end
  end
end
redis.call('HSET', key, ARGV[4], ARGV[5])
return 'here'
"""
)

# Remove one owner, and the object with its last one. ARGV: the field of the owner, seconds to
# remember a mark, and perhaps the only value that the field may have.
WITHDRAW = Script(
    """
local key = KEYS[1]
if ARGV[3] and redis.call('HGET', key, ARGV[1]) ~= ARGV[3] then return 'kept' end
redis.call('HDEL', key, ARGV[1])
for _, name in ipairs(redis.call('HKEYS', key)) do
  if string.sub(name, 1, 1) == '@' then return 'kept' end
end
local known, gone = redis.call('HEXISTS', key, 'kvfs-xxh3-128'), redis.call('HGET', key, 'gone')
if gone and known == 0 then return 'kept' end
redis.call('DEL', key)
if gone then
  redis.call('HSET', key, 'gone', gone)
  redis.call('EXPIRE', key, ARGV[2])
end
return 'gone'
"""
)

# Remove an object with this digest, or an earlier one, for all nodes. ARGV: the digest, its time,
# seconds to remember it or 0, those for which a mark is remembered, and the digest of the mark: 0
# if a node tells it again.
UNLINK = Script(
    _MARK
    + """
local key = KEYS[1]
local known, gone = redis.call('HGET', key, 'kvfs-xxh3-128'), redis.call('HGET', key, 'gone')
if ARGV[3] ~= '0' then gone = marked(gone, ARGV[5], ARGV[2]) end
if known and known ~= ARGV[1] and time(redis.call('HGET', key, 'kvfs-mtime-ns')) >= ARGV[2] then
  if gone then redis.call('HSET', key, 'gone', gone) end
  return 'other'
end
redis.call('DEL', key)
if gone then
  redis.call('HSET', key, 'gone', gone)
  redis.call('EXPIRE', key, ARGV[4])
end
return 'gone'
"""
)

# Only a greater version replaces another. ARGV: the version.
VERSION = Script(
    """
local known = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
if not known or known < tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'version', ARGV[1])
end
return 'here'
"""
)

# Add keys while there is room for them. ARGV: MOST, OFFER_S, then the keys.
OFFER = Script(
    """
local room = tonumber(ARGV[1]) - #redis.call('SMEMBERS', KEYS[1])
for at = 3, math.min(#ARGV, room + 2) do redis.call('SADD', KEYS[1], ARGV[at]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 'here'
"""
)

# Take some keys. ARGV: how many.
TAKE = Script(
    """
local found = redis.call('SMEMBERS', KEYS[1])
local taken = {}
for at = 1, math.min(#found, tonumber(ARGV[1])) do
  taken[at] = found[at]
  redis.call('SREM', KEYS[1], found[at])
end
return taken
"""
)

# Try the commands of the other scripts, and reply with the error of one that the user may not use.
# Other errors count as tried: a full memory takes no new objects, and the pool serves on.
TRY = Script(
    """
local key = KEYS[1]
for _, words in ipairs({
  {'DEL', key}, {'HSET', key, 'a', 'b'}, {'HGET', key, 'a'}, {'HEXISTS', key, 'a'}, {'HKEYS', key},
  {'PERSIST', key}, {'EXPIRE', key, 1}, {'HDEL', key, 'a'}, {'DEL', key}, {'SADD', key, 'a'},
  {'SMEMBERS', key}, {'SREM', key, 'a'}, {'DEL', key}
}) do
  local reply = redis.pcall(unpack(words))
  local why = type(reply) == 'table' and reply.err or ''
  if string.find(why, 'NOPERM') or string.find(why, 'user executing the script') then
    return redis.error_reply('NOPERM ' .. words[1] .. ': ' .. why)
  end
end
return 'here'
"""
)
