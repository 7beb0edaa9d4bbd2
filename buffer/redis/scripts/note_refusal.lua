-- Count a refused model call of an open episode.
--
-- ARGV[2]  episode_id   ARGV[3] the refusal's code   ARGV[4] its sentence
-- ARGV[5]  1 if it told of a spent budget
-- Returns  {'ok'}; not_found.
-- Keeps    the number of refusals by code, the last sentence, the first budget that was spent; a
--          closed episode is not changed.

local e = episode_key(ARGV[2])
local f = redis.call('HMGET', e, 'member', 'closed', 'refusals')
if not f[1] then
  return {'not_found', 'no episode_id=' .. ARGV[2]}
end
if f[2] then return {'ok'} end
-- The sentence, then each code and its number.
local refusals = f[3] and cmsgpack.unpack(f[3]) or {''}
refusals[1] = ARGV[4]
local at = 2
while refusals[at] and refusals[at] ~= ARGV[3] do at = at + 2 end
refusals[at] = ARGV[3]
refusals[at + 1] = (refusals[at + 1] or 0) + 1
redis.call('HSET', e, 'refusals', cmsgpack.pack(refusals))
if ARGV[5] == '1' then redis.call('HSETNX', e, 'budget', ARGV[3]) end
return {'ok'}
