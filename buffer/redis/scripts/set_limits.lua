-- Change how far ahead of the trainer episodes start, and how old a trained token may be.
--
-- ARGV[2]  pipeline_depth, 'auto' or ''   ARGV[3] max_staleness or ''; empty: as it is
-- Returns  {'ok'}
-- Keeps    they hold from now on, until the run is started again. What is too old under the new limit
--          is played again, and is excused from env.max_replaced_share: somebody chose that.

if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], 'pipeline_depth', ARGV[2])
  rules.pipeline_depth = ARGV[2]
end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'max_staleness', ARGV[3])
  rules.max_staleness = tonumber(ARGV[3])
  local served = redis.call('HGET', STATE, 'acknowledged')
  local before = number(redis.call('HGET', COUNTERS, 'resultless:stale')) or 0
  if served then repair_stale(depth_of(served) or tonumber(served)) end
  local excused = (number(redis.call('HGET', COUNTERS, 'resultless:stale')) or 0) - before
  redis.call('HINCRBY', STATE, 'excused_attempts', excused)
  redis.call('HINCRBY', STATE, 'excused:stale', excused)
end
return {'ok'}
