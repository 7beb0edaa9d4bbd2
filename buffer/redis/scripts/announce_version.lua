-- Announce the next weights; claims stop until they are acknowledged, with buffer.max_staleness above 0
-- only before the first.
--
-- ARGV[2]  policy_version   ARGV[3] parent or ''
-- Returns  {'ok'}; conflict: the number was used before, or the parent was abandoned.
-- Keeps    numbers grow and are never reused; a version's depth is its parent's plus one, except for
--          the first one after a recover, which republishes the checkpoint's own weights. The
--          last KEPT_VERSIONS numbers stay on record; an earlier one counts with its number as its
--          depth, which is no less than the depth it had, and far too old for every batch.

-- With its parent, every one takes about 94 bytes for as long as the run is kept. Tokens and
-- checkpoints refer to versions of the last hours; an audit of a run reads the parents.
local KEPT_VERSIONS = 10000

allow_when_full()
local version = tonumber(ARGV[2])
local highest = number(redis.call('HGET', STATE, 'highest')) or -1
local parents = key('version_parents')
if version <= highest then
  local same = version == highest and redis.call('HGET', parents, ARGV[2]) == ARGV[3]
  if not same or redis.call('HGET', VERSIONS, ARGV[2]) == 'abandoned' then
    return {'conflict', 'policy_version=' .. ARGV[2] .. ' was issued before (highest=' .. highest
      .. '); versions are never reused'}
  end
  redis.call('HSET', STATE, 'announced', version)
  return {'ok'}
end
local depth = 0
if ARGV[3] ~= '' then
  depth = depth_of(ARGV[3])
  if not depth then
    return {'conflict', 'parent=' .. ARGV[3] .. ' was abandoned by a rollback'}
  end
  if redis.call('HGET', STATE, 'republished') ~= ARGV[3] then depth = depth + 1 end
end
if version - highest > KEPT_VERSIONS then
  redis.call('DEL', VERSIONS, parents)
else
  for old = math.max(highest - KEPT_VERSIONS + 1, 0), version - KEPT_VERSIONS do
    redis.call('HDEL', VERSIONS, old)
    redis.call('HDEL', parents, old)
  end
end
redis.call('HSET', VERSIONS, ARGV[2], depth)
redis.call('HSET', parents, ARGV[2], ARGV[3])
redis.call('HSET', STATE, 'announced', version, 'highest', version)
redis.call('HDEL', STATE, 'republished')
return {'ok'}
