-- Create the run's meta key, or enter the settings with which the launcher starts it again.
--
-- ARGV[2]  run_id   ARGV[3] digest   ARGV[4] schema   ARGV[5] seed
-- ARGV[6]  number of rule fields, then name, value for each
-- Returns  {'ok', 1 if created else 0}; conflict: schema or seed differ from the run's.
-- Keeps    all data but the registry of processes and the announced versions, which it clears.
-- It runs without core.lua, since it writes the meta key that core.lua checks.

local prefix = string.sub(KEYS[1], 1, -5)
local was = redis.call('HMGET', KEYS[1], 'schema', 'seed', 'run_id')
if was[3] and was[1] ~= ARGV[4] then
  return {'schema', was[1]}
end
if was[3] and was[2] ~= ARGV[5] then
  return {'conflict', 'run.seed=' .. ARGV[5] .. ' but the run was started with run.seed=' .. was[2]
    .. ', which fixes its task order; keep it, or choose another run.name'}
end
redis.call('HSET', KEYS[1], 'run_id', ARGV[2], 'digest', ARGV[3], 'schema', ARGV[4],
  'seed', ARGV[5])
for i = 0, tonumber(ARGV[6]) - 1 do
  redis.call('HSET', KEYS[1], ARGV[7 + 2 * i], ARGV[8 + 2 * i])
end
for _, name in ipairs({'servers', 'server_versions', 'server_memory', 'frozen_servers',
  'devices', 'parts', 'statuses'}) do
  redis.call('DEL', prefix .. name)
end
redis.call('HSET', prefix .. 'state', 'run_state', 'running')
redis.call('HDEL', prefix .. 'state', 'announced', 'acknowledged', 'paused')
return {'ok', was[3] and 0 or 1}
