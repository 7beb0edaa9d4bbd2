-- Every serving server holds a version.
--
-- ARGV[2]  policy_version
-- Returns  {'ok'}; conflict: it is not announced.
-- Keeps    acknowledged never goes back while a version is announced; what is too old to be trained by
--          it or a later one is played again from now on.

allow_when_full()
local s = redis.call('HMGET', STATE, 'announced', 'acknowledged')
if not s[1] or tonumber(ARGV[2]) > tonumber(s[1]) then
  return {'conflict', 'policy_version=' .. ARGV[2] .. ' is not announced (announced='
    .. (s[1] or 'none') .. '); announce it first'}
end
if not s[2] or tonumber(ARGV[2]) > tonumber(s[2]) then
  redis.call('HSET', STATE, 'acknowledged', ARGV[2])
  repair_stale(depth_of(ARGV[2]) or tonumber(ARGV[2]))
end
return {'ok'}
