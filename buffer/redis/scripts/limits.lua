-- How many groups may be live, and why.
--
-- Returns  {'ok', pipeline_depth, max_staleness, over-provision in millionths, groups a step, groups
--          started for a step, started beyond them, groups live, what the controller decided last or ''}
-- Keeps    it writes nothing.

local provided, beyond = admission()
local s = redis.call('HMGET', STATE, 'admitted', 'trained', 'depth_cause')
return {'ok', rules.pipeline_depth, rules.max_staleness, rules.over_provision_ppm,
  rules.groups_per_step, provided, beyond, (number(s[1]) or 0) - (number(s[2]) or 0), s[3] or ''}
