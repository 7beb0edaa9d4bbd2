-- Change the weights of the run's task sources.
--
-- ARGV[2]  the weights, one for each source
-- Returns  {'ok', the slot from which they hold}
-- Keeps    they hold from the first unclaimed slot, or, with priorities, from the first window without
--          a claimed slot; weights for later slots, which a restart without a checkpoint may leave,
--          are removed.

local weights = key('task_weights')
local slot = number(redis.call('HGET', STATE, 'cursor')) or 0
local window = number(redis.call('HGET', STATE, 'priority_window')) or 1
slot = math.ceil(slot / window) * window
local last = redis.call('LINDEX', weights, -1)
while last and tonumber(string.match(last, '^%d+')) >= slot do
  redis.call('LTRIM', weights, 0, -2)
  last = redis.call('LINDEX', weights, -1)
end
redis.call('RPUSH', weights, slot .. ' ' .. ARGV[2])
redis.call('HINCRBY', STATE, 'weights_revision', 1)
return {'ok', slot}
