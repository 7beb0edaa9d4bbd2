-- Record one turn of an open episode.
--
-- ARGV[2]  episode_id   ARGV[3] turn_id   ARGV[4] parent turn_id or ''
-- ARGV[5]  turn record
-- ARGV[6]  oldest version among its trained tokens or ''
-- ARGV[7]  newest version among its output tokens or ''
-- ARGV[8]  1 if it starts a branch   ARGV[9] number of output tokens
-- ARGV[10] number of its prompt ids
-- ARGV[11] oldest version among its output tokens or ''
-- Returns  {'ok', number of the episode's turns, of their ids}; not_found: episode or parent turn;
--          gone: closed or replaced; abandoned: sampled by a version that a rollback abandoned (the
--          caller gives the attempt up, see give_up); conflict: the turn_id has another content.
-- Keeps    turns in the order of their first recording, each once; a turn that a resumed episode had
--          recorded counts as replayed, not as sampled.
--
-- It runs more often than all other scripts together, so it does not include lifecycle.lua, which
-- would double its cost.

local episode_id, turn_id, parent = ARGV[2], ARGV[3], ARGV[4]
local e = episode_key(episode_id)
local f = redis.call('HMGET', e, 'member', 'closed', 't:' .. turn_id, 't:' .. parent, 'min_depth',
  'max_version', 'num_tokens', 'resumes', 'tokens', 'min_version')
if not f[1] then
  return {'not_found', 'no episode_id=' .. episode_id}
end
if f[3] then
  local stored = redis.call('LINDEX', e .. ':turns', f[3])
  if stored and stored ~= ARGV[5] then
    return {'conflict', 'turn_id=' .. turn_id .. ' is recorded with another content'}
  end
  return {'ok', redis.call('LLEN', e .. ':turns'), tonumber(redis.call('HGET', e, 'tokens'))}
end
if f[2] then
  return {'gone', 'episode_id=' .. episode_id .. ' is closed'}
end
if redis.call('HGET', ATTEMPTS, f[1]) ~= episode_id then
  return {'gone', 'episode_id=' .. episode_id .. ' was replaced or its group is sealed'}
end
if parent ~= '' and not f[4] then
  return {'not_found', 'no parent_turn_id=' .. parent .. ' in episode_id=' .. episode_id}
end
local depth = ARGV[6] ~= '' and depth_of(ARGV[6])
local is_other = ARGV[7] ~= '' and ARGV[7] ~= ARGV[6]
if depth == nil or (is_other and depth_of(ARGV[7]) == nil) then
  return {'abandoned', 'turn_id=' .. turn_id
    .. ' holds tokens of a version that a rollback abandoned'}
end
local length = redis.call('RPUSH', e .. ':turns', ARGV[5])
local num_ids = (number(f[9]) or 0) + ARGV[9] + ARGV[10]
redis.call('HSET', e, 't:' .. turn_id, length - 1, 'num_tokens', (number(f[7]) or 0) + ARGV[9],
  'tokens', num_ids)
if depth and (not f[5] or depth < tonumber(f[5])) then redis.call('HSET', e, 'min_depth', depth) end
if ARGV[7] ~= '' and (not f[6] or tonumber(ARGV[7]) > tonumber(f[6])) then
  redis.call('HSET', e, 'max_version', ARGV[7])
end
-- Of evaluations alone, whose figures name the versions that they are of.
local is_eval = string.sub(f[1], 1, 1) == 'e'
if is_eval and ARGV[11] ~= '' and (not f[10] or tonumber(ARGV[11]) < tonumber(f[10])) then
  redis.call('HSET', e, 'min_version', ARGV[11])
end
local source = f[8]
while source do
  if redis.call('HEXISTS', episode_key(source), 't:' .. turn_id) == 1 then
    count('replayed_turns')
    count('replayed_tokens', ARGV[9])
    return {'ok', length, num_ids}
  end
  source = redis.call('HGET', episode_key(source), 'resumes')
end
count('turns')
count('output_tokens', ARGV[9])
if ARGV[8] == '1' then count('branches') end
return {'ok', length, num_ids}
