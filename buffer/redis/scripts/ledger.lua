-- What happened to every attempt that started.
--
-- Returns  {'ok', attempts of training, of evaluations that are open, field, number, field, ...}: the
--          fields of `ledger`, KIND:started and KIND:COLUMN:n, :ms, :tokens, :s:BOUND and :t:BOUND.
-- Keeps    it writes nothing. Attempts that are open are counted where they are, not inferred.

local open = {t = 0, e = 0, o = 0}
for _, member in ipairs(redis.call('HKEYS', ATTEMPTS)) do
  local purpose = string.sub(member, 1, 1)
  open[purpose] = open[purpose] + 1
end
for _, group_id in ipairs(redis.call('ZRANGE', GROUPS, 0, -1)) do
  local f = redis.call('HMGET', group_key(group_id), 'state', 'scored')
  if f[1] ~= 'trained' then
    open.t = open.t + tonumber(f[2]) + redis.call('LLEN', resumable_key(group_id))
  end
end
local answer = {'ok', open.t, open.e + open.o}
for _, word in ipairs(redis.call('HGETALL', LEDGER)) do answer[#answer + 1] = word end
return answer
