-- Keep complete trajectories for supervised training, whose records were staged beforehand.
--
-- ARGV[2]  idempotency key   ARGV[3] 1 if no more will come   ARGV[4] token of the staged records
-- ARGV[5]  how many were staged, as staged:TOKEN:0, staged:TOKEN:1, ...
-- Returns  {'ok', number stored in all}; gone: a staged record is not there (any more).
-- Keeps    the order of arrival; the same key stores once; all of a call or nothing.

local stored = number(redis.call('HGET', STATE, 'sft_stored')) or 0
if redis.call('SISMEMBER', key('sft_keys'), ARGV[2]) == 0 then
  local staged = key('staged:' .. ARGV[4] .. ':')
  for i = 0, tonumber(ARGV[5]) - 1 do
    if redis.call('EXISTS', staged .. i) == 0 then
      return {'gone', 'record ' .. i .. ' was staged too long ago; store the trajectories again'}
    end
  end
  redis.call('SADD', key('sft_keys'), ARGV[2])
  for i = 0, tonumber(ARGV[5]) - 1 do
    redis.call('PERSIST', staged .. i)
    redis.call('RENAME', staged .. i, key('sft:' .. stored))
    stored = stored + 1
  end
  redis.call('HSET', STATE, 'sft_stored', stored)
end
if ARGV[3] == '1' then redis.call('HSET', STATE, 'sft_final', 1) end
return {'ok', stored}
