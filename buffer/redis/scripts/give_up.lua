-- Give up the attempt of an open episode: its next turn holds tokens of an abandoned version.
--
-- ARGV[2]  episode_id
-- Returns  {'ok'}
-- Keeps    the attempt is replaced; an episode that is closed, replaced or unknown is left alone.

allow_when_full()
local member = redis.call('HGET', episode_key(ARGV[2]), 'member')
if member and redis.call('HGET', ATTEMPTS, member) == ARGV[2] then lose_attempt(member, 'stale') end
return {'ok'}
