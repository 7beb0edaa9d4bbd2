-- Fix the run's tasks, once.
--
-- ARGV[2]  digest of all tasks   ARGV[3] number of tasks   ARGV[4] number of evaluation tasks
-- ARGV[5]  'begin' before the tasks are written, 'commit' after
-- ARGV[6]  their sources   ARGV[7] the weights of these at the beginning
-- ARGV[8]  the suites of which the evaluation tasks consist, in order: name and number of tasks
-- ARGV[9]  priorities of the tasks, or '' if all are equal   ARGV[10] in windows of how many slots
-- Returns  {'ok', 1 if the tasks are complete already else 0}; conflict: other tasks are there.
-- Keeps    claims see either no tasks or all of them.

local was = redis.call('HMGET', STATE, 'tasks_digest', 'num_tasks')
if was[1] and was[1] ~= ARGV[2] then
  return {'conflict', 'the run already has other tasks; a run keeps its tasks and their order. '
    .. 'Choose another run.name; if a function makes the tasks, let it make the same ones at every '
    .. 'call, for example by a seed'}
end
if ARGV[5] == 'begin' then
  redis.call('HSET', STATE, 'tasks_digest', ARGV[2])
else
  redis.call('HSET', STATE, 'num_tasks', ARGV[3], 'num_eval_tasks', ARGV[4], 'sources', ARGV[6])
  local first = 0
  for name, number in string.gmatch(ARGV[8], '(%S+) (%d+)') do
    if number ~= '0' then redis.call('HSET', STATE, 'suite:' .. name, first .. ' ' .. number) end
    first = first + tonumber(number)
  end
  if ARGV[9] ~= '' then
    redis.call('SET', key('task_priorities'), ARGV[9])
    redis.call('HSET', STATE, 'priority_window', ARGV[10])
  end
  if redis.call('EXISTS', key('task_weights')) == 0 then
    redis.call('RPUSH', key('task_weights'), '0 ' .. ARGV[7])
  end
end
return {'ok', was[2] and 1 or 0}
