-- Renew every lease of a fence.
--
-- ARGV[2]  fence
-- Returns  {'ok', new deadline ms}; fence: replaced, or the leases expired before this call.
-- Keeps    all leases of the fence have one deadline.

allow_when_full()
sweep_leases()
local refused = fence_refusal(ARGV[2])
if refused then return refused end
redis.call('HSET', STATE, 'fence_deadline', now + rules.lease_ms)
return {'ok', tostring(now + rules.lease_ms)}
