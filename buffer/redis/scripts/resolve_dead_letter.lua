-- Forget a dead letter, and play its slot again if ARGV[3] is 1.
--
-- ARGV[2]  group_id   ARGV[3] 1 to play its slot again
-- Returns  {'ok'}; not_found: no such dead letter (any more); conflict: its slot is played again anyway,
--          because the run has started over since then.
-- Keeps    a slot is requeued at most once for each time that it was dropped.

allow_when_full()
local slot = redis.call('HGET', dead_letter_key(ARGV[2]), 'slot')
if not slot then
  return {'not_found', 'no dead letter group_id=' .. ARGV[2]}
end
if ARGV[3] == '1' then
  if slot == '' then
    return {'conflict', 'group_id=' .. ARGV[2] .. ' was dropped before the run started over, which '
      .. 'plays its slot again anyway; drop the dead letter'}
  end
  redis.call('ZADD', REPLAY, slot, slot)
end
redis.call('LREM', DEAD, 0, ARGV[2])
discard_dead_letter(ARGV[2])
count(ARGV[3] == '1' and 'requeued_dead_letters' or 'discarded_dead_letters')
return {'ok'}
