-- The trainer will not train a group that it leased.
--
-- ARGV[2]  fence   ARGV[3] group_id   ARGV[4] reason
-- ARGV[5]  why, if it is to leave a dead letter, or ''
-- ARGV[6]  1 to hold its credit until the next take or mark_trained: a group started before that
--          would belong to the next batch and be sampled by this batch's weights
-- Returns  {'ok'}; fence: not, or no longer, leased under this fence.
-- Keeps    the credit is held or returned here, once; dropping twice is once; the slot of a group that
--          is dropped as stale is played again.

allow_when_full()
sweep_leases()
local refused = fence_refusal(ARGV[2])
if refused then return refused end
local state = redis.call('HGET', group_key(ARGV[3]), 'state')
if state == 'leased' then
  drop_group(ARGV[3], ARGV[4], ARGV[4] == 'stale', ARGV[6] == '1',
    ARGV[5] ~= '' and ARGV[5] or nil)
elseif state and state ~= 'dropped' then
  return {'fence', 'group_id=' .. ARGV[3] .. ' is ' .. state .. ', not leased'}
end
return {'ok'}
