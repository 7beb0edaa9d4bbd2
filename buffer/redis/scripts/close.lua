-- Close an episode and settle its attempt.
--
-- ARGV[2]  episode_id   ARGV[3] idempotency key   ARGV[4] closure record, reward included
-- ARGV[5]  reward record or ''   ARGV[6] its value or ''
-- ARGV[7]  failure kind if the attempt must not count without a reward, else ''
-- ARGV[8]  1 if the attempt must not count at all   ARGV[9] 1 if the agent or its environment failed
-- Returns  {'ok', 1 if it counted else 0, sealed group_id or ''}; not_found; conflict: the key closed
--          it with another content; gone: it was closed under another key.
-- Keeps    an attempt is scored, replaced or still waiting for its reward, and only one of these;
--          a repeated close changes nothing and gets the first answer.

allow_when_full()
local episode_id = ARGV[2]
local e = episode_key(episode_id)
local f = redis.call('HMGET', e, 'member', 'closed', 'close_key', 'closure', 'value', 'counted',
  'sealed')
if not f[1] then
  return {'not_found', 'no episode_id=' .. episode_id}
end
if f[2] then
  if f[3] ~= ARGV[3] then
    return {'gone', 'episode_id=' .. episode_id .. ' is closed already'}
  end
  if f[4] ~= ARGV[4] then
    return {'conflict', 'key=' .. ARGV[3] .. ' closed episode_id=' .. episode_id .. ' differently'}
  end
  return {'ok', f[6] and 1 or 0, f[7] or ''}
end
local bound = redis.call('HGET', ATTEMPTS, f[1]) == episode_id
redis.call('HSET', e, 'closed', now, 'close_key', ARGV[3], 'closure', ARGV[4])
count('closed')
if ARGV[9] == '1' then keep_failed(episode_id) end
if not bound then
  if ARGV[5] ~= '' then count('late_rewards') end
  return {'ok', 0, ''}
end
local has_reward = f[5] or ARGV[5] ~= ''
if ARGV[8] == '1' or (ARGV[7] ~= '' and not has_reward) then
  if ARGV[7] == 'environment' and redis.call('EXISTS', e .. ':turns') == 0 then
    count('failed_before_turns')
  end
  lose_attempt(f[1], ARGV[7])
  return {'ok', 0, ''}
end
if ARGV[5] ~= '' then redis.call('HSET', e, 'reward', ARGV[5], 'value', ARGV[6]) end
if not has_reward then
  return {'ok', 0, ''}
end
local sealed = count_attempt(f[1], episode_id)
if sealed == false then return {'ok', 0, ''} end
sealed = sealed or ''
redis.call('HSET', e, 'sealed', sealed)
return {'ok', 1, sealed}
