-- Remember which budget an episode has spent; the first one stays.
--
-- ARGV[2]  episode_id   ARGV[3] the budget
-- Returns  {'ok'}; not_found.
-- Keeps    the first note of an episode.

local e = episode_key(ARGV[2])
if redis.call('HEXISTS', e, 'member') == 0 then
  return {'not_found', 'no episode_id=' .. ARGV[2]}
end
redis.call('HSETNX', e, 'budget', ARGV[3])
return {'ok'}
