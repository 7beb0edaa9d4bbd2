-- Score an episode, before or after it is closed.
--
-- ARGV[2]  episode_id   ARGV[3] idempotency key   ARGV[4] reward record   ARGV[5] its value
-- Returns  {'ok'}; not_found; conflict: the key was used with another reward; gone: its group is
--          sealed, or its attempt was replaced (counted as late_rewards).
-- Keeps    a closed episode that waited for its reward is entered into its group once; until the
--          group seals a later reward replaces an earlier one.

allow_when_full()
local episode_id = ARGV[2]
local e = episode_key(episode_id)
local f = redis.call('HMGET', e, 'member', 'closed', 'counted', 'r:' .. ARGV[3])
if not f[1] then
  return {'not_found', 'no episode_id=' .. episode_id}
end
if f[4] then
  if f[4] ~= ARGV[4] then
    return {'conflict', 'key=' .. ARGV[3] .. ' scored episode_id=' .. episode_id .. ' differently'}
  end
  return {'ok'}
end
local purpose, owner, attempt = split_member(f[1])
local bound = redis.call('HGET', ATTEMPTS, f[1]) == episode_id
local open = f[3] and (purpose == 'e' or redis.call('HGET', group_key(owner), 'state') == 'open')
if not bound and not open then
  count('late_rewards')
  return {'gone', 'episode_id=' .. episode_id .. ' was replaced or its group is sealed'}
end
redis.call('HSET', e, 'reward', ARGV[4], 'value', ARGV[5], 'r:' .. ARGV[3], ARGV[4])
if bound and f[2] then
  count_attempt(f[1], episode_id)
elseif open and purpose == 'e' then
  redis.call('HSET', eval_key(owner) .. ':rewards', attempt, ARGV[5])
end
return {'ok'}
