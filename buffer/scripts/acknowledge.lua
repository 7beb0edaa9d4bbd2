-- A checkpoint is complete on disk: forget the groups that its weights contain.
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
for i = 6, #ARGV do
  local state = redis.call('HGET', group_key(ARGV[i]), 'state')
  if state == 'open' or state == 'ready' or state == 'dropped' then
    return {'fence', 'group_id=' .. ARGV[i] .. ' is ' .. state .. ', not leased; nothing was '
      .. 'acknowledged'}
  end
end
local done = 0
for i = 6, #ARGV do
  local state = redis.call('HGET', group_key(ARGV[i]), 'state')
  if state == 'leased' or state == 'trained' then
    acknowledge_group(ARGV[i], ARGV[3])
    done = done + 1
  end
end
local marks = key('marks')
redis.call('ZADD', marks, ARGV[3], ARGV[3])
local oldest = redis.call('ZREVRANGE', marks, ARGV[5], ARGV[5])[1]
if oldest then
  redis.call('ZREMRANGEBYSCORE', marks, '-inf', oldest)
  redis.call('ZREMRANGEBYSCORE', key('trained_slots'), '-inf', oldest)
end
redis.call('HSET', STATE, 'marked_version', ARGV[3], 'marked_slot', ARGV[4])
return {'ok', done}
