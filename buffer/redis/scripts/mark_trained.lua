-- The published weights contain these groups: give their admission credit back.
--
-- ARGV[2]  fence   ARGV[3] the published policy_version   ARGV[4..] group ids
-- Returns  {'ok'}; fence: not, or no longer, leased under this fence; conflict: policy_version is
--          not acknowledged by the servers, so the credit would start episodes too early.
-- Keeps    a group's credit returns once; a group already marked or acknowledged is skipped.

allow_when_full()
sweep_leases()
local refused = fence_refusal(ARGV[2])
if refused then return refused end
local acknowledged = number(redis.call('HGET', STATE, 'acknowledged'))
if not acknowledged or acknowledged < tonumber(ARGV[3]) then
  return {'conflict', 'policy_version=' .. ARGV[3] .. ' is not acknowledged by the servers; publish '
    .. 'and acknowledge it before marking its groups trained'}
end
local leased, seen = {}, {}
for i = 4, #ARGV do
  local g = group_key(ARGV[i])
  local state = redis.call('HGET', g, 'state')
  if state == 'open' or state == 'ready' or state == 'dropped' then
    return {'fence', 'group_id=' .. ARGV[i] .. ' is ' .. state .. ', not leased'}
  end
  if state == 'leased' and not seen[g] then
    seen[g] = true
    leased[#leased + 1] = ARGV[i]
  end
end
for _, group_id in ipairs(leased) do
  redis.call('HSET', group_key(group_id), 'state', 'trained', 'trained_version', ARGV[3])
  enter_scored(group_id, 'trained', 1)
end
redis.call('HINCRBY', STATE, 'trained', #leased)
count('trained', #leased)
release_held_credits()
return {'ok'}
