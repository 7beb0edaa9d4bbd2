-- The run's keys and what every script needs; put before all scripts but init_run. It returns
-- {'empty'} by itself when the run's meta key is missing.
--
-- KEYS[1]  {run:0}:meta. It routes the call; every other key is derived from it and carries the
--          same hash tag, so no script leaves its primary of a cluster.
-- ARGV[1]  now in Unix ms, or 0: the clock of Redis.
-- A script returns {'ok', ...} or {code, sentence}; code is one of empty, not_found, gone,
-- abandoned, conflict, fence, replaced. It refuses before its first write, so a refusal changes
-- nothing, except where its header says otherwise.

local prefix = string.sub(KEYS[1], 1, -5)
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'empty', ''}
end

local function key(name) return prefix .. name end
local ATTEMPTS, COUNTERS, VERSIONS = key('attempts'), key('counters'), key('versions')
local function episode_key(episode_id) return prefix .. 'episode:' .. episode_id end

-- HINCRBY by a number that was computed. Lua has a -0, which Redis before 7 passes on as '-0' and
-- refuses as no integer; -0 + 0 is 0.
local function add(hash, field, by) return redis.call('HINCRBY', hash, field, by + 0) end
local function count(name, by) redis.call('HINCRBY', COUNTERS, name, by or 1) end
local function number(value) return value and tonumber(value) or nil end

-- How many publishes lead to a version; nil: it was abandoned by a rollback.
local function depth_of(version)
  local depth = redis.call('HGET', VERSIONS, version)
  if depth == 'abandoned' then return nil end
  return number(depth) or tonumber(version)
end

