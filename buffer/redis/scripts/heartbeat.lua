-- Note that a runner is alive.
--
-- ARGV[2]  runner_id
-- Returns  {'ok', how long it may send no heartbeat, ms; 0: for ever}
-- Keeps    a runner with heartbeats in time loses nothing. After a pause of more than
--          env.max_runner_silence_s its earlier attempts are resumed or replaced; what it claims later
--          is not affected. Sweeps silent runners.

allow_when_full()
if rules.max_silence_ms > 0 then redis.call('ZADD', RUNNERS, now, ARGV[2]) end
sweep_runners()
return {'ok', rules.max_silence_ms}
