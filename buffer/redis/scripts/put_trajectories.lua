-- Store complete trajectories for supervised training; their records were staged before.
--
-- ARGV[2]  idempotency key   ARGV[3] 1 if no more will come   ARGV[4] token of the staged records
-- ARGV[5]  how many were staged, as staged:TOKEN:0, staged:TOKEN:1, ...
-- Returns  {'ok', number stored in all}; gone: a staged record is not there (any more).
-- Keeps    the order of arrival; the same key stores once; all of a call or nothing.

-- How many arguments fit on Lua's stack.
local MAX_ARGUMENTS = 1000

local stored = number(redis.call('HGET', STATE, 'sft_stored')) or 0
if redis.call('SISMEMBER', key('sft_keys'), ARGV[2]) == 0 then
  local staged = {}
  for i = 1, tonumber(ARGV[5]) do staged[i] = key('staged:' .. ARGV[4] .. ':' .. (i - 1)) end
  for first = 1, #staged, MAX_ARGUMENTS do
    local last = math.min(first + MAX_ARGUMENTS - 1, #staged)
    if redis.call('EXISTS', unpack(staged, first, last)) ~= last - first + 1 then
      return {'gone', 'a record was staged too long ago; store the trajectories again'}
    end
  end
  redis.call('SADD', key('sft_keys'), ARGV[2])
  for i = 1, #staged do
    redis.call('PERSIST', staged[i])
    redis.call('RENAME', staged[i], key('sft:' .. stored))
    stored = stored + 1
  end
  redis.call('HSET', STATE, 'sft_stored', stored)
end
if ARGV[3] == '1' then redis.call('HSET', STATE, 'sft_final', 1) end
return {'ok', stored}
