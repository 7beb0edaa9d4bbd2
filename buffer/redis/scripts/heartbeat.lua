-- Note that a runner is alive.
--
-- ARGV[2]  runner_id
-- Returns  {'ok', for how long it may be silent, ms; 0: for ever}
-- Keeps    who is heard in time loses nothing. Who was silent for longer than env.max_runner_silence_s has
--          lost what it had claimed before, to resumption or replacement; what it claims from now on is
--          its own. Sweeps silent runners.

allow_when_full()
if rules.max_silence_ms > 0 then redis.call('ZADD', RUNNERS, now, ARGV[2]) end
sweep_runners()
return {'ok', rules.max_silence_ms}
