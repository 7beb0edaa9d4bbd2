-- Keep trajectories from elsewhere, to be looked at and exported again; nothing trains them.
--
-- ARGV[2..] episode_id, trajectory record, for each
-- Returns  {'ok', number that were new}; conflict: an episode_id was imported with another content.
-- Keeps    all of them or none.

local imported = key('imported')
for i = 2, #ARGV, 2 do
  local known = redis.call('HGET', imported, ARGV[i])
  if known and known ~= ARGV[i + 1] then
    return {'conflict', 'episode_id=' .. ARGV[i] .. ' was imported with another content'}
  end
end
local added = 0
for i = 2, #ARGV, 2 do added = added + redis.call('HSET', imported, ARGV[i], ARGV[i + 1]) end
return {'ok', added}
