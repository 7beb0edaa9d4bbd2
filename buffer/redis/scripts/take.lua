-- Lease the `num` oldest ready groups, or none if fewer are ready.
--
-- ARGV[2]  fence   ARGV[3] num   ARGV[4] policy_version of the trainer   ARGV[5] token of this take
-- Returns  {'ok', 1, leases, deadline ms, field, field, ...} with leases as MessagePack
--          [[group_id, slot, size, task_id, [episode_id, ...]], ...] and, for every episode in turn, its
--          opening, closure, reward and closed, or
--          {'ok', 0, ready groups, attempts in flight, open groups}; fence; replaced: since the
--          trainer's start too large a share of attempts ended without a result.
-- Keeps    no leased group is buffer.take_window slots or more ahead of the oldest open one;
--          a leased group is fresh enough for policy_version; staler ones are dropped on the way and
--          give their credit back; the same token returns the same leases. Sweeps first; credits
--          held since a drop are released, because the trainer needs groups now.

-- With fewer attempts the share means little.
local MIN_ATTEMPTS = 200

local function too_many_replaced()
  local c = redis.call('HMGET', COUNTERS, 'train_attempts', 'resultless_attempts')
  local base = redis.call('HMGET', STATE, 'base_attempts', 'excused_attempts')
  local attempts = (number(c[1]) or 0) - (number(base[1]) or 0)
  local resultless = (number(c[2]) or 0) - (number(base[2]) or 0)
  if attempts < MIN_ATTEMPTS or resultless <= rules.max_replaced_share * attempts then
    return nil
  end
  local worst = redis.call('ZREVRANGE', key('replaced_tasks'), 0, 0, 'WITHSCORES')
  local most = worst[1] and (', most often of task_id=' .. worst[1] .. ' (' .. worst[2] .. ')') or ''
  local parts = redis.call('HMGET', COUNTERS, 'resultless:cut', 'resultless:stale',
    'resultless:failed')
  local were = redis.call('HMGET', STATE, 'excused:cut', 'excused:stale', 'excused:failed')
  local num_failed, causes = resultless, {}
  local sentences = {
    '%d were cut by their group\'s deadline: raise buffer.group_deadline_s, or leave it out',
    '%d were too old when their group was ready: leave buffer.take_window out, so that slow groups '
      .. 'are waited for, lower buffer.pipeline_depth, or raise buffer.max_staleness',
    '%d were scored in groups that too few others finished'}
  for i = 1, 3 do
    local part = (number(parts[i]) or 0) - (number(were[i]) or 0)
    num_failed = num_failed - part
    if part > 0 then causes[#causes + 1] = string.format(sentences[i], part) end
  end
  if num_failed > 0 then
    table.insert(causes, 1, string.format('%d failed or were lost%s: look for what failed in the '
      .. 'logs of the runners, the router and the servers', num_failed, most))
  end
  return {'replaced', string.format('%d of %d attempts since the trainer started ended without a '
    .. 'result that is trained; env.max_replaced_share=%g allows a share of %g. Training on the '
    .. 'rest would favour short episodes. %s. Then start the run again, which resumes; or raise '
    .. 'env.max_replaced_share', resultless, attempts, rules.max_replaced_share,
    rules.max_replaced_share, table.concat(causes, '; '))}
end

local function answer(packed, leases, deadline)
  local found = {'ok', 1, packed, deadline}
  for _, lease in ipairs(leases) do
    for _, episode_id in ipairs(lease[5]) do
      local f = redis.call('HMGET', episode_key(episode_id), 'opening', 'closure', 'reward', 'closed')
      for i = 1, 4 do found[#found + 1] = f[i] end
    end
  end
  return found
end

allow_when_full()
sweep()
local refused = fence_refusal(ARGV[2])
if refused then return refused end
local last = redis.call('GET', key('last_take'))
if last and string.sub(last, 1, #ARGV[5]) == ARGV[5] then
  local packed = string.sub(last, #ARGV[5] + 1)
  return answer(packed, cmsgpack.unpack(packed), redis.call('HGET', STATE, 'fence_deadline'))
end
refused = too_many_replaced()
if refused then return refused end
release_held_credits()
local num = tonumber(ARGV[3])
redis.call('HSET', STATE, 'wanted', num)
local depth = depth_of(ARGV[4]) or tonumber(ARGV[4])
for _, group_id in ipairs(redis.call('ZRANGEBYSCORE', READY_DEPTHS, '-inf',
    '(' .. depth_score(depth - rules.max_staleness, 0))) do
  drop_group(group_id, 'stale', false, false)
end
-- The oldest open group holds the window: groups far ahead of it wait, however fast they were.
local function highest_slot()
  local oldest = redis.call('ZRANGE', OPEN, 0, 0, 'WITHSCORES')[2]
  if rules.take_window == 0 or not oldest then return '+inf' end
  return '(' .. (tonumber(oldest) + rules.take_window)
end
local ready = redis.call('ZRANGEBYSCORE', READY, '-inf', highest_slot(), 'WITHSCORES',
  'LIMIT', 0, num)
if #ready < 2 * num then
  return {'ok', 0, #ready / 2, redis.call('HLEN', ATTEMPTS),
    redis.call('ZCARD', OPEN)}
end
local leases, ids, slots = {}, {}, {}
for i = 1, #ready, 2 do
  local group_id, slot = ready[i], ready[i + 1]
  local g = group_key(group_id)
  local f = redis.call('HMGET', g, 'size', 'task_id')
  redis.call('HSET', g, 'state', 'leased')
  leases[#leases + 1] = {group_id, tonumber(slot), tonumber(f[1]), f[2],
    redis.call('LRANGE', g .. ':episodes', 0, -1)}
  ids[#ids + 1] = group_id
  slots[#slots + 1] = slot
  slots[#slots + 1] = group_id
end
-- They are the lowest of their scores.
redis.call('ZREMRANGEBYRANK', READY, 0, num - 1)
send_all(ids, function(...) redis.call('ZREM', READY_DEPTHS, ...) end)
send_all(slots, function(...) redis.call('ZADD', LEASES, ...) end)
local deadline = now + rules.lease_ms
redis.call('HSET', STATE, 'fence_deadline', deadline)
local packed = cmsgpack.pack(leases)
redis.call('SET', key('last_take'), ARGV[5] .. packed)
count('leased', #leases)
return answer(packed, leases, tostring(deadline))
