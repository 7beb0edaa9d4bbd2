-- Store complete trajectories for supervised training.
--
-- ARGV[2]  idempotency key   ARGV[3] 1 if no more will come   ARGV[4..] trajectory records
-- Returns  {'ok', number stored in all}
-- Keeps    the order of arrival; the same key stores once.

if redis.call('SADD', key('sft_keys'), ARGV[2]) == 1 then
  for i = 4, #ARGV do redis.call('XADD', key('sft'), '*', 'd', ARGV[i]) end
end
if ARGV[3] == '1' then redis.call('HSET', STATE, 'sft_final', 1) end
return {'ok', redis.call('XLEN', key('sft'))}
