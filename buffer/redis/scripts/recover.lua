-- Bring the buffer to the state of the checkpoint from which the trainer resumes.
--
-- ARGV[2]  fence   ARGV[3] policy_version of the checkpoint, or '' if there is none
-- ARGV[4]  its next_slot   ARGV[5..] its group ids
-- Returns  {'ok', highest policy_version ever issued or -1}; fence.
-- Keeps    afterwards every slot below the cursor is in a surviving mark, held by one live group, in
--          `replay`, or was dropped with a reason; no live group holds a token of an abandoned
--          version; live groups are within admission; without a checkpoint no dead letter has a slot; no version is announced, so nothing is claimed before the next publish.

allow_when_full()
sweep()
local refused = fence_refusal(ARGV[2])
if refused then return refused end
local mark = number(ARGV[3])
local newest = mark or -1

-- Whatever state it is in: the checkpoint is the truth.
local function acknowledge_group(group_id)
  local f = redis.call('HMGET', group_key(group_id), 'slot', 'state')
  if f[2] ~= 'trained' then
    redis.call('HINCRBY', STATE, 'trained', 1)
    enter_scored(group_id, 'trained', 1)
  end
  archive_scored(group_id, 'trained', '', mark)
  end_group(group_id, 'acknowledged', 'discarded')
  redis.call('ZADD', key('trained_slots'), mark, f[1])
  count('acknowledged')
end

for i = 5, #ARGV do
  -- A Redis that lost its last writes may not know that the slot was started.
  local slot = string.match(ARGV[i], '^g(%d+)-')
  if slot then
    redis.call('ZREM', REPLAY, slot)
  end
  local state = redis.call('HGET', group_key(ARGV[i]), 'state')
  if state and state ~= 'dropped' and state ~= 'acknowledged' then
    acknowledge_group(ARGV[i])
  end
end
for _, version in ipairs(redis.call('HKEYS', VERSIONS)) do
  if tonumber(version) > newest then redis.call('HSET', VERSIONS, version, 'abandoned') end
end

local function is_abandoned(version)
  return version and version > newest
end

local function holds_abandoned(episode_id)
  local _, version = extent_of(episode_id)
  return is_abandoned(version)
end

local function give_up_abandoned_attempts(group_id)
  for _, source in ipairs(redis.call('LRANGE', resumable_key(group_id), 0, -1)) do
    if holds_abandoned(source) then
      redis.call('LREM', resumable_key(group_id), 0, source)
      replace_resumable(group_id, source, 'stale')
    end
  end
  local next_attempt = tonumber(redis.call('HGET', group_key(group_id), 'next_attempt'))
  for attempt = 0, next_attempt - 1 do
    local member = 't:' .. group_id .. ':' .. attempt
    local episode_id = redis.call('HGET', ATTEMPTS, member)
    if episode_id == '' then episode_id = source_of(group_id, attempt) end
    if episode_id and holds_abandoned(episode_id) then lose_attempt(member, 'stale') end
  end
end

for _, group_id in ipairs(redis.call('ZRANGE', GROUPS, 0, -1)) do
  local g = group_key(group_id)
  if not mark then
    drop_group(group_id, 'stale', false, false)
  elseif is_abandoned(number(redis.call('HGET', g, 'max_version'))) then
    drop_group(group_id, 'stale', true, false)
  elseif redis.call('HGET', g, 'state') == 'open' then
    give_up_abandoned_attempts(group_id)
    -- What it plays from now on may be sampled by weights older than those it began under.
    local f = redis.call('HMGET', g, 'begin_depth', 'slot')
    local begin = math.min(tonumber(f[1]), depth_of(ARGV[3]) or mark)
    redis.call('HSET', g, 'begin_depth', begin)
    redis.call('ZADD', OPEN_DEPTHS, depth_score(begin, tonumber(f[2])), group_id)
  else
    make_ready(group_id)
  end
end

-- Groups that are untrained again may exceed what admission allows: the newest are played later.
local provided, beyond = admission()
local excess = redis.call('ZCARD', GROUPS) - provided - beyond
if excess > 0 then
  for _, group_id in ipairs(redis.call('ZREVRANGE', GROUPS, 0, excess - 1)) do
    drop_group(group_id, 'stale', true, false)
  end
end

if mark then
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', key('trained_slots'), '(' .. mark, '+inf')) do
    redis.call('ZADD', REPLAY, slot, slot)
    redis.call('ZREM', key('trained_slots'), slot)
  end
  redis.call('ZREMRANGEBYSCORE', key('marks'), '(' .. mark, '+inf')
  redis.call('ZADD', key('marks'), mark, mark)
  local cursor = number(redis.call('HGET', STATE, 'cursor')) or 0
  redis.call('HSET', STATE, 'cursor', math.max(cursor, tonumber(ARGV[4])))
  redis.call('HSET', STATE, 'republished', mark)
else
  redis.call('DEL', key('trained_slots'), key('marks'), REPLAY)
  for _, group_id in ipairs(redis.call('LRANGE', DEAD, 0, -1)) do
    redis.call('HSET', dead_letter_key(group_id), 'slot', '')
  end
  redis.call('HSET', STATE, 'cursor', 0)
  redis.call('HDEL', STATE, 'republished')
end
-- What was interrupted with the last trainer is no fault of this one's runners.
local interrupted = 0
for _, member in ipairs(redis.call('HKEYS', ATTEMPTS)) do
  if string.sub(member, 1, 2) == 't:' then interrupted = interrupted + 1 end
end
for _, cause in ipairs({'cut', 'stale', 'failed'}) do
  redis.call('HSET', STATE, 'excused:' .. cause,
    redis.call('HGET', COUNTERS, 'resultless:' .. cause) or 0)
end
local counts = redis.call('HMGET', COUNTERS, 'train_attempts', 'resultless_attempts')
redis.call('HSET', STATE, 'base_attempts', number(counts[1]) or 0,
  'excused_attempts', (number(counts[2]) or 0) + interrupted)

local trained = number(redis.call('HGET', STATE, 'trained')) or 0
redis.call('HSET', STATE, 'admitted', trained + redis.call('ZCARD', GROUPS), 'held', 0)
redis.call('HDEL', STATE, 'announced', 'acknowledged', 'wait_cause', 'wait_since', 'leased_at')
local highest = math.max(number(redis.call('HGET', STATE, 'highest')) or -1, newest)
redis.call('HSET', STATE, 'highest', highest)
return {'ok', highest}
