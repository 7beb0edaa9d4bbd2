-- Become the one trainer: every earlier fence is refused from now on.
--
-- Returns  {'ok', fence}
-- Keeps    groups leased and not trained under an earlier fence are ready again; those trained but
--          not acknowledged wait for recover.

allow_when_full()
release_leases()
release_held_credits()
local fence = redis.call('HINCRBY', STATE, 'fence', 1)
redis.call('HSET', STATE, 'fence_deadline', now + rules.lease_ms)
redis.call('HDEL', STATE, 'lost_fence')
redis.call('DEL', key('last_take'), WAKE)
return {'ok', fence}
