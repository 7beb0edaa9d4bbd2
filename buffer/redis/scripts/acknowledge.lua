-- A checkpoint is complete on disk: free the groups that its weights contain.
--
-- ARGV[2]  fence   ARGV[3] policy_version   ARGV[4] next_slot   ARGV[5] marks to remember
-- ARGV[6..] group ids
-- Returns  {'ok', groups acknowledged now}; fence: the lease of one was lost, nothing is
--          acknowledged.
-- Keeps    all groups of the mark or none; their slots stay on record for the last marks, so that a
--          resume from an older checkpoint can play them again. Twice is once.

allow_when_full()
sweep_leases()
local refused = fence_refusal(ARGV[2])
if refused then return refused end
local ids, slots, seen, untrained, num_untrained = {}, {}, {}, {}, 0
for i = 6, #ARGV do
  local group_id = ARGV[i]
  local f = redis.call('HMGET', group_key(group_id), 'state', 'slot')
  local state = f[1]
  if state == 'open' or state == 'ready' or state == 'dropped' then
    return {'fence', 'group_id=' .. group_id .. ' is ' .. state .. ', not leased; nothing was '
      .. 'acknowledged'}
  end
  if (state == 'leased' or state == 'trained') and not seen[group_id] then
    seen[group_id] = true
    ids[#ids + 1] = group_id
    slots[#slots + 1] = ARGV[3]
    slots[#slots + 1] = f[2]
    if state == 'leased' then
      num_untrained = num_untrained + 1
      untrained[num_untrained] = group_id
    end
  end
end

-- A leased group is in no other index, none of its attempts is in flight or waits to be resumed,
-- and what its episodes resumed was freed when they were scored.
local freed = {}
local is_archived = archive_limit() > 0
for _, group_id in ipairs(untrained) do enter_scored(group_id, 'trained', 1) end
for _, group_id in ipairs(ids) do
  local g = group_key(group_id)
  if is_archived then archive_scored(group_id, 'trained', '', ARGV[3]) end
  for _, episode_id in ipairs(redis.call('LRANGE', g .. ':episodes', 0, -1)) do
    local e = episode_key(episode_id)
    if is_archived then
      free_episode(e)
    else
      redis.call('PEXPIRE', e, RETENTION_MS)
      freed[#freed + 1] = e .. ':turns'
    end
  end
  freed[#freed + 1] = g .. ':episodes'
  redis.call('HSET', g, 'state', 'acknowledged')
  redis.call('PEXPIRE', g, RETENTION_MS)
end
send_all(freed, function(...) redis.call('DEL', ...) end)
send_all(ids, function(...)
  redis.call('ZREM', GROUPS, ...)
  redis.call('ZREM', LEASES, ...)
end)
send_all(slots, function(...) redis.call('ZADD', key('trained_slots'), ...) end)
redis.call('HINCRBY', STATE, 'trained', num_untrained)
count('acknowledged', #ids)

local marks = key('marks')
redis.call('ZADD', marks, ARGV[3], ARGV[3])
local oldest = redis.call('ZREVRANGE', marks, ARGV[5], ARGV[5])[1]
if oldest then
  redis.call('ZREMRANGEBYSCORE', marks, '-inf', oldest)
  redis.call('ZREMRANGEBYSCORE', key('trained_slots'), '-inf', oldest)
end
redis.call('HSET', STATE, 'marked_version', ARGV[3], 'marked_slot', ARGV[4])
return {'ok', #ids}
