-- Put the attempts of one evaluation into the queue of evaluations.
--
-- ARGV[2]  name   ARGV[3] number of episodes   ARGV[4] sampling JSON   ARGV[5] policy_version
-- ARGV[6]  evaluations whose episodes are kept   ARGV[7] suite of tasks
-- ARGV[8]  how often each task is played; 0: all tasks, again and again
-- ARGV[9]  1 if training waits for it: then claims serve it first
-- Returns  {'ok'}; conflict: the name was used with other values; not_found: the suite has no tasks.
-- Keeps    one evaluation per name; the oldest ones make room: their episodes at once, the rest an
--          hour after they are over.

local e = eval_key(ARGV[2])
local was = redis.call('HMGET', e, 'requested', 'sampling')
if was[1] then
  if was[1] ~= ARGV[3] or was[2] ~= ARGV[4] then
    return {'conflict', 'name=' .. ARGV[2] .. ' was requested with other values'}
  end
  return {'ok'}
end
-- Before the tasks are registered nobody knows; claims find out.
local state = redis.call('HMGET', STATE, 'num_eval_tasks', 'suite:' .. ARGV[7])
if state[1] and not state[2] then
  return {'not_found', 'the run has no ' .. ARGV[7] .. ' tasks to evaluate; give env.eval_tasks, '
    .. 'env.split or tasks of the suite, or switch eval off'}
end
redis.call('HSET', e, 'requested', ARGV[3], 'total', ARGV[3], 'sampling', ARGV[4],
  'policy_version', ARGV[5], 'done', 0, 'suite', ARGV[7], 'samples', ARGV[8], 'blocks', ARGV[9])
for attempt = 0, tonumber(ARGV[3]) - 1 do
  redis.call('RPUSH', key('eval_queue'), ARGV[2] .. ':' .. attempt)
end
if redis.call('RPUSH', key('evals'), ARGV[2]) > tonumber(ARGV[6]) then
  local oldest = redis.call('LPOP', key('evals'))
  discard_episodes(eval_key(oldest) .. ':episodes')
  redis.call('HSET', eval_key(oldest), 'displaced', 1)
  expire_eval(oldest)
end
return {'ok'}
