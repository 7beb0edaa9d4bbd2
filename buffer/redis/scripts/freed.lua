-- What shards hold yet of episodes that were freed.
--
-- ARGV[2..] entries whose turns were deleted there
-- Returns  {'ok', entry, ...}: some of those that are due, each `number shard episode_id`
-- Keeps    an entry until a client says that it has deleted what it names; twice is once.

allow_when_full()
for i = 2, #ARGV do redis.call('ZREM', key('freed'), ARGV[i]) end
local due = redis.call('ZRANGEBYSCORE', key('freed'), '-inf', now, 'LIMIT', 0, SWEEP_LIMIT)
return {'ok', unpack(due)}
